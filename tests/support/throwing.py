"""Throwing of messages of all shapes at a daemon, to see how long its event loop pauses."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio

from decod.ids import RunId
from decod.membership.certificates import MEMBER_NAME
from decod.membership.papers import Membership
from decod.net import channel
from decod.net.net_limits import Limits
from tests.support.sending import sending_to
from tests.support.wire_shapes import TENSORS, Throw

_CONNECTIONS_MAX = 4
_CALL_TIMEOUT_S = 30.0
_BOLD = Limits(message_size_max_bytes=1 << 30)

Pauses = dict[str, float]


@dataclass(slots=True)
class Outcome:
    """Pauses of the event loop while messages were thrown."""

    longest: Pauses = field(default_factory=dict)
    """The longest pause, by kind: `wall_s`, `processor_s`."""
    worst: dict[str, str] = field(default_factory=dict)
    """The throw after which it came, by kind."""
    num_throws: int = 0

    def take(self, name: str, pauses: Pauses) -> None:
        """Take in the pauses after one throw."""
        self.num_throws += 1
        for kind, seconds in pauses.items():
            if seconds > self.longest.get(kind, 0.0):
                self.longest[kind], self.worst[kind] = seconds, name


def throw_all(
    address: tuple[str, int],
    run_id: RunId,
    by: Membership,
    throws: Iterable[Throw],
    pauses: Callable[[], Pauses],
    told: Callable[[str, Pauses], None] = lambda _name, _pauses: None,
) -> Outcome:
    """Throw one after the other, and return the outcome.

    Args:
        address: The daemon's address.
        run_id: The daemon's run.
        by: The member that throws.
        throws: Messages to throw, one after the other.
        pauses: Returns the longest pauses since the last call.
        told: Called after every throw.
    """
    outcome = Outcome()
    pauses()
    for throw in throws:
        asyncio.run(_throw(address, run_id, by, throw))
        found = pauses()
        outcome.take(throw.name, found)
        told(throw.name, found)
    return outcome


def sample(rng: random.Random, throws: Iterable[Throw], num: int) -> Iterator[Throw]:
    """Yield about `num` of the throws, in their order, and drop the others."""
    everything = list(throws)
    chosen = set(rng.sample(range(len(everything)), min(num, len(everything))))
    for index, throw in enumerate(everything):
        if index in chosen:
            yield throw


async def _throw(address: tuple[str, int], run_id: RunId, by: Membership, throw: Throw) -> None:
    if not throw.method:
        with socket.socket(type=socket.SOCK_DGRAM) as sender:
            for packet in throw.messages:
                sender.sendto(packet, address)
        return
    if throw.method == TENSORS:
        gate = asyncio.Semaphore(_CONNECTIONS_MAX)
        where = f"{address[0]}:{address[1]}"
        await asyncio.gather(*(_send(gate, where, by, throw) for _ in range(throw.num_calls)))
        return
    opened = [
        channel.open_channel(f"{address[0]}:{address[1]}", _BOLD, by.tls, MEMBER_NAME)
        for _ in range(min(_CONNECTIONS_MAX, throw.num_calls))
    ]
    calls = (_call(opened[i % len(opened)], run_id, throw) for i in range(throw.num_calls))
    await asyncio.gather(*calls)
    for each in opened:
        await each.close(None)


async def _send(gate: asyncio.Semaphore, address: str, by: Membership, throw: Throw) -> None:
    with suppress(OSError):
        async with gate, sending_to(address, by.tls) as sending, asyncio.timeout(_CALL_TIMEOUT_S):
            for data in throw.messages:
                await sending.raw(data)
            await sending.end()


async def _call(opened: grpc.aio.Channel, run_id: RunId, throw: Throw) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for message in throw.messages:
            yield message

    metadata = channel.run_metadata(run_id) if throw.names_run else None
    call = opened.stream_stream(throw.method)(
        messages(), timeout=_CALL_TIMEOUT_S, metadata=metadata
    )
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass  # Any refusal will do. Only its duration counts.
