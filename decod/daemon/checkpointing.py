"""Checkpoints of the run's state, written while training goes on.

They go to the leader's disk, or to a store that members share. There each stage's part is written
by a member of the stage if one has the store. If the store fails, the disk takes this checkpoint.

Every `every_iterations` commits, the states of all stages are gathered with their optimizers'
states. Those of other stages go to the files of the checkpoint as they arrive. A thread of the node
process then reads them again, compares their hashes, and writes the leader's own stage from its
copy (`decod.driver.arena`). The device computes meanwhile, and torch is not involved.
Failures are shown in the log and in `decod status`, and do not affect training. The next checkpoint
tries again.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.config.schema import NOTHING, Manifest, flatten
from decod.daemon.run_facts import RunPart
from decod.daemon.run_snapshot import (
    RunSnapshot,
    SnapshotSources,
    as_cut,
    kept_iterations,
    run_snapshot,
)
from decod.driver.arena import goes_to_file
from decod.errors import CheckpointError, DecodError
from decod.host_limits import host_free_bytes
from decod.ids import NodeId
from decod.net.donor import reader_of
from decod.net.rate_caps import UNLIMITED, Pace
from decod.net.storing import NoStoreError, PacedCopy
from decod.protocol.core.view import Member
from decod.run.run_config import RunConfig
from decod.run.training_config import Documents
from decod.tasks import in_thread, to_its_end
from decod.texts import clip
from decod.train.checkpoint.description import Description, described_hash, unlike_hash
from decod.train.checkpoint.entries import (
    check_tensors,
    size_bytes_of,
    state_size_bytes,
    state_tensors,
)
from decod.train.checkpoint.iteration_folders import (
    ArrivedStage,
    ArrivingStages,
    StageBlob,
    stage_file,
)
from decod.train.checkpoint.manifest import CheckpointManifest, Settings, packed
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.shared import (
    SharedCheckpoints,
    SharedStore,
    SharedStoreError,
    find_stored,
    open_store,
)
from decod.train.checkpoint.store import (
    CheckpointConfig,
    CheckpointStore,
    find_checkpoints,
    remove_unfinished,
    run_folder,
)

# --- parts that members write --------------------------------------------------------------------
# The parts of a checkpoint that members write into the store that they share with the leader.
#
# A volunteer's credentials are its own. The leader names a part in the manifest only if the
# member's description has the hash that the stage voted on, and if the part is in the leader's
# own view of the store, with the right size and header, and a chunk chosen by chance with the
# right hash.


_ASK_AGAIN_S = 600.0
"""How long a member without a store is not asked again. It may have been restarted with one."""


def store_of(config: NodeConfig) -> SharedStore | None:
    """Return the store that a node shares with others, if it does.

    Raises:
        ConfigError: This host has no package for it (E-CFG-095).
    """
    return None if config.checkpoint_store is None else open_store(config.checkpoint_store)


class Stores:
    """The members that have no store, as far as the leader knows."""

    def __init__(self) -> None:
        self._asked_s: dict[NodeId, float] = {}

    def lacks(self, member: NodeId) -> None:
        """Take in that a member has no store."""
        self._asked_s[member] = time.monotonic()

    def may_have(self, member: NodeId) -> bool:
        """Return whether a member is worth asking."""
        asked_s = self._asked_s.get(member)
        return asked_s is None or time.monotonic() - asked_s > _ASK_AGAIN_S


class SharedParts:
    """The parts of one checkpoint. See `Parts`.

    Args:
        shared: The run's checkpoints in the store.
        stores: Which members have none.
        run: The run.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self,
        shared: SharedCheckpoints,
        stores: Stores,
        run: RunConfig,
        note: Callable[..., None],
    ) -> None:
        self._shared, self._stores, self._run, self._note = shared, stores, run, note
        self._refused: set[int] = set()
        """Stages that are fetched, because a member that has a store has not used it."""
        self._iteration = 0

    def new_folder(self, iteration: int) -> str:
        self._iteration = iteration
        return self._shared.new_folder(iteration)

    def writers(self, stage_index: int, roster: Sequence[Member]) -> Iterable[NodeId]:
        for member in roster:
            if stage_index not in self._refused and self._stores.may_have(member.node_id):
                yield member.node_id

    def expect(self, stage_index: int, description: Description, hash_: str) -> None:
        run, entries = self._run, description.entries
        check_tensors(entries, state_tensors(run, stage_index))
        if hash_ not in ("", described_hash(entries)):
            raise unlike_hash(stage_index, self._iteration)

    async def written(self, folder: str, stage_index: int, description: Description) -> None:
        shared = self._shared
        await in_thread(lambda: shared.require_stage(folder, stage_index, description))

    def failed(self, stage_index: int, member: NodeId, error: DecodError) -> None:
        if isinstance(error, NoStoreError):
            self._stores.lacks(member)
            return
        self._refused.add(stage_index)
        self._note("store.unused", peer=member, stage=stage_index, reason=error.why)


# --- checkpoints ---------------------------------------------------------------------------------


_CARRIED = "carried"
"""The setting that a resumed run takes from its checkpoint, and not from the run file."""

_MEMORY_SHARE = 0.8
"""Largest part of the free memory that the copy of the leader's own stage may take."""


def settings_of(manifest: Manifest) -> Settings:
    """Return a run's configuration as a checkpoint keeps it: values by their dotted keys."""
    flat = {key.removeprefix("run."): value for key, value in manifest.flat().items()}
    for own in ("initial_weights", "start_iteration", "protocol_version"):
        del flat[own]
    return _plain(flat)


def carried_in(checkpoint: CheckpointManifest) -> str:
    """Return what the run that wrote a checkpoint has carried from its `--init`."""
    return str(checkpoint.settings.get(_CARRIED, NOTHING))


def settings_in(checkpoint: CheckpointManifest) -> Settings:
    """Return the configuration with which a checkpoint was written, in the form of `settings_of`.

    Settings that its release lacked get today's defaults, which keep the behaviour of that time.
    """
    then = {"base": "", "batch.documents": Documents.TOGETHER.value}
    return _plain(flatten(asdict(RunConfig()))) | then | checkpoint.settings


def _plain(flat: dict[str, Any]) -> Settings:
    # Enumerations become plain texts: a file could not keep their type.
    return {key: str(v) if isinstance(v, str) else v for key, v in flat.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Which checkpoints a leader writes, and where."""

    part: RunPart
    """The leader's part in the run."""
    state_dir: Path
    config: CheckpointConfig
    """How often checkpoints are written, and how many are kept."""
    store: CheckpointStore | None = None
    """Writes the checkpoints; if absent, into the run's folder."""
    shared: SharedCheckpoints | None = None
    """The run's checkpoints in a store that members share, if they go there."""
    pace: Pace = UNLIMITED
    """Caps the rate at which this node writes into that store."""
    on_stored: Callable[[int, Folder], None] = lambda _iteration, _folder: None
    """Called with the iteration and the folder of each new checkpoint in that store."""


class Checkpoints:
    """The leader's checkpoints: decides when one is due, writes it, and shows how it went.

    Args:
        sources: The leader's sources of states.
        plan: Says which checkpoints are written.
        snapshot_lock: Taken while states are collected. Exports take it too.
        note: Takes the name of an event, and its fields as keywords.
        on_written: Called with the iteration of each new checkpoint, and the cut of its stages.
        free_memory_bytes: Returns the free memory of this host.
    """

    def __init__(
        self,
        sources: SnapshotSources,
        plan: CheckpointPlan,
        snapshot_lock: asyncio.Lock,
        *,
        note: Callable[..., None],
        on_written: Callable[[int, tuple[int, ...]], None],
        free_memory_bytes: Callable[[], int] = host_free_bytes,
    ) -> None:
        self._sources, self._progress = sources, sources.progress
        self._part, self._state_dir = plan.part, plan.state_dir
        self._config = plan.config
        self._snapshot_lock = snapshot_lock
        self._note, self._on_written = note, on_written
        self._folder = run_folder(plan.state_dir, plan.part.run_id)
        self._store = plan.store or CheckpointStore(self._folder)
        self._in_store, self._stores, self._on_stored = plan.shared, Stores(), plan.on_stored
        self._pace = plan.pace
        self._free_memory_bytes = free_memory_bytes
        self._task: asyncio.Task[None] | None = None
        self._finishing = asyncio.Lock()
        """Held while the last iteration is written. Both a leaving stage and the end of the run may
        ask for that, and only the first still finds the members."""
        self._writing = False
        """All states are gathered, and this host is writing or pruning."""
        self.last: int | None = self._newest()
        """Iteration of the newest checkpoint on this host from which the run can go on. At first
        the resumed checkpoint, or the last that this node wrote when it led before."""
        self._last_s: int | None = None
        """When this node wrote `last` as the leader, in Unix seconds; None if it did not."""
        self._num_returns = 0
        """How often the run has rolled back."""
        self.problem: str | None = None
        """Why the latest attempt failed; None if it succeeded."""
        self._due = self._next_due(self._progress.iteration)
        self._progress.on_commit.append(self._committed)
        self._progress.on_return.append(self._returned)

    def _newest(self) -> int | None:
        part, now = self._part, self._progress.iteration
        whole = [c for c in find_checkpoints(self._state_dir) if c.manifest is not None]
        run_id = self._part.run_id
        own = [c.iteration for c in whole if c.run_id == run_id and c.iteration <= now]
        if part.checkpoint_dir is not None:
            own.append(part.manifest.start_iteration)
        return max(own, default=None)

    def describe(self) -> dict[str, Any]:
        """Return the checkpoint part of `decod status`."""
        return {
            "every_iterations": self._config.every_iterations,
            "iteration": self.last,
            "written_s": self._last_s,
            "folder": str(self._folder if self._in_store is None else self._in_store.store),
            "problem": self.problem,
        }

    @property
    def _shared(self) -> int:
        """The last iteration of which there is a state."""
        leading, iteration = self._sources.core.leading, self._progress.iteration
        return iteration if leading is None else min(iteration, leading.anchor)

    def _next_due(self, iteration: int) -> int:
        """Return the first multiple of the interval after an iteration."""
        every = self._config.every_iterations
        return (iteration // every + 1) * every if every else 0

    def _committed(self) -> None:
        """Begin a checkpoint if one is due."""
        every, progress = self._config.every_iterations, self._progress
        if not every or progress.iteration < self._due:
            return
        if self._shared < progress.iteration:
            return  # Members step by themselves: they have something in common after an average.
        # A checkpoint can't hold deferred microbatches. So wait for an iteration that defers none,
        # but for one interval at most.
        if progress.num_deferred and progress.iteration < self._due + every:
            return
        if self._task is None or self._task.done():
            self._due = self._next_due(progress.iteration)
            self._task = asyncio.create_task(self._try())

    def _returned(self) -> None:
        """Forget checkpoints of iterations that the run has given up by rolling back."""
        iteration = self._progress.iteration
        self._num_returns += 1
        self._due = self._next_due(iteration)
        if self.last is not None and self.last > iteration:
            self.last, self._last_s = self._newest(), None

    async def finish(self, *, writes: bool = True) -> None:
        """At the end of the run, complete the checkpoint in hand and write the last iteration.

        Args:
            writes: False if the state of the last iteration is lost.
        """
        marks = kept_iterations(self._sources)
        iteration = self._shared if marks is None else max(marks, default=0)
        async with self._finishing:
            if self._task is not None:
                await asyncio.gather(self._task, return_exceptions=True)
            begun = iteration > self._part.manifest.start_iteration
            # A checkpoint of this iteration that this node did not write as leader may be of a
            # future that the run gave up.
            written = self.last == iteration and self._last_s is not None
            written |= self.last is not None and self.last > iteration
            wanted = writes and self._config.every_iterations > 0
            if wanted and begun and not written:
                await self._try()

    async def close(self) -> None:
        """Complete a checkpoint that is being written; give up one that is still being gathered.

        After the loss of a stage, the checkpoint in hand may be the only state that is left.
        """
        if self._task is not None:
            if not self._writing:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _try(self) -> None:
        try:
            await self._try_in(self._in_store)
        except SharedStoreError as error:
            self._note("store.failed", iteration=self._progress.iteration, reason=error.why)
            await self._try_in(None)
            self.problem = self.problem or str(error)

    async def _try_in(self, shared: SharedCheckpoints | None) -> None:
        """Write a checkpoint to a store or to the disk, and tell how it went.

        Raises:
            SharedStoreError: The store refuses.
        """
        start_s, num_returns = time.monotonic(), self._num_returns
        run, parts = self._part.run, None
        if shared is not None:
            parts = SharedParts(shared, self._stores, as_cut(run, self._sources), self._note)
        # The gathered state is of this iteration, or of a later one if an export came first.
        iteration = self._progress.iteration
        try:
            self._require_memory()
            async with (
                self._snapshot_lock,
                self._arriving(iteration, whole=shared is None) as destination,
                run_snapshot(
                    self._sources, destination, with_optimizer=True, parts=parts
                ) as states,
            ):
                iteration, written_cut = states.iteration, states.cut
                self._require_newer(iteration)
                manifest = self._manifest(states)
                check_tensors(states.stages[0].description.entries, state_tensors(run, 0))
                gathered_s = time.monotonic() - start_s
                place = await self._write(manifest, states, shared)
        except SharedStoreError:
            raise
        except DecodError as error:
            self.problem = str(error)
            self._note("checkpoint.failed", iteration=iteration, reason=self.problem)
            return
        self.problem = None
        # If the run has rolled back meanwhile, the checkpoint is of a future that was given up.
        valid = num_returns == self._num_returns
        if valid:
            self.last, self._last_s = iteration, manifest.created_s
            if shared is not None:
                self._on_stored(iteration, place)
            self._on_written(iteration, written_cut)
        self._note(
            "checkpoint.written",
            iteration=iteration,
            path=str(place),
            gathered_s=round(gathered_s, 3),
            duration_s=round(time.monotonic() - start_s, 3),
        )
        if valid:
            # Not earlier: until the core knows the new one, it rebuilds a lost stage from the old.
            await self._prune(iteration, None if shared is None else (shared, place.name))

    async def _prune(self, newest: int, stored: tuple[SharedCheckpoints, str] | None) -> None:
        keep = self._config.keep

        def work() -> None:
            if stored is not None:
                shared, folder = stored
                shared.prune(keep, folder)
            else:
                self._store.prune(keep, newest)

        self._writing = True
        try:
            with suppress(OSError):  # One checkpoint too many does no harm.
                await in_thread(work)
        finally:
            self._writing = False

    def _require_memory(self) -> None:
        """Refuse a checkpoint that needs too much memory: running out would kill the leader.

        Raises:
            CheckpointError: There is too little free memory (E-CKP-014).
        """
        needed_bytes = size_bytes_of(state_tensors(self._part.run, 0))
        free_bytes = self._free_memory_bytes()
        if not goes_to_file(needed_bytes) and needed_bytes > _MEMORY_SHARE * free_bytes:
            raise CheckpointError(
                f"a checkpoint takes {needed_bytes / 2**30:.1f} GiB of memory while it is written, "
                f"and {free_bytes / 2**30:.1f} GiB are free",
                why="the leader copies the state of its own stage in memory first",
                fix="free memory, lead from a larger host, or set checkpoint.every_iterations = 0",
                code="E-CKP-014",
            )

    @asynccontextmanager
    async def _arriving(self, iteration: int, *, whole: bool) -> AsyncIterator["_StageFiles"]:
        """Lend the folder into which other stages' states arrive.

        Args:
            iteration: Of the checkpoint.
            whole: Whether all states go to the disk. Otherwise only those do for a while that no
                member puts into the store, and nobody knows yet which these are.

        Raises:
            CheckpointError: The disk refuses, or has too little room (E-CKP-012).
        """
        run = self._part.run
        size_bytes = state_size_bytes(run) if whole else 0

        def begin() -> ArrivingStages:
            # Left by leaders that were killed while they wrote. Nobody else would remove them.
            remove_unfinished(self._state_dir)
            return self._store.arriving(iteration, size_bytes)

        arriving = await to_its_end(begin)
        try:
            yield _StageFiles(arriving, as_cut(run, self._sources))
        finally:
            await to_its_end(arriving.close)

    def _require_newer(self, iteration: int) -> None:
        """Refuse a gathered state that is older than the last checkpoint.

        That happens when only an old iteration is left on the hosts' disks.

        Raises:
            CheckpointError: The state is older (E-CKP-019).
        """
        if self.last is not None and iteration < self.last:
            raise CheckpointError(
                f"hosts' disks keep iteration {iteration}, and no newer one",
                why=f"the last checkpoint is of iteration {self.last}",
                fix="go on from that",
                code="E-CKP-019",
            )

    def _manifest(self, states: RunSnapshot) -> CheckpointManifest:
        if states.loss is None:
            raise CheckpointError(
                f"the loss of iteration {states.iteration} is not known here",
                why="others committed it before this node came, and a checkpoint tells the loss",
                fix="nothing: it is tried again when the next one is due",
                code="E-CKP-018",
            )
        return CheckpointManifest(
            iteration=states.iteration,
            run_id=self._part.run_id,
            created_s=int(wall_clock()),
            loss=states.loss,
            num_deferred=states.num_deferred,
            settings=settings_of(self._part.manifest),
            stages=(),
        )

    async def _write(
        self, manifest: CheckpointManifest, states: RunSnapshot, shared: SharedCheckpoints | None
    ) -> Folder:
        """Write in a thread. If cancelled, tell the thread to stop, and wait until it has ended."""
        abandoned = threading.Event()
        blobs = _blobs(states) if shared is None else _paced_blobs(states, self._pace)

        def work() -> Folder:
            # `--resume latest` must find the one written last, even if the clock has gone back.
            others = find_checkpoints(self._state_dir)
            if shared is not None:
                others += find_stored(shared.store)
            before_s = max((o.manifest.created_s for o in others if o.manifest), default=0)
            stamped = replace(manifest, created_s=max(manifest.created_s, before_s + 1))
            if shared is not None:
                return _write_shared(shared, stamped, states, blobs, abandoned.is_set)
            return self._store.write(stamped, [*blobs.values()], abandoned=abandoned.is_set)

        self._writing = True
        written = in_thread(work)
        try:
            return await asyncio.shield(written)
        except asyncio.CancelledError:
            abandoned.set()
            await asyncio.gather(written, return_exceptions=True)
            raise
        finally:
            self._writing = False


class _StageFiles:
    """Leads each stage's state to its file in the checkpoint. See `Destination`."""

    def __init__(self, arriving: ArrivingStages, run: RunConfig) -> None:
        self._arriving, self._run = arriving, run

    def place(self, stage_index: int, description: Description) -> ArrivedStage:
        check_tensors(description.entries, state_tensors(self._run, stage_index))
        return self._arriving.place(stage_file(stage_index), description)


def _blobs(states: RunSnapshot) -> dict[int, StageBlob]:
    """Return the states that are here, by stage."""
    return {
        index: StageBlob(stage.description.entries, stage.data)
        for index, stage in enumerate(states.stages)
        if stage.data is not None
    }


def _paced_blobs(states: RunSnapshot, pace: Pace) -> dict[int, StageBlob]:
    """Return the states that are here, which are to leave this host."""
    return {
        index: replace(blob, data=PacedCopy(reader_of(blob.data), len(blob.data), pace))
        for index, blob in _blobs(states).items()
    }


def _write_shared(
    shared: SharedCheckpoints,
    manifest: CheckpointManifest,
    states: RunSnapshot,
    blobs: Mapping[int, StageBlob],
    abandoned: Callable[[], bool],
) -> Folder:
    """Write the blobs, which members have not written, and then the manifest.

    Raises:
        CheckpointError: As `SharedCheckpoints`. What there is of the checkpoint is removed.
    """
    try:
        for index, blob in blobs.items():
            shared.write_stage(states.folder, index, blob, abandoned)
        stages = tuple(packed(stage.description.entries) for stage in states.stages)
        return shared.finish(states.folder, replace(manifest, stages=stages))
    except CheckpointError:
        with suppress(OSError):  # The next one removes it.
            shared.discard(states.folder)
        raise


_VALUE_LENGTH_MAX = 100
"""The hashes of many parts are cut."""


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return texts on the settings in which a run file and a checkpoint differ, sorted by key."""
    return [
        f"{key} is {_shown(now, key)} in the run file and was {_shown(then, key)} in the checkpoint"
        for key in sorted((then.keys() | now.keys()) - {_CARRIED})
        if then.get(key) != now.get(key)
    ]


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return clip(str(settings.get(key)), _VALUE_LENGTH_MAX)
