"""States on this host's disk: its own stage's, and mirrors of other stages', for recovery.

The machine decides which states are written. A thread writes them one after another. Failures are
shown in the log and in `decod status`, and never stop training. The states serve peers, this node
itself after a rollback or a restart, and downloads, which take equal chunks from them.

Data that were altered on the disk are reported and never used. Before a host says that it has the
state of a lost stage, it reads that state to the last byte.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from decod.daemon.run_facts import RunPart
from decod.driver.driver import ServedState
from decod.errors import CheckpointError, DecodError
from decod.limits import StageBlocks
from decod.net.donor import StateBlob, StateRequest
from decod.net.net_limits import Limits
from decod.protocol.core.effects import FetchState, MirrorState
from decod.protocol.core.era import Kept
from decod.protocol.core.events import CheckpointRead, KeptRead, StateForgotten, StateKept
from decod.run.run_config import RunConfig
from decod.tasks import TaskSet, in_thread, to_its_end
from decod.texts import clip, why_of
from decod.train.checkpoint.description import (
    Chunk,
    Description,
    QuietSink,
    cut,
    described_hash,
    parse_description,
    part_of,
)
from decod.train.checkpoint.entries import StateBytes, state_tensors, weight_tensors
from decod.train.checkpoint.initial_state import InitialState, from_checkpoint, from_folder
from decod.train.checkpoint.iteration_folders import ArrivedStage, numbered, stage_file
from decod.train.checkpoint.places import File, Folder, opened
from decod.train.checkpoint.shared import SharedStore, find_stored
from decod.train.checkpoint.stage_states import (
    KEPT_PER_STAGE,
    KeptState,
    StateStore,
    no_names,
    state_of_checkpoint,
)
from decod.train.checkpoint.store import (
    CheckpointTensor,
    find_problems,
    find_tensors,
    read_checkpoint,
)

# --- the first states of a run -------------------------------------------------------------------
# The first states of all stages, which the leader gives to the members of a run that goes on.
#
# They are read from the checkpoint or the model folder that the run started from, chunk by chunk.
# The leader's device does not take part.


_REASON_MAX = 200


_CUTS_MAX = 4
"""Cuts of which first states are kept. A run that has not begun has one or two."""


class InitialStates:
    """The first states of a run that starts from weights.

    Args:
        part: The leader's part in the run, with a checkpoint or the folder of a model.
    """

    def __init__(self, part: RunPart) -> None:
        run = part.run
        self.iteration = part.manifest.start_iteration
        self._part, self._run = part, run
        self._states: dict[tuple[int, StageBlocks], asyncio.Future[InitialState]] = {}

    async def find(self, stage_index: int, of_cut: StageBlocks = ()) -> StateBlob | str:
        """Return the first state of a stage in a cut, or why there is none."""
        if not self._run.allows(of_cut):
            return "the model can't be cut like this"
        run = self._run.with_blocks(of_cut)
        if not 0 <= stage_index <= run.stages.num_relay_stages:
            return f"there is no stage {stage_index}"
        # Hashing it takes long. Members that ask meanwhile, and again, share one result.
        key = (stage_index, of_cut)
        cuts = [*dict.fromkeys(cut for _, cut in self._states)]
        if of_cut not in cuts and len(cuts) >= _CUTS_MAX:
            self._states = {k: state for k, state in self._states.items() if k[1] != cuts[0]}
        if key not in self._states:
            self._states[key] = in_thread(partial(self._read, run, stage_index))
        try:
            state = await asyncio.shield(self._states[key])
        except DecodError as error:
            self._states.pop(key, None)
            return clip(str(error), _REASON_MAX)

        async def read(offset: int, num_bytes: int) -> bytes:  # noqa: ARG001 - a chunk's own.
            return await in_thread(lambda: state.read(offset))

        return StateBlob(manifest=state.description.text, read=read, release=_nothing)

    def _read(self, run: RunConfig, stage_index: int) -> InitialState:
        part = self._part
        if part.checkpoint_dir is None:
            assert part.init_dir is not None
            weights = weight_tensors(run, stage_index)
            return from_folder(part.init_dir, run.model, weights)
        checkpoint = read_checkpoint(part.checkpoint_dir)
        manifest = checkpoint.manifest
        if manifest is None or manifest.sha256 != part.manifest.initial_weights:
            raise CheckpointError(
                f"{checkpoint.folder} is not the checkpoint that this run started from",
                why=checkpoint.problem or "its manifest has another hash",
                fix="put it back, or start the run again with --resume",
                code="E-CKP-010",
            )
        tensors = state_tensors(run, stage_index)
        return from_checkpoint(checkpoint, tensors, part.checkpoint_chunks)


def _nothing() -> None:
    """Do nothing: the files are opened anew by each reader, and need no release."""


# --- chunks from a shared store ------------------------------------------------------------------
# Chunks of the checkpoint from which a run goes on, read from the store that members share.
#
# The leader describes the first state of each stage. A member that has the store too takes the
# chunks from there, so that they don't pass the leader's link. Every chunk is verified by whoever
# fetches it. If the store fails, the chunks come from the leader as ever.


@dataclass(frozen=True, slots=True)
class _Place:
    file: File
    start: int


class StoredChunks:
    """The chunks of one checkpoint in a store.

    Args:
        store: The store.
        sha256: Hash of the checkpoint's manifest.
    """

    def __init__(self, store: SharedStore, sha256: str) -> None:
        self._store, self._sha256 = store, sha256
        self.on_failed: list[Callable[[str], None]] = []
        """Called with the reason if the store fails, in the thread that reads."""
        self._awaited: Description | None = None
        self._tensors: dict[str, CheckpointTensor] | None = None
        """The checkpoint's tensors by their names, once they were looked for."""
        self._places: dict[str, _Place] = {}

    def expect(self, description: Description) -> None:
        """Take in what is about to be fetched."""
        self._awaited = description

    def read(self, chunk: Chunk) -> bytes | None:
        """Return a chunk's bytes if the store has them. Waits for the store. Not verified."""
        try:
            if (awaited := self._awaited) is not None:
                self._awaited, self._places = None, {}
                self._places = self._places_of(awaited)
            place = self._places.get(chunk.sha256)
            if place is None:
                return None
            with opened(place.file) as file:
                return file.read(place.start, chunk.num_bytes)
        except (OSError, CheckpointError) as error:
            self._places = {}
            for told in self.on_failed:
                told(str(error))
            return None

    def _places_of(self, description: Description) -> dict[str, _Place]:
        """Return where the store has the chunks of a state, by their hashes."""
        if self._tensors is None:
            found = find_stored(self._store)
            ours = (e for e in found if e.manifest and e.manifest.sha256 == self._sha256)
            checkpoint = next(ours, None)
            self._tensors = {} if checkpoint is None else find_tensors(checkpoint)
        chunks, places = iter(description.chunks), dict[str, _Place]()
        for entry in description.entries:
            tensor = self._tensors.get(entry.name)
            same = tensor is not None and tensor.entry.sha256 == entry.sha256
            for offset, _ in cut(entry):
                chunk = next(chunks)
                if tensor is not None and same:
                    start = tensor.start + offset - entry.offset
                    places[chunk.sha256] = _Place(tensor.path, start)
        return places


# --- states on the disk --------------------------------------------------------------------------


_MIRROR_LIMITS = Limits(state_donors_max=2, download_share=0.5, run_of_chunks_s=0.5)
"""Limits for fetching a mirror, which is not urgent: half of the time is left to tensors."""

_MIRROR_ATTEMPTS = 4
_MIRROR_PAUSE_S = 5.0
"""Pause between attempts: members may still be writing the state."""

_MIRRORS_WAITING_MAX = 64

_SEARCH_MAX_S = 60.0
"""How long a fetch waits for the search of this host's disk. Reading a disk is faster than any
link, but a disk may hang."""

_CHUNK_MAX_S = 30.0
"""A state on a disk that takes longer for one chunk counts as damaged."""


DiskEvent = StateKept | StateForgotten | KeptRead | CheckpointRead


class DiskStates:
    """The states on this host's disk. The driver's `StateDisk`.

    Args:
        folder: The run's folder, which holds the checkpoints too.
        post: Tells the core what is on disk, if it runs.
        note: Takes the name of an event, and its fields as keywords.
        fetch: Fetches a state from other nodes; see `Gateway.fetch_state`.
        store: Reads and writes the states; if absent, in the run's folder.
        stored: The checkpoint from which the run goes on, if it may be in a store that this node
            shares.
    """

    def __init__(
        self,
        folder: Path,
        *,
        post: Callable[[DiskEvent], None],
        note: Callable[..., None],
        fetch: Callable[..., Awaitable[str]],
        store: StateStore | None = None,
        stored: StoredChunks | None = None,
    ) -> None:
        self._post, self._note, self._fetch = post, note, fetch
        self._checkpoints = folder
        self._store = store or StateStore(self._checkpoints.with_name("states"))
        self._stored = stored
        if stored is not None:
            stored.on_failed.append(self._store_failed)
        self._in_store: dict[int, Folder] = {}
        """The newest checkpoints that this node has written into a shared store, by iteration."""
        self._kept: dict[tuple[int, int], KeptState] = {}
        self._chunks: dict[str, tuple[KeptState, int]] = {}
        self._writing = asyncio.Lock()
        self._mirrors: deque[MirrorState] = deque(maxlen=_MIRRORS_WAITING_MAX)
        self._mirroring: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._searching: asyncio.Task[None] | None = None
        self._closed = False
        self._problem: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return the part of `decod status` on kept states."""
        states = [
            {"stage_index": stage, "iteration": iteration}
            for stage, iteration in sorted(self._kept)
        ]
        return {"kept": states, "problem": self._problem}

    def start(self) -> None:
        """Begin to search the disk for states of earlier processes, in a thread."""
        self._loop = asyncio.get_running_loop()
        self._searching = self._tasks.start(self._search())

    async def searched(self) -> None:
        """Wait until the disk has been searched, or until that takes too long."""
        if self._searching is not None:
            await asyncio.wait({self._searching}, timeout=_SEARCH_MAX_S)

    async def close(self) -> None:
        """Give up all states that are being written or fetched."""
        self._closed = True
        await self._tasks.close()

    async def _search(self) -> None:
        found = self._store.examine()
        async with self._writing:
            while (one := await in_thread(lambda: next(found, None))) is not None:
                (stage, iteration), state = one
                if state is not None and state.whole:
                    await self._added(state)
                    continue
                self._damaged(stage, iteration, state.defect if state else "its manifest is bad")
                if state is not None:
                    # The machine is not told of it, but its intact chunks save fetching them.
                    self._chunks |= _chunks_of(state)

    # --- written ------------------------------------------------------------------------------

    def keep(self, stage_index: int, parameter_hash: str, served: ServedState) -> None:
        """Write this node's own state; see `StateDisk`."""
        self._tasks.start(self._write(stage_index, served, parameter_hash))

    async def _write(self, stage_index: int, served: ServedState, hash_: str) -> None:
        def write() -> KeptState:
            return self._store.write(
                stage_index,
                served.iteration,
                hash_,
                parse_description(served.manifest),
                served.data,
                abandoned=lambda: self._closed,
            )

        try:
            async with self._writing:
                if self._has(stage_index, served.iteration, hash_):
                    return
                written = in_thread(write)
                try:
                    state = await asyncio.shield(written)
                finally:
                    # The thread reads the memory, so it must have ended before the release.
                    await asyncio.gather(written, return_exceptions=True)
                self._problem = None
                await self._added(state)
        except DecodError as error:
            self._failed(stage_index, served.iteration, str(error))
        finally:
            served.release()

    async def _added(self, state: KeptState) -> None:
        """List a new state, tell the machine of it, and remove older states than are needed."""
        stage, iteration = state.stage_index, state.iteration
        replaced = self._kept.get((stage, iteration))
        self._chunks = {key: at for key, at in self._chunks.items() if at[0] is not replaced}
        self._kept[stage, iteration] = state
        self._chunks |= _chunks_of(state)
        self._note("state.kept", stage=stage, iteration=iteration)
        self._post(StateKept(stage, iteration, state.parameter_hash))
        gone: list[int] = []
        with suppress(OSError):  # One state too many does no harm.
            gone = await in_thread(lambda: self._store.prune(stage))
        for old in gone:
            self._forget(stage, old)

    def _has(self, stage: int, iteration: int, hash_: str) -> bool:
        """Whether a state is kept. One from before a rollback has another hash."""
        kept = self._kept.get((stage, iteration))
        return kept is not None and kept.parameter_hash == hash_

    def _forget(self, stage: int, iteration: int) -> None:
        state = self._kept.pop((stage, iteration), None)
        if state is None:
            return
        self._chunks = {key: at for key, at in self._chunks.items() if at[0] is not state}
        self._post(StateForgotten(stage, iteration))

    def _failed(self, stage: int, iteration: int, reason: str) -> None:
        if not self._closed:
            self._problem = reason
            self._note("state.unkept", stage=stage, iteration=iteration, reason=reason)

    def _damaged(self, stage: int, iteration: int, reason: str) -> None:
        self._problem = f"the state of stage {stage} after iteration {iteration}: {reason}"
        self._note("state.damaged", stage=stage, iteration=iteration, reason=reason)

    def _spoiled(self, state: KeptState, reason: str) -> None:
        """Report a state that can no longer be read, once, and stop using it."""
        stage, iteration = state.stage_index, state.iteration
        if self._kept.get((stage, iteration)) is not state:
            return
        # A state beyond the number that is kept may just have been removed.
        if iteration in sorted(i for s, i in self._kept if s == stage)[-KEPT_PER_STAGE:]:
            self._damaged(stage, iteration, reason)
        self._forget(stage, iteration)

    # --- mirrored -----------------------------------------------------------------------------

    def mirror(self, effect: MirrorState) -> None:
        """Queue another stage's state to be fetched and written; see `StateDisk`."""
        if self._has(effect.stage_index, effect.iteration, effect.parameter_hash):
            return
        # An older state of the stage that still waits is of no use now.
        newer = [each for each in self._mirrors if each.stage_index != effect.stage_index]
        self._mirrors = deque([*newer, effect], maxlen=_MIRRORS_WAITING_MAX)
        if self._mirroring is None or self._mirroring.done():
            self._mirroring = self._tasks.start(self._mirror_all())

    async def _mirror_all(self) -> None:
        while self._mirrors:
            effect, reason = self._mirrors.popleft(), ""
            for attempt in range(_MIRROR_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(_MIRROR_PAUSE_S)
                if any(each.stage_index == effect.stage_index for each in self._mirrors):
                    break
                try:
                    await self._mirror(effect)
                except CheckpointError as error:
                    # This host lacks disk space. Trying again in a few seconds would not help.
                    self._failed(effect.stage_index, effect.iteration, str(error))
                    break
                except DecodError as error:
                    reason = str(error)
                else:
                    break
            else:
                self._failed(effect.stage_index, effect.iteration, reason)

    async def _mirror(self, effect: MirrorState) -> None:
        wanted = FetchState(
            effect.donors,
            effect.stage_index,
            effect.iteration,
            effect.parameter_hash,
            cut=effect.cut,
        )
        await self.searched()
        store, stage = self._store, effect.stage_index
        arriving = await to_its_end(lambda: store.arriving(stage))
        try:
            sink = _Mirror(
                partial(arriving.place, stage_file(stage)),
                partial(store.require_room, stage),
                self.local,
            )
            text = await self._fetch(wanted, sink, limits=_MIRROR_LIMITS)
            assert sink.data is not None, "it has arrived"
            served = ServedState(effect.iteration, text, sink.data, _nothing)
            await self._write(stage, served, effect.parameter_hash)
        finally:
            await to_its_end(arriving.close)

    # --- read ---------------------------------------------------------------------------------

    async def find(self, request: StateRequest) -> StateBlob | None:
        """Return the state that a peer asks for, or None if it is not on this host's disk."""
        state = await self._state(request.stage_index, request.iteration)
        if state is None or not request.with_optimizer:
            return None
        if not self._is_of(state, request.cut):
            return None
        return StateBlob(
            manifest=state.description.text, read=partial(self._read, state), release=_nothing
        )

    def _is_of(self, state: KeptState, of_cut: StageBlocks) -> bool:
        """Whether a state is that of its stage in a cut."""
        names = self._store.names
        if names is no_names:
            return True
        found = {entry.name for entry in state.description.entries}
        return found == set(names(state.stage_index, of_cut))

    async def _state(self, stage_index: int, iteration: int) -> KeptState | None:
        kept = self._kept.get((stage_index, iteration))
        if kept is not None:
            return kept
        if (stored := self._in_store.get(iteration)) is not None:
            return await in_thread(partial(_state_in, stored, stage_index))
        folder = self._checkpoints / str(iteration)
        try:
            is_there = iteration >= 1 and folder.is_dir()
        except OSError as error:
            self._bad_checkpoint(iteration, error.strerror or str(error))
            return None
        if not is_there:
            return None
        return await in_thread(partial(_state_in, folder, stage_index))

    def read_kept(self, wanted: tuple[Kept, ...]) -> None:
        """Read states to their last byte, before the run relies on them; see `StateDisk`."""
        self._tasks.start(self._read_kept(wanted))

    async def _read_kept(self, wanted: tuple[Kept, ...]) -> None:
        for kept in wanted:
            state = self._kept.get((kept.stage_index, kept.iteration))
            # If another state has replaced it, the machine has been told of that one.
            if state is not None and (defect := await _defect(state)):
                self._spoiled(state, defect)
        self._post(KeptRead(wanted))

    def read_checkpoint(self, iteration: int) -> None:
        """Find the newest whole checkpoint up to an iteration; see `StateDisk`."""
        self._tasks.start(self._read_checkpoint(iteration))

    async def _read_checkpoint(self, wanted: int) -> None:
        places: dict[int, Folder] = {int(p.name): p for p in numbered(self._checkpoints)}
        places |= self._in_store
        iterations = sorted(places, reverse=True)
        newest: int | None = None
        if wanted not in iterations:
            self._bad_checkpoint(wanted, "it is not there any more")
        for iteration in (each for each in iterations if each <= wanted):
            problems = await in_thread(partial(_problems, places[iteration]))
            if not problems:
                newest = iteration
                break
            self._bad_checkpoint(iteration, "; ".join(problems)[:500])
        self._post(CheckpointRead(wanted, newest))

    def _bad_checkpoint(self, iteration: int, reason: str) -> None:
        self._problem = f"the checkpoint of iteration {iteration} is bad: {reason}"
        self._note("checkpoint.damaged", iteration=iteration, reason=reason)

    def use_stored(self, iteration: int, folder: Folder) -> None:
        """Take in a checkpoint that this node has written into a shared store."""
        self._in_store.pop(iteration, None)
        newest = [*self._in_store.items(), (iteration, folder)]
        self._in_store = dict(newest[-KEPT_PER_STAGE:])

    async def _read(self, state: KeptState, offset: int, num_bytes: int) -> bytes:  # noqa: ARG002
        try:
            return await in_thread(lambda: state.read(offset))
        except CheckpointError as error:
            self._spoiled(state, error.why)
            raise

    def local(self, chunk: Chunk) -> bytes | None:
        """Return a chunk's bytes if they are on this disk; see `StateDisk`."""
        found = self._chunks.get(chunk.sha256)
        if found is None:
            return None if self._stored is None else self._stored.read(chunk)
        state, offset = found
        try:
            return state.read(offset)
        except CheckpointError as error:
            self._soon(self._spoiled, state, error.why)
            return None

    def expect(self, description: Description) -> None:
        """Take in what is about to be fetched; see `StateDisk`."""
        if self._stored is not None:
            self._stored.expect(description)

    def _store_failed(self, reason: str) -> None:
        """Report that a store can't be read. Called in a thread."""
        self._soon(partial(self._note, "store.unread", reason=reason))

    def _soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Call from a thread what belongs to the loop."""
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop has ended meanwhile.
                self._loop.call_soon_threadsafe(call, *arguments)

    async def load(
        self, wanted: FetchState, allocate: Callable[[int], StateBytes | None]
    ) -> str | None:
        """Read a state from this host's disk; see `StateDisk`."""
        state = await self._state(wanted.stage_index, wanted.iteration)
        if state is None or not self._is_of(state, wanted.cut):
            return None
        whole = state.description
        found = state.parameter_hash or described_hash(whole.entries)
        if wanted.part is not None and wanted.parameter_hash not in ("", found):
            return None
        description = whole
        if wanted.part is not None:
            names = self._store.names(wanted.part.stage_index, wanted.part.cut)
            description = part_of(whole, names)
        buffer = allocate(description.num_bytes)
        if buffer is None:
            return None
        for chunk in description.chunks:
            offset = whole.chunks[chunk.index].offset
            try:
                piece = await self._read(state, offset, chunk.num_bytes)
            except CheckpointError as error:
                if (wanted.stage_index, wanted.iteration) not in self._kept:
                    self._failed(wanted.stage_index, wanted.iteration, str(error))
                return None
            try:
                await to_its_end(partial(_put, buffer, chunk, piece))
            except OSError as error:
                self._failed(wanted.stage_index, wanted.iteration, why_of(error))
                return None
        if wanted.parameter_hash not in ("", found):
            return None
        return description.text


class _Mirror(QuietSink):
    """Leads a mirror to its file as it arrives, since it may be larger than the memory."""

    def __init__(
        self,
        place: Callable[[Description], ArrivedStage],
        require_room: Callable[[int], None],
        local: Callable[[Chunk], bytes | None],
    ) -> None:
        self.data: ArrivedStage | None = None
        self._place, self._require_room, self._local = place, require_room, local
        self._description: Description | None = None

    @override
    def expect(self, description: Description) -> None:
        self._description = description

    def allocate(self, size_bytes: int) -> ArrivedStage | None:
        assert self._description is not None, "it is described first"
        # Do not fetch a state for which the disk has no room.
        with suppress(OSError):  # Writing reports this error.
            self._require_room(size_bytes)
        self.data = self._place(self._description)
        return self.data

    @override
    def local(self, chunk: Chunk) -> bytes | None:
        return self._local(chunk)


def _put(buffer: StateBytes, chunk: Chunk, piece: bytes) -> None:
    buffer[chunk.offset : chunk.offset + chunk.num_bytes] = piece


def _chunks_of(state: KeptState) -> dict[str, tuple[KeptState, int]]:
    return {chunk.sha256: (state, offset) for offset, (chunk, _) in state.places.items()}


async def _defect(state: KeptState) -> str:
    """Read a whole state; return its defect, or an empty text if it is whole."""
    for offset in state.places:
        try:
            await asyncio.wait_for(in_thread(partial(state.read, offset)), _CHUNK_MAX_S)
        except CheckpointError as error:
            return error.why
        except TimeoutError:
            return f"the disk has not given a part of it in {_CHUNK_MAX_S:.0f} s"
    return ""


def _state_in(checkpoint: Folder, stage_index: int) -> KeptState | None:
    return state_of_checkpoint(read_checkpoint(checkpoint), stage_index)


def _problems(checkpoint: Folder) -> list[str]:
    return find_problems(read_checkpoint(checkpoint))
