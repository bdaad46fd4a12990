"""A leader whose members hand their states over as a test says, without sockets or devices."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from decod.config.schema import Manifest
from decod.daemon.run_facts import RunPart
from decod.daemon.run_snapshot import SnapshotSources
from decod.driver.driver import CoreHandle, NodeDriver, ServedState
from decod.errors import NetworkError
from decod.ids import NodeId, RunId
from decod.journal.run_progress import RunProgress
from decod.limits import StageBlocks
from decod.membership.statements import new_charter
from decod.net.storing import NoStoreError
from decod.protocol.core.effects import FetchState
from decod.protocol.core.events import BlockCommits, Event
from decod.protocol.core.jobs import Snapshot
from decod.protocol.core.view import View
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from decod.train.checkpoint.description import Description, StateSink, parse_description
from decod.train.checkpoint.shared import SharedCheckpoints
from tests.support.checkpoints import MODEL, RUN_ID, STAGES, arrive, random_blob
from tests.support.members import data_node
from tests.support.noted import noted
from tests.unit.protocol.cast import view_of
from tests.unit.train.checkpoint.test_stage_states import described


class Member:
    """A relay: takes its copy, and lets it travel, when it is allowed to."""

    def __init__(self) -> None:
        self.may_copy, self.may_send = asyncio.Event(), asyncio.Event()
        self.may_copy.set()
        self.may_send.set()
        self.dies_sending = False
        self.manifest: str | None = None
        self.parameter_hash = ""
        """Of what it gives."""
        self.num_asked = 0
        self.share: SharedCheckpoints | None = None
        """The store in which it writes its stage's part, if it has one."""
        self.num_parts = 0
        """How often it was asked to."""


class FakeRun:
    """What `run_snapshot` and `Checkpoints` use of a leader."""

    def __init__(self, state_dir: Path, *members: str, iteration: int = 5) -> None:
        self.blocked: list[bool] = []
        self.lent = 0
        """Copies in memory that have not been given back: those of the leader's own stage."""
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.members = {NodeId(name): Member() for name in members}
        self.on_device = iteration
        """What the device holds, as it says if it is asked directly."""
        self.on_disks: set[int] = set()
        """Iterations of which disks keep all states, this node's own included."""
        self.leader = SimpleNamespace(
            view=view_of("d0", *members, num_stages=2),
            committed=iteration,
            anchor=iteration,
            loss=2.5,
            hashes=(),
            marks=(),
            origin=None,
        )
        run = RunConfig(
            name="test", model=MODEL, stages=STAGES, batch=BatchConfig(sequence_length=8)
        )
        self.manifest = Manifest(run=run, data_index_sha256="0" * 64, data_vocab_size=19)
        self.progress = RunProgress(iteration=iteration)
        self.driver = SimpleNamespace(
            facts=SimpleNamespace(leading=self.leader),
            stopped=asyncio.get_running_loop().create_future(),
            post=self._post,
            request_state=self._request_state,
            run_copy=self._run_copy,
            broken=False,
            allocate_state=self._allocate,
        )
        self.device_gone = self.ending = False
        core = CoreHandle()
        core.attach(cast("NodeDriver", self.driver))
        self.sources = SnapshotSources(
            core=core,
            progress=self.progress,
            fetch=self._fetch_state,
            write_part=self._write_part,
            load=self._load_kept,
            state_bytes=0,
            device_gone=lambda: self.device_gone,
            ending=lambda: self.ending,
        )
        self.part = RunPart(
            membership=data_node("leader"),
            run_id=RunId(RUN_ID),
            manifest=self.manifest,
            charter=new_charter(data_node("leader"), RunId(RUN_ID), self.manifest.to_json()),
            leader=self.view.members[0].node_id,
        )

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    @property
    def is_blocked(self) -> bool:
        return bool(self.blocked) and self.blocked[-1]

    @property
    def view(self) -> View:
        view: View = self.leader.view
        return view

    def commit(
        self, iteration: int, *, num_deferred: int = 0, loss: float = 2.5, averaged: bool = True
    ) -> None:
        """Commit an iteration, as the leader's core tells it."""
        self.leader.committed = iteration
        if averaged:
            self.leader.anchor = self.on_device = iteration
        now_s = float(iteration)
        self.progress.take(noted("iteration.committed", {"num_deferred": num_deferred}, now_s))
        fields = {"iteration": f"{iteration}.1", "loss": loss, "num_tokens": 8}
        self.progress.take(noted("step.committed", fields, now_s))

    def go_back(self, iteration: int) -> None:
        """Go back to an iteration, as the leader's core does when a stage was lost."""
        self.leader.committed = self.leader.anchor = iteration
        self.leader.loss = None
        fields = {"iteration": iteration, "source": "kept", "num_repeated": 1, "reason": "lost"}
        self.progress.take(noted("run.returned", fields, 0.0))

    def failures(self) -> list[str]:
        return [fields["reason"] for event, fields in self.notes if event == "checkpoint.failed"]

    def _post(self, event: Event) -> None:
        assert isinstance(event, BlockCommits)
        self.blocked.append(event.blocked)

    def _allocate(self, size_bytes: int) -> Any:
        self.lent += 1
        return SimpleNamespace(view=memoryview(bytearray(size_bytes)), release=self._free)

    def _free(self) -> None:
        self.lent -= 1

    async def _request_state(
        self,
        stage_index: int,
        iteration: int,
        *,
        with_optimizer: bool,
        cut: StageBlocks = (),
    ) -> ServedState:
        assert with_optimizer
        assert stage_index == 0
        blob = random_blob(0, seed=iteration)
        self.lent += 1
        return ServedState(iteration, describe(0, iteration), blob.data, self._free)

    async def _run_copy(self, job: Snapshot) -> ServedState:
        assert job == Snapshot(with_optimizer=True)
        return await self._request_state(0, self.on_device, with_optimizer=True)

    async def _load_kept(
        self, wanted: FetchState, allocate: Callable[[int], memoryview | None]
    ) -> str | None:
        if wanted.iteration not in self.on_disks:
            return None
        blob = random_blob(0, seed=wanted.iteration)
        buffer = allocate(len(blob.data))
        assert buffer is not None
        buffer[:] = blob.data
        return describe(0, wanted.iteration)

    async def _write_part(
        self, wanted: FetchState, folder: str, described: Callable[[Description], None]
    ) -> Description:
        assert wanted.stage_index == 1
        member = self.members[wanted.donors[0]]
        if member.share is None:
            raise NoStoreError("no store", why="it shares none", fix="fetch it")
        member.num_parts += 1
        await member.may_copy.wait()
        if wanted.iteration not in {self.on_device, self.leader.anchor}:
            raise NetworkError("refused", why="the state has moved on", fix="ask for another")
        blob = random_blob(1, seed=wanted.iteration)
        text = describe(1, wanted.iteration) if member.manifest is None else member.manifest
        description = parse_description(text)
        described(description)
        await member.may_send.wait()
        member.share.write_stage(folder, 1, blob)
        return description

    async def _fetch_state(
        self, wanted: FetchState, sink: StateSink, *, with_optimizer: bool
    ) -> str:
        assert with_optimizer
        assert wanted.stage_index == 1
        member = self.members[wanted.donors[0]]
        member.num_asked += 1
        await member.may_copy.wait()
        if wanted.iteration not in {
            self.on_device,
            self.leader.anchor,
            *self.on_disks,
        }:
            raise NetworkError("refused", why="the state has moved on", fix="ask for another")
        blob = random_blob(1, seed=wanted.iteration)
        text = describe(1, wanted.iteration) if member.manifest is None else member.manifest
        description = parse_description(text)
        sink.expect(description)
        buffer = sink.allocate(description.num_bytes)
        assert buffer is not None
        await member.may_send.wait()
        if wanted.parameter_hash not in ("", member.parameter_hash):
            raise NetworkError("another hash", why="it was given up", fix="ask another")
        if member.dies_sending:
            raise NetworkError("reset by peer", why="it has gone", fix="ask another")
        arrive(blob.data, description, buffer)
        return text


def describe(stage_index: int, iteration: int) -> str:
    """Returns what a member says of its state."""
    return described(stage_index, iteration)[0].text
