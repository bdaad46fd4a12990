"""A stage is built once the weights that it does not train are here; later jobs wait."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decod.daemon.base_supply import BaseSupply
from decod.daemon.waits import OpenWaits
from decod.errors import DataError, NetworkError
from decod.ids import NodeId
from decod.net.donor import StateBlob
from decod.protocol.core.jobs import BaseJob, Build, Reset, Retract
from decod.protocol.core.view import Role
from decod.train.checkpoint.base import BaseSource, base_hashes
from tests.unit.train.checkpoint.test_base import MODEL, RUN
from tests.unit.train.test_executor_adapter import folder_of

OWN, LEADER, RELAY = NodeId("own"), NodeId("leader"), NodeId("relay")


class Device:
    """A compute process that notes its jobs, and does them at once."""

    def __init__(self) -> None:
        self.jobs: list[BaseJob] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def submit(self, job: BaseJob, **_: object) -> "asyncio.Future[Any]":
        self.jobs.append(job)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Bench:
    """A relay whose parts come from a node with a folder, when `open` is set."""

    def __init__(self, given: BaseSource, here: BaseSource) -> None:
        self.given = given
        self.open = asyncio.Event()
        self.refusals = 0
        self.asked: list[tuple[int, list[NodeId]]] = []
        self.notes: list[str] = []
        self.begun = asyncio.Event()
        self.left = asyncio.Event()
        # A candidate's view has no members.
        donors = (SimpleNamespace(node_id=RELAY, stage_index=1, role=Role.RELAY),)
        view = SimpleNamespace(
            members=(), leader=LEADER, num_stages=RUN.stages.num_relay_stages + 1, cut=()
        )
        facts = SimpleNamespace(view=view, node_id=OWN, donors=donors)
        core: Any = SimpleNamespace(driver=SimpleNamespace(facts=facts))
        self.supply = BaseSupply(
            here,
            RUN,
            core,
            fetch=self._fetch,
            note=self._note,
            waits=OpenWaits(self._note),
            leave=self._leave,
        )
        self.device = Device()
        self.compute = self.supply.before(self.device)  # type: ignore[arg-type]

    def _note(self, event: str, **_: object) -> None:
        self.notes.append(event)

    def _leave(self) -> None:
        self.left.set()

    async def _fetch(self, sha256: str, donors: Sequence[NodeId], sink: Any) -> None:
        part = self.given.hashes.index(sha256)
        self.asked.append((part, [*donors]))
        self.begun.set()
        await self.open.wait()
        if self.refusals:
            self.refusals -= 1
            raise NetworkError("no", why="not now", fix="later", code="E-NET-005")
        found = self.given.find(MODEL, part)
        assert found is not None
        sink.expect(found.description)
        buffer = sink.allocate(found.description.num_bytes)
        for chunk in found.description.chunks:
            buffer[chunk.offset : chunk.offset + chunk.num_bytes] = found.read(chunk.offset)


@pytest.fixture
def given(tmp_path: Path) -> BaseSource:
    folder = folder_of(tmp_path / "model", MODEL)
    return BaseSource(base_hashes(folder, MODEL), tmp_path / "leader", folder)


def here(given: BaseSource, tmp_path: Path) -> BaseSource:
    return replace(given, folder=None, cache=tmp_path / "relay")


async def test_jobs_wait_for_a_stage_and_keep_their_order(
    given: BaseSource, tmp_path: Path
) -> None:
    bench = Bench(given, here(given, tmp_path))
    async with bench.supply:
        jobs = [bench.compute.submit(job) for job in (Reset(), Build(1), Retract())]
        await bench.begun.wait()
        assert bench.device.jobs == [Reset()]
        bench.open.set()
        jobs.append(bench.compute.submit(Reset()))
        await asyncio.gather(*jobs)
        assert bench.device.jobs == [Reset(), Build(1), Retract(), Reset()]
        assert bench.asked == [(1, [RELAY, LEADER]), (2, [RELAY, LEADER])]
        # What is here is not fetched again.
        await bench.compute.submit(Build(1))
        assert len(bench.asked) == 2
    assert bench.notes == ["base.fetching", "base.fetched"]


async def test_others_are_asked_again_and_it_is_told_once(
    given: BaseSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decod.daemon.base_supply.Backoff.next_s", lambda _: 0.0)
    bench = Bench(given, here(given, tmp_path))
    bench.refusals = 3
    bench.open.set()
    async with bench.supply:
        await bench.compute.submit(Build(2))
    assert bench.device.jobs == [Build(2)]
    assert bench.notes.count("base.failed") == 1


async def test_a_folder_with_other_weights_ends_the_node(given: BaseSource, tmp_path: Path) -> None:
    other = replace(given, hashes=("0" * 64,) * 4)
    bench = Bench(given, other)

    async def live() -> None:
        async with bench.supply:
            bench.compute.submit(Build(1))
            await bench.left.wait()

    with pytest.raises(DataError, match="not those that the run adapts"):
        await live()
    assert bench.device.jobs == []


async def test_parts_are_given_to_who_asks(given: BaseSource, tmp_path: Path) -> None:
    donor = Bench(given, given).supply
    found = await donor.find(given.hashes[2])
    assert isinstance(found, StateBlob)
    assert '"model.layers.1.' in found.manifest
    assert await donor.find("0" * 64) == "the run has no such weights"
    lacking = Bench(given, here(given, tmp_path)).supply
    assert await lacking.find(given.hashes[2]) == "this node does not have these weights"
