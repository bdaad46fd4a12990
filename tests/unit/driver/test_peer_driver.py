"""The driver of a collaborative run's peer: copies of the loop's state."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.driver.arena import ArenaAllocator, Sizes
from decod.driver.compute import Compute
from decod.driver.peer_driver import PeerDriver, PeerPorts, PeerTransport, StateCopy
from decod.ids import NodeId
from decod.protocol.collaboration.loop import LoadState, RoundConfig
from decod.protocol.collaboration.peer import PeerMachine
from decod.protocol.core.messages.round_messages import Height

START = Height(0, "0" * 64)
SIZES = Sizes(activation_bytes=0, wire_element_bytes=4, sum_element_bytes=4, num_parameters=2)


class NoTransport:
    def use_addresses(self, addresses: dict[NodeId, str]) -> None:
        """Nobody is there."""


async def _no_fetch(wanted: LoadState) -> StateCopy:
    raise AssertionError(wanted)


class Loop:
    """A driver of a lone peer, and what its loop is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        config = RoundConfig(target_batch_size=32)
        machine = PeerMachine(NodeId("a" * 52), "localhost:1", START, config)
        ports = PeerPorts(
            transport=cast("PeerTransport", NoTransport()),
            tell_loop=lambda kind, **fields: self.told.append((kind, fields)),
            fetch=_no_fetch,
            on_note=lambda _: None,
        )
        ended = asyncio.get_running_loop().create_future()
        compute = cast("Compute", SimpleNamespace(ended=ended))  # Nothing is averaged.
        self.driver = PeerDriver(machine, compute, ArenaAllocator(1 << 16), SIZES, ports)
        self.driver.start()

    def asked(self) -> int:
        """Return the request for the last copy that the loop was told to make."""
        kind, fields = self.told[-1]
        assert kind == "copy_state"
        return cast("int", fields["request"])


@pytest.mark.parametrize("number", [0, 1])
async def test_a_copy_of_another_round_than_was_asked_for_is_refused(
    number: int, tmp_path: Path
) -> None:
    loop, path = Loop(), tmp_path / "state"
    asking = asyncio.ensure_future(loop.driver.request_copy(START))
    await asyncio.sleep(0)
    path.touch()
    loop.driver.copied(loop.asked(), StateCopy(path, "{}", number))
    found = await asking
    assert path.exists() is (number == 0)
    assert found == (StateCopy(path, "{}", 0) if number == 0 else "it is at round 1")
    await loop.driver.close()


async def test_a_copy_that_nobody_waits_for_is_removed(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "state"
    asking = asyncio.ensure_future(loop.driver.request_copy(START))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    path.touch()
    loop.driver.copied(loop.asked(), StateCopy(path, "{}", 0))
    assert not path.exists()
    await loop.driver.close()
