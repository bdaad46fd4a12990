"""Every stage's state at one commit, gathered at the leader while training goes on.

It is the last commit, or the last that ended with an average if members step by themselves: what
they have learnt since is in no common state.

Commits are held until each stage has taken a copy of its state in its own memory, so that all
copies are of one iteration. Microbatches go on meanwhile. After that, commits go on too while the
copies travel. They go to a file as they arrive, so the leader's memory holds its own stage's copy
and a few chunks of the others.

A leader that fails gathers the states that are left. If its core has failed, it asks its device
directly. If its compute process has ended, stage 0 of the last iteration is lost. Then it gathers
the newest marked iteration, which all stages keep on disks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from decod.daemon.node_errors import no_member, not_begun
from decod.driver.arena import TensorRegion
from decod.driver.driver import CoreHandle, NodeDriver, ServedState
from decod.errors import DecodError, NetworkError
from decod.ids import NodeId
from decod.journal.run_progress import RunProgress
from decod.protocol.core.effects import FetchState
from decod.protocol.core.events import BlockCommits
from decod.protocol.core.jobs import Snapshot
from decod.protocol.core.view import Member, View
from decod.protocol.facts import LeaderFacts
from decod.run.run_config import RunConfig
from decod.tasks import cancelled
from decod.texts import clip
from decod.train.checkpoint.description import Description, QuietSink, copy_max_s, parse_description
from decod.train.checkpoint.entries import StateBytes

HOLD_MAX_S = 60.0
"""How long commits may be held, beside the time for copying. A copy takes two jobs of a device. A
member that takes longer than this must not hold up the others forever."""

_NUM_ATTEMPTS = 3
"""A member may be lost while its copy travels. By then commits go on, and the other members of its
stage are past the iteration, so another iteration is gathered."""


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """One stage's state."""

    description: Description
    """Of its member. The chunks of other stages have the hashes that it tells."""
    data: StateBytes | None
    """The blob: stage 0's in shared memory, valid until the context ends; any other one's where the
    destination put it. None: its member has written it as a part of the checkpoint."""


class Destination(Protocol):
    """Takes the states of the relay stages as they arrive."""

    def place(self, stage_index: int, description: Description) -> StateBytes:
        """Return the bytes of a state that is about to arrive. What came before is forgotten.

        Raises:
            DecodError: These are not the tensors of this stage.
            OSError: The disk refuses.
        """


class Parts(Protocol):
    """The parts of a checkpoint that members of the stages write themselves."""

    def new_folder(self, iteration: int) -> str:
        """Return the name of a new folder for the parts of one iteration."""
        ...

    def writers(self, stage_index: int, roster: Sequence[Member]) -> Iterable[NodeId]:
        """Return the members of a stage that may write its part, best first."""
        ...

    def expect(self, stage_index: int, description: Description, hash_: str) -> None:
        """Check what a member is about to write.

        Args:
            stage_index: Its stage.
            description: What it says of its state.
            hash_: What the stage voted on; empty if that is not known.

        Raises:
            DecodError: It is not this stage's state.
        """

    async def written(self, folder: str, stage_index: int, description: Description) -> None:
        """Check that a part is there.

        Raises:
            DecodError: It is not.
        """

    def failed(self, stage_index: int, member: NodeId, error: DecodError) -> None:
        """Take in that a member has not written its stage's part."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """All stages' states at one commit."""

    iteration: int
    loss: float | None
    """Loss of that iteration; None if this node was not in the run when it was committed."""
    num_deferred: int
    """Microbatches that it deferred to the next iteration."""
    stages: tuple[StageSnapshot, ...]
    """The stages, by index from 0."""
    folder: str = ""
    """The folder of the parts that members have written; empty if they were not asked to."""
    cut: tuple[int, ...] = ()
    """How the model is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSources:
    """Where the leader gets the states from, and what it knows of them."""

    core: CoreHandle
    progress: RunProgress
    fetch: Callable[..., Awaitable[str]]
    """Fetches a stage's state from members; see `Gateway.fetch_state`."""
    write_part: Callable[..., Awaitable[Description]]
    """Has a member write its stage's state; see `Gateway.write_part`."""
    load: Callable[..., Awaitable[str | None]]
    """Reads a state from this host's disk; see `DiskStates.load`."""
    state_bytes: int
    """Size of the state of the largest stage."""
    device_gone: Callable[[], bool]
    """Whether the state on this node's device is lost."""
    ending: Callable[[], bool]
    """Whether no more commits follow, since the run is ending."""


def require_begun(sources: SnapshotSources) -> LeaderFacts:
    """Return what the leader knows of the run.

    Raises:
        NetworkError: The run has not begun, or this node does not lead it.
    """
    leading = sources.core.leading
    if leading is None or not leading.view.members:
        raise not_begun()
    return leading


@asynccontextmanager
async def run_snapshot(
    sources: SnapshotSources,
    destination: Destination,
    *,
    with_optimizer: bool,
    parts: Parts | None = None,
) -> AsyncIterator[RunSnapshot]:
    """Gather the states of the last commit with an average for as long as the context lasts.

    Args:
        sources: The leader's sources.
        destination: Takes the states of the relay stages. If a member is lost, another one's state,
            maybe of another iteration, comes in place of its.
        with_optimizer: Whether the states include moments, and master weights if there are any.
        parts: If members may write their stages' states themselves: takes what they have written.
            The states of other stages go to the destination.

    Raises:
        NetworkError: The run has not begun, a stage has no member, or no member of it answers.
    """
    marks = kept_iterations(sources)
    attempts: list[int | None] = [None] * _NUM_ATTEMPTS if marks is None else [*marks]
    if not attempts:
        raise _not_there(0, "this node's compute process has ended, and no disk keeps its state")
    while attempts:
        mark = attempts.pop(0)
        wanted = _Wanted(mark, with_optimizer, parts)
        collection = _Collection(sources, destination, wanted)
        try:
            try:
                states = await collection.run()
            except NetworkError:
                if attempts and (collection.let_go or mark is not None):
                    continue
                raise
            yield states
            return
        finally:
            collection.close()


def as_cut(run: RunConfig, sources: SnapshotSources) -> RunConfig:
    """Return the run with the cut that its stages have now."""
    leading = sources.core.leading
    return run if leading is None else run.with_blocks(leading.view.cut)


def kept_iterations(sources: SnapshotSources) -> list[int] | None:
    """Return the iterations of which disks keep all states, newest first.

    None if this node's compute process is alive: then the last commit can be gathered.
    """
    leading = sources.core.leading
    if leading is None or not sources.device_gone():
        return None
    marks = [mark.iteration for mark in leading.marks]
    return sorted((i for i in marks if i <= leading.committed), reverse=True)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one attempt is to gather."""

    mark: int | None
    """Iteration whose states are on disks; None for the last commit."""
    with_optimizer: bool
    parts: Parts | None


class _Collection:
    """One attempt to gather the states.

    Args:
        sources: The leader's sources.
        destination: See `run_snapshot`.
        wanted: What is gathered.
    """

    def __init__(self, sources: SnapshotSources, destination: Destination, wanted: _Wanted) -> None:
        mark, with_optimizer = wanted.mark, wanted.with_optimizer
        leading, progress = require_begun(sources), sources.progress
        self.let_go = False
        """Every stage has taken its copy, so commits go on."""
        self._sources, self._destination = sources, destination
        self._driver: NodeDriver = sources.core.driver
        self._view: View = leading.view
        self._mark = mark
        # Behind it, members that step by themselves have nothing in common.
        self._iteration = leading.anchor if mark is None else mark
        # The core knows the loss only of its own last commit. The node's notes know those of
        # iterations that others committed, or that preceded a rollback.
        newest = self._iteration == leading.committed and leading.loss is not None
        self._loss = leading.loss if newest else progress.loss_of(self._iteration)
        self._num_deferred = progress.num_deferred
        self._with_optimizer = with_optimizer
        self._hashes = _hashes(leading, self._iteration) if with_optimizer else {}
        self._voted = _voted(leading, self._iteration) | self._hashes
        self._parts, self._folder = wanted.parts, ""
        self._uncopied = set(range(self._view.num_stages))
        self._regions: list[TensorRegion] = []
        self._own: ServedState | None = None

    async def run(self) -> RunSnapshot:
        if self._view.empty_stages:
            raise no_member(self._view.empty_stages[0])
        self._driver.post(BlockCommits(blocked=True))
        hold_max_s = HOLD_MAX_S + copy_max_s(self._sources.state_bytes)
        patience = asyncio.get_running_loop().call_later(hold_max_s, self._release)
        tasks = [asyncio.create_task(self._own_stage())]
        if self._driver.broken:
            # The core may have decided a commit that no member knows: ask the device first.
            await asyncio.wait(tasks)
        if self._parts is not None:
            self._folder = self._parts.new_folder(self._iteration)
        tasks += [
            asyncio.create_task(self._relay_stage(stage))
            for stage in range(1, self._view.num_stages)
        ]
        try:
            stages = await asyncio.gather(*tasks)
        finally:
            patience.cancel()
            self._release()
            # The destination and memory must not be given up while tasks still write into them.
            await cancelled(*tasks)
        found = tuple(stages)
        told = (self._iteration, self._loss, self._num_deferred)
        return RunSnapshot(*told, found, self._folder, self._view.cut)

    def close(self) -> None:
        """Give all memory back."""
        for region in self._regions:
            region.release()
        self._regions.clear()
        if self._own is not None:
            self._own.release()
            self._own = None

    def _copied(self, stage: int) -> None:
        self._uncopied.discard(stage)
        if not self._uncopied:
            self.let_go = True
            self._release()

    def _release(self) -> None:
        """Let commits go on, unless the run is ending."""
        self._driver.post(BlockCommits(blocked=self._sources.ending()))

    async def _own_stage(self) -> StageSnapshot:
        if self._mark is not None:
            return await self._own_kept(self._mark)
        with_optimizer = self._with_optimizer
        if self._driver.broken:
            served = await self._driver.run_copy(Snapshot(with_optimizer))
        else:
            served = await self._driver.request_state(
                0,
                self._iteration,
                with_optimizer=with_optimizer,
                cut=self._view.cut,
            )
        if isinstance(served, str):
            raise _not_there(0, served)
        self._own = served
        if served.iteration != self._iteration:
            self._iteration = served.iteration
            self._loss = self._sources.progress.loss_of(served.iteration)
        self._copied(0)
        return StageSnapshot(parse_description(served.manifest), served.data)

    async def _own_kept(self, iteration: int) -> StageSnapshot:
        wanted = FetchState((), 0, iteration, self._hashes.get(0, ""), cut=self._view.cut)
        text = await self._sources.load(wanted, self._allocate_own)
        if text is None:
            raise _not_there(0, f"this host's disk does not keep that of iteration {iteration}")
        return StageSnapshot(parse_description(text), self._regions[-1].view)

    def _allocate_own(self, size_bytes: int) -> StateBytes | None:
        self._copied(0)
        region = self._driver.allocate_state(size_bytes)
        if region is None:
            return None
        self._regions.append(region)
        return region.view

    async def _relay_stage(self, stage: int) -> StageSnapshot:
        """Have a member write a stage's state, or else fetch it."""
        written = None if self._parts is None else await self._written_stage(stage, self._parts)
        return written or await self._fetch_stage(stage)

    async def _written_stage(self, stage: int, parts: Parts) -> StageSnapshot | None:
        hash_ = self._voted.get(stage, "")

        def described(description: Description) -> None:
            parts.expect(stage, description, hash_)
            self._copied(stage)

        for member in parts.writers(stage, self._view.roster(stage)):
            wanted = FetchState((member,), stage, self._iteration, hash_, cut=self._view.cut)
            try:
                description = await self._sources.write_part(wanted, self._folder, described)
                await parts.written(self._folder, stage, description)
            except DecodError as error:
                parts.failed(stage, member, error)
                continue
            return StageSnapshot(description, None)
        return None

    async def _fetch_stage(self, stage: int) -> StageSnapshot:
        """Fetch a stage's state from the first member that gives it."""
        reason = "no member"
        for member in self._view.roster(stage):
            # Ask one member at a time: each one copies its state, which takes time and memory.
            hash_ = self._hashes.get(stage, "")
            wanted = FetchState(
                (member.node_id,), stage, self._iteration, hash_, cut=self._view.cut
            )
            sink = _Sink(stage, self._destination, lambda: self._copied(stage))
            try:
                text = await self._sources.fetch(wanted, sink, with_optimizer=self._with_optimizer)
                description = parse_description(text)
            except DecodError as error:
                reason = str(error)
                continue
            assert sink.data is not None, "it has arrived"
            return StageSnapshot(description, sink.data)
        raise _not_there(stage, reason)


def _hashes(leading: LeaderFacts, iteration: int) -> dict[int, str]:
    """Return the hashes of the stages' parameters if the iteration is marked.

    Without them, a member could give another state of that iteration, from before a rollback.
    """
    if leading.origin is not None:
        return {}  # No commit since the rollback: a stage may have been mixed from its neighbours.
    found = (
        dict(mark.hashes)
        for mark in leading.marks
        if mark.iteration == iteration and mark.cut == leading.view.cut
    )
    return next(found, {})


def _voted(leading: LeaderFacts, iteration: int) -> dict[int, str]:
    """Return what the stages voted on in the last commit if that is this iteration."""
    known = leading.origin is None and leading.committed == leading.anchor == iteration
    return dict(leading.hashes) if known else {}


class _Sink(QuietSink):
    """Leads one member's state to the destination."""

    def __init__(self, stage: int, destination: Destination, copied: Callable[[], None]) -> None:
        self.data: StateBytes | None = None
        self._stage, self._destination, self._copied = stage, destination, copied
        self._description: Description | None = None

    @override
    def expect(self, description: Description) -> None:
        # The member has made its copy by the time it describes it.
        self._copied()
        self._description = description

    def allocate(self, size_bytes: int) -> StateBytes | None:
        assert self._description is not None, "it is described first"
        assert self._description.num_bytes == size_bytes
        self.data = self._destination.place(self._stage, self._description)
        return self.data


def _not_there(stage: int, reason: str) -> NetworkError:
    return NetworkError(
        f"stage {stage} did not give its state",
        why=clip(reason, 200),
        fix="try again",
        code="E-NET-022",
    )
