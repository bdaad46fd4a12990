"""Messages of members as they come: parsed in turn, and heard only from those who may say them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TypeVar

from decod.clocks import Stopwatch, wall_clock
from decod.errors import MalformedMessageError
from decod.ids import NodeId, RunId
from decod.membership.certificates import Caller
from decod.membership.identity import name_of
from decod.membership.papers import Membership
from decod.membership.statements import WayProofs
from decod.net.door import Door, FarEnd, caller_in
from decod.net.net_limits import Limits
from decod.protocol.core.messages import PASSES, LinkProbe, OfDataNodes, WithTensor
from decod.protocol.core.messages.membership_messages import Average
from decod.protocol.core.view import Role
from decod.wire.codec import Decoded

_WITH_TENSOR = (*PASSES, Average, LinkProbe)
"""Messages that are valid only with a tensor."""

_EXPIRIES_MAX = 20_000
"""Members whose certificate's end is remembered; beyond that all are forgotten."""

R = TypeVar("R")


class Turns:
    """A limit on the work on messages in each pass of the event loop. Use it in `async with`.

    Once the time of a pass is used up, entering waits for a later pass. Waiting callers enter in
    the order in which they asked. The work inside must not await: no other caller gets a turn
    meanwhile.

    Args:
        pass_max_s: Time for work on messages in one pass. One piece of work may overrun it.
    """

    def __init__(self, pass_max_s: float) -> None:
        self._pass_max_s = pass_max_s
        self._lock = asyncio.Lock()
        self._begun_s = 0.0
        self._spent_s = 0.0
        """Time used since the last wait for a later pass. At least as much as in this pass."""

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        if self._spent_s >= self._pass_max_s:
            self._spent_s = 0.0
            try:
                await asyncio.sleep(0)
            except BaseException:
                self._lock.release()
                raise
        self._begun_s = perf_counter()

    async def __aexit__(self, *exc_info: object) -> None:
        self._spent_s += perf_counter() - self._begun_s
        self._lock.release()


class MessageReader:
    """Parses what members say, and refuses what they may not.

    Args:
        membership: This node's.
        run_id: This run.
        door: Counts faults.
        limits: Sizes, and the time of turns.
        watch: Measures the time spent on parsing.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        door: Door,
        limits: Limits,
        watch: Stopwatch,
    ) -> None:
        self.node_id = membership.node_id
        self._run_id = run_id
        self._door = door
        self.limits = limits
        self.watch = watch
        self._proofs = WayProofs(membership, run_id, wall_clock)
        self._pool: ThreadPoolExecutor | None = None
        """Parses large messages, one at a time."""
        self.turns = Turns(limits.pass_max_s)
        self.expiries: dict[NodeId, float] = {}
        """The instants when the certificates end that other members have shown, in seconds of the
        Unix epoch."""

    def open(self) -> None:
        """Begin."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="decod-read")

    def close(self) -> None:
        """End."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def result(self, read: Callable[[bytes], R], data: bytes) -> Callable[[], R]:
        """Return a function that returns or raises what `read(data)` does.

        A large message has been parsed in a thread by then. A small one is parsed when the returned
        function is called, so that the time counts against this message's turn.
        """
        if len(data) <= self.limits.inline_size_max_bytes:
            return partial(read, data)
        assert self._pool is not None
        future = self._pool.submit(read, data)
        with suppress(MalformedMessageError):
            await asyncio.wrap_future(future)
        return future.result

    def checked(self, result: Callable[[], R], context: FarEnd, size_bytes: int) -> R | None:
        """Return the result of reading a message, or count its fault and return None."""
        try:
            with self.watch.measure("serialize"):
                return result()
        except MalformedMessageError as error:
            reason = f"{error.what}: {error.why}"
            self._door.blame("message.malformed", context, reason, size_bytes=size_bytes)
            return None

    def is_heard(self, decoded: Decoded, context: FarEnd, *, with_tensor: bool = False) -> bool:
        """Return whether a message comes from another node of this run and is of the expected
        kind."""
        caller = caller_in(context)
        assert caller is not None, "others are refused before this"
        self._see(caller)
        if decoded.run_id != self._run_id:
            self._door.blame("message.foreign", context, f"run {decoded.run_id}")
            return False
        if decoded.sender == self.node_id or decoded.sender != caller.node_id:
            reason = f"it says that it is from {decoded.sender}, and {caller.node_id} has sent it"
            self._door.blame("message.forged", context, reason)
            return False
        message = decoded.message
        if fault := self._fault_of(decoded, caller):
            self._door.blame("message.forged", context, fault)
            return False
        if with_tensor:
            fits = isinstance(message, WithTensor)
        else:
            fits = not isinstance(message, _WITH_TENSOR)
        if not fits:
            what = f"{type(message).__name__} {'with' if with_tensor else 'without'} a tensor"
            self._door.blame("message.malformed", context, what)
        return fits

    def _fault_of(self, decoded: Decoded, caller: Caller) -> str:
        """Return why nobody who may say a message has said it; empty if somebody has."""
        message = decoded.message
        way = decoded.way
        is_data = caller.is_data
        kind = type(message).__name__
        if way is not None and decoded.sender != way.origin:
            try:
                is_data = self._proofs.author_of(message, way).role is Role.DATA
            except MalformedMessageError as error:
                return f"{kind} that {way.origin} is said to have sent: {error.what}"
        if isinstance(message, OfDataNodes) and not is_data:
            who = "a volunteer" if way is None else f"{name_of(way.origin)}, a volunteer"
            return f"{kind} of {who}"
        return ""

    def _see(self, caller: Caller) -> None:
        """Remember when a member's certificate ends."""
        if len(self.expiries) >= _EXPIRIES_MAX:
            self.expiries.clear()
        self.expiries[caller.node_id] = caller.expires_s
