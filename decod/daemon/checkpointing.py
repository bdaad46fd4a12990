"""Keeps the run's state on the leader's disk while training goes on.

After every so many commits all stages' states are gathered with their optimizers', as for an
export, and a thread of the node process writes them from shared memory: the device goes on
computing meanwhile, and nothing has to be copied or understood by torch. Whatever goes wrong is
told, in the log and in `decod status`, and tried again the next time; training never hears of it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import psutil

from decod.config.schema import Manifest, RunConfig, flatten
from decod.daemon.gathering import GatheredStates, gathered_states
from decod.daemon.threads import in_thread
from decod.errors import CheckpointError, DecodError
from decod.train.checkpoint.entries import (
    check_tensors,
    parse_entries,
    state_size_bytes,
    state_tensors,
)
from decod.train.checkpoint.folders import StageBlob
from decod.train.checkpoint.manifest import CheckpointManifest, Settings
from decod.train.checkpoint.params import CheckpointConfig
from decod.train.checkpoint.store import (
    CheckpointStore,
    find_checkpoints,
    remove_unfinished,
    run_folder,
)

if TYPE_CHECKING:
    from decod.daemon.host import Node


_MEMORY_SHARE = 0.8
"""Part of the free memory that a checkpoint may take for a while."""


def settings_of(manifest: Manifest) -> Settings:
    """Return a run's configuration as a checkpoint keeps it: `model.hidden_size` to its value."""
    flat = {key.removeprefix("run."): value for key, value in manifest.flat().items()}
    for own in ("initial_weights", "start_iteration", "protocol_version"):
        del flat[own]
    return _plain(flat)


def settings_in(checkpoint: CheckpointManifest) -> Settings:
    """Return the configuration that a checkpoint was written with, as `settings_of` does.

    Settings that its release did not have are at today's defaults, which do what was done then.
    """
    return _plain(flatten(asdict(RunConfig()))) | checkpoint.settings


def _plain(flat: dict[str, Any]) -> Settings:
    # Enumerations are texts; their own type would not survive the file.
    return {key: str(v) if isinstance(v, str) else v for key, v in flat.items()}


class Checkpoints:
    """When the leader writes a checkpoint, and how the last one went.

    Args:
        node: The leader's.
        config: How often, and how many stay.
        gathering: Held while states are gathered: exports do that too.
        store: Where they go.
        free_memory_bytes: Tells how much there is on this host.
    """

    def __init__(
        self,
        node: "Node",
        config: CheckpointConfig,
        gathering: asyncio.Lock,
        store: CheckpointStore | None = None,
        free_memory_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
    ) -> None:
        self._node = node
        self._config = config
        self._gathering = gathering
        self._folder = run_folder(node.config.state_dir, node.part.run_id)
        self._store = store or CheckpointStore(self._folder)
        self._free_memory_bytes = free_memory_bytes
        self._task: asyncio.Task[None] | None = None
        self._finishing = asyncio.Lock()
        """Held while the last iteration is written: a stage that leaves and the end of the run may
        both ask for it, and only who comes first finds the members."""
        self._writing = False
        """All states are here: what is left to do concerns this host only."""
        self.last: int | None = self._newest()
        """Iteration of the newest checkpoint on this host to go on from; at first the one that was
        resumed here, or the last that this node wrote when it led before."""
        self.on_written: Callable[[int], None] = lambda _: None
        """Called with the iteration of each new one."""
        self._last_s: int | None = None
        """When this node wrote it, leading; None if it did not."""
        self._num_returns = 0
        """How often the run has gone back."""
        self.problem: str | None = None
        """Why the newest try failed, None if it did not."""
        self._due = self._next_due(node.progress.iteration)
        node.describe_checkpoint = self.describe
        node.progress.on_commit.append(self._committed)
        node.progress.on_return.append(self._returned)

    def _newest(self) -> int | None:
        part, now = self._node.part, self._node.progress.iteration
        whole = [c for c in find_checkpoints(self._node.config.state_dir) if c.manifest is not None]
        own = [c.iteration for c in whole if c.folder.parent == self._folder and c.iteration <= now]
        if part.checkpoint_dir is not None:
            own.append(part.manifest.start_iteration)
        return max(own, default=None)

    def describe(self) -> dict[str, Any]:
        """Return what `decod status` shows."""
        return {
            "every_iterations": self._config.every_iterations,
            "iteration": self.last,
            "written_s": self._last_s,
            "folder": str(self._folder),
            "problem": self.problem,
        }

    def _next_due(self, iteration: int) -> int:
        """Return the first multiple of the interval after an iteration."""
        every = self._config.every_iterations
        return (iteration // every + 1) * every if every else 0

    def _committed(self) -> None:
        """Begin a checkpoint if one is due."""
        every, progress = self._config.every_iterations, self._node.progress
        if not every or progress.iteration < self._due:
            return
        # What is put off has no place in a checkpoint: an iteration that leaves nothing behind is
        # waited for, though not for ever.
        if progress.num_deferred and progress.iteration < self._due + every:
            return
        if self._task is None or self._task.done():
            self._due = self._next_due(progress.iteration)
            self._task = asyncio.create_task(self._try())

    def _returned(self) -> None:
        """The run has gone back: what was written of the future that was given up is no more."""
        iteration = self._node.progress.iteration
        self._num_returns += 1
        self._due = self._next_due(iteration)
        if self.last is not None and self.last > iteration:
            self.last, self._last_s = self._newest(), None

    async def finish(self, *, writes: bool = True) -> None:
        """End what is being written, and write the last iteration if it is not: the run ends.

        Args:
            writes: False where nobody has the last iteration any more.
        """
        iteration = self._node.progress.iteration
        async with self._finishing:
            if self._task is not None:
                await asyncio.gather(self._task, return_exceptions=True)
            begun = iteration > self._node.part.manifest.start_iteration
            # One of this iteration that was there before may be of a future that was given up.
            written = self.last == iteration and self._last_s is not None
            wanted = writes and self._config.every_iterations > 0
            if wanted and begun and not written:
                await self._try()

    async def close(self) -> None:
        """End what is being written, and give up what is still being gathered.

        A run that loses a stage ends here: the checkpoint in hand may be all that is left of it.
        """
        if self._task is not None:
            if not self._writing:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _try(self) -> None:
        node, start_s, num_returns = self._node, time.monotonic(), self._num_returns
        # The run's state is that of this iteration or, if another export came between, a later one.
        iteration = node.progress.iteration
        try:
            self._require_memory()
            async with (
                self._gathering,
                gathered_states(node, with_optimizer=True) as states,
            ):
                iteration = states.iteration
                manifest = self._manifest(states)
                blobs = _blobs(states, node.part.manifest)
                gathered_s = time.monotonic() - start_s
                await self._write(manifest, blobs)
        except DecodError as error:
            self.problem = str(error)
            node.note("checkpoint.failed", iteration=iteration, reason=self.problem)
            return
        self.problem = None
        # If the run has gone back meanwhile, it is of the future that was given up.
        valid = num_returns == self._num_returns
        if valid:
            self.last, self._last_s = iteration, manifest.created_s
            self.on_written(iteration)
        node.note(
            "checkpoint.written",
            iteration=iteration,
            path=str(self._folder / str(iteration)),
            gathered_s=round(gathered_s, 3),
            duration_s=round(time.monotonic() - start_s, 3),
        )
        if valid:
            # Not before: until the core knows of it, a lost stage is rebuilt from the last one.
            await self._prune(iteration)

    async def _prune(self, newest: int) -> None:
        self._writing = True
        try:
            with suppress(OSError):  # There is just one too many.
                await in_thread(lambda: self._store.prune(self._config.keep, newest))
        finally:
            self._writing = False

    def _require_memory(self) -> None:
        """Refuse what this host can't hold: without memory not a file but the leader is lost.

        Raises:
            CheckpointError: There is too little.
        """
        run = self._node.part.manifest.run
        needed_bytes = state_size_bytes(run.model, run.stages)
        free_bytes = self._free_memory_bytes()
        if needed_bytes > _MEMORY_SHARE * free_bytes:
            raise CheckpointError(
                f"a checkpoint takes {needed_bytes / 2**30:.1f} GiB of memory while it is written, "
                f"and {free_bytes / 2**30:.1f} GiB are free",
                why="the states of all stages are gathered in the leader's memory first",
                fix="free memory, lead from a larger host, or set checkpoint.every_iterations = 0",
                code="E-CKP-014",
            )

    def _manifest(self, states: GatheredStates) -> CheckpointManifest:
        if states.loss is None:
            raise CheckpointError(
                f"the loss of iteration {states.iteration} is not known here",
                why="others committed it before this node came, and a checkpoint tells the loss",
                fix="nothing: it is tried again when the next one is due",
                code="E-CKP-018",
            )
        return CheckpointManifest(
            iteration=states.iteration,
            run_id=self._node.part.run_id,
            created_s=int(time.time()),  # noqa: TID251 - told to people, and tells runs apart.
            loss=states.loss,
            num_deferred=states.num_deferred,
            settings=settings_of(self._node.part.manifest),
            stages=(),
        )

    async def _write(self, manifest: CheckpointManifest, blobs: list[StageBlob]) -> None:
        """Write in a thread. Even if this is cancelled, it ends when the thread has."""
        abandoned = threading.Event()

        def work() -> None:
            # `--resume latest` must find what was written last, though the clock went back.
            others = find_checkpoints(self._node.config.state_dir)
            # A leader that was killed while it wrote: its run's folder is never written to again.
            remove_unfinished(self._node.config.state_dir)
            before_s = max((o.manifest.created_s for o in others if o.manifest), default=0)
            stamped = replace(manifest, created_s=max(manifest.created_s, before_s + 1))
            self._store.write(stamped, blobs, abandoned=abandoned.is_set)

        self._writing = True
        written = in_thread(work)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            abandoned.set()
            await asyncio.gather(written, return_exceptions=True)
            raise
        finally:
            self._writing = False


def _blobs(states: GatheredStates, manifest: Manifest) -> list[StageBlob]:
    """Return the states as the store takes them, after comparing them with the run's model.

    Raises:
        CheckpointError: A member described something else than its stage.
    """
    blobs = []
    for index, stage in enumerate(states.stages):
        entries = parse_entries(stage.tensors)
        check_tensors(entries, state_tensors(manifest.run.model, manifest.run.stages, index))
        blobs.append(StageBlob(tuple(entries), stage.data))
    return blobs


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two runs differ, such as `seed is 1 here and was 2 there`."""
    return [
        f"{key} is {now.get(key)} in the run file and was {then.get(key)} in the checkpoint"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
