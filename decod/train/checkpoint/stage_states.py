"""Single stages' states on a host's disk, its own and others', so that no stage is lost entirely.

    STATE_DIR/runs/RUN_ID/states/STAGE/ITERATION/manifest.json
                                                /stage-STAGE.safetensors

States are written like checkpoints (see `iteration_folders`), and the newest few of each stage
stay. The manifest is canonical JSON with a hash of itself, and contains the hash of every chunk. A
host lists a state only after it has compared all hashes, and compares each chunk's hash again
before it sends the chunk. If some chunks of a state are wrong, this host still uses the others.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decod.errors import CheckpointError
from decod.texts import why_of
from decod.train.checkpoint.description import (
    Chunk,
    Description,
    cut,
    description_text,
    entry_json,
    hash_tensor,
    parse_description,
    placed,
)
from decod.train.checkpoint.entries import StateBytes, parse_entries
from decod.train.checkpoint.iteration_folders import (
    Abandoned,
    ArrivedStage,
    ArrivingStages,
    Folders,
    StageBlob,
    numbered,
    stage_file,
)
from decod.train.checkpoint.manifest import (
    MANIFEST_SIZE_MAX_BYTES,
    file_header,
    file_size_bytes,
    packed,
)
from decod.train.checkpoint.places import (
    DiskRoom,
    File,
    FileOperations,
    OpenFile,
    is_plain_folder,
    opened,
    read_exactly,
)
from decod.train.checkpoint.store import Checkpoint

FORMAT_VERSION = 1
"""Version of folder and manifest."""

KEPT_PER_STAGE = 2
"""Number of states kept per stage. A state that all hosts have stays until a newer one is there."""

_MANIFEST = "manifest.json"
_STAGE = re.compile(r"0|[1-9][0-9]{0,3}\Z", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FIELDS = {"format_version", "stage_index", "iteration", "parameter_hash", "tensors", "chunks"}


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state on this host's disk."""

    path: File
    """The tensor file."""
    stage_index: int
    iteration: int
    parameter_hash: str
    """Hash that the members voted on; empty if it is not known here."""
    description: Description
    """Description of the state, with the same text at all donors."""
    places: Mapping[int, tuple[Chunk, int]]
    """The correct chunks by their offset in the blob, each with its start in the file. Chunks found
    to be wrong are left out."""
    whole: bool = True
    """Whether the file matches the manifest, as far as it was checked."""

    @property
    def defect(self) -> str:
        """The state's defect, for people; empty if it has none."""
        if self.whole:
            return ""
        num = len(self.description.chunks)
        num_right = len(self.places)
        if num_right == num:
            return "its file has another length or header than was written"
        return f"{num - num_right} of {num} chunks are not what was written"

    @staticmethod
    def of(
        path: File, stage_index: int, iteration: int, parameter_hash: str, description: Description
    ) -> "KeptState":
        """Return a state. The places of its chunks follow from its description."""
        entries = packed(description.entries)
        header = len(file_header(entries))
        starts = (header + offset for entry in entries for offset, _ in cut(entry))
        pairs = zip(description.chunks, starts, strict=True)
        places = {chunk.offset: (chunk, start) for chunk, start in pairs}
        return KeptState(path, stage_index, iteration, parameter_hash, description, places)

    def read(self, offset: int) -> bytes:
        """Return the bytes of the chunk at this offset of the blob.

        Raises:
            CheckpointError: The file can't be read, or its content has changed.
        """
        chunk, start = self.places[offset]
        try:
            with opened(self.path) as file:
                piece = file.read(start, chunk.num_bytes)
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error
        if hashlib.sha256(piece).hexdigest() != chunk.sha256:
            raise _unreadable(self.path, f"the bytes from {start} on were altered")
        return piece


StageNames = Callable[[int, Sequence[int]], Collection[str]]
"""Returns the names of all tensors of a stage's state, in a cut as of `RunConfig.with_blocks`."""


def no_names(stage_index: int, blocks: Sequence[int]) -> Collection[str]:  # noqa: ARG001
    """Return none: it is not known which tensors stages have."""
    return ()


class StateStore:
    """The states that a host keeps of one run. Only this class writes to their folder.

    Args:
        folder: The run's `states` folder.
        files: Operations on files.
        room: The cap on what this host's node may hold; if absent, there is none.
        names: Tells states of one cut of the model from those of another. If absent, all states are
            taken for those of the stages that are asked for.
    """

    def __init__(
        self,
        folder: Path,
        files: FileOperations | None = None,
        room: DiskRoom | None = None,
        names: StageNames = no_names,
    ) -> None:
        self.names = names
        self._folder = folder
        self._room = room or DiskRoom(folder)
        self._files = files or FileOperations()
        self._newest: dict[int, int] = {}
        """The iteration of the state written last, by stage."""

    def write(
        self,
        stage_index: int,
        iteration: int,
        parameter_hash: str,
        description: Description,
        data: StateBytes,
        *,
        abandoned: Abandoned = lambda: False,
    ) -> KeptState:
        """Write a state.

        Args:
            stage_index: The state's stage.
            iteration: The iteration after which the state was taken, from 1.
            parameter_hash: Hash of its parameters, as voted on.
            description: Description of the state.
            data: The blob.
            abandoned: Asked between pieces. Once it returns true, nothing more is written.

        Raises:
            CheckpointError: The disk refuses or has too little room, or the blob does not match its
                description. Earlier states are unchanged.
        """
        entries = packed(description.entries)
        values = {
            "format_version": FORMAT_VERSION,
            "stage_index": stage_index,
            "iteration": iteration,
            "parameter_hash": parameter_hash,
            "tensors": [entry_json(entry) for entry in description.entries],
            "chunks": "".join(chunk.sha256 for chunk in description.chunks),
        }
        folders = self._folders(stage_index)

        def fill(scratch: Path) -> None:
            blob = StageBlob(description.entries, data)
            folders.write_stage(scratch / stage_file(stage_index), entries, blob, abandoned)
            folders.write_file(scratch / _MANIFEST, [_sealed(values)])

        try:
            if not isinstance(data, ArrivedStage):
                self.require_room(stage_index, file_size_bytes(entries))
            folder = folders.write(iteration, fill, abandoned)
        except OSError as error:
            raise _unwritable(folders.folder, iteration, error.strerror or str(error)) from error
        self._newest[stage_index] = iteration
        path = folder / stage_file(stage_index)
        return KeptState.of(path, stage_index, iteration, parameter_hash, description)

    def arriving(self, stage_index: int) -> ArrivingStages:
        """Return a folder for a state of a stage that is about to arrive.

        Raises:
            CheckpointError: The disk refuses.
        """
        folders = self._folders(stage_index)
        try:
            return folders.arriving()
        except OSError as error:
            raise _unwritable(folders.folder, None, why_of(error)) from error

    def _folders(self, stage_index: int) -> Folders:
        return Folders(self._folder / str(stage_index), self._files, "kept state")

    def require_room(self, stage_index: int, size_bytes: int) -> None:
        """Check that the disk has room for a state of this size.

        Raises:
            CheckpointError: The disk has too little room, or the node may not take it.
            OSError: The disk can't be examined.
        """
        folder = self._folders(stage_index).folder
        self._files.make_folder(folder)
        try:
            self._room.require(size_bytes)
        except OSError as error:
            raise _unwritable(folder, None, why_of(error)) from error
        free = os.statvfs(folder)
        free_bytes = free.f_bavail * free.f_frsize
        # As much again stays free, because the disk is the owner's.
        if 2 * size_bytes > free_bytes:
            needed = f"{size_bytes / 2**20:.1f} MiB, {free_bytes / 2**20:.1f} MiB are free"
            raise _unwritable(folder, None, f"it takes {needed}, and as much again is left free")

    def prune(self, stage_index: int, keep: int = KEPT_PER_STAGE) -> list[int]:
        """Remove the oldest states of a stage beyond `keep`. Return their iterations.

        States of later iterations than the last written one, from before a rollback, go first.

        Raises:
            OSError: Something can't be removed.
        """
        return self._folders(stage_index).prune(keep, self._newest.get(stage_index))

    def examine(self) -> Iterator[tuple[tuple[int, int], KeptState | None]]:
        """Read every byte of every state, and yield the states, the newest first. Never raises.

        Yields:
            Stage index and iteration, and the state, whole or not. None if its manifest is bad.
        """
        places = [
            (int(path.name), int(stage.name), path)
            for stage in self._stages()
            for path in numbered(stage)
        ]
        for iteration, stage_index, path in sorted(places, reverse=True):
            state = _read(path, stage_index)
            yield (stage_index, iteration), None if state is None else _examined(state)

    def find(self) -> list[KeptState]:
        """Return every state whose bytes are all correct, the newest first. Never raises."""
        return [state for _, state in self.examine() if state is not None and state.whole]

    def _stages(self) -> list[Path]:
        try:
            paths = [path for path in self._folder.iterdir() if _STAGE.match(path.name)]
            return [path for path in paths if is_plain_folder(path)]
        except OSError:
            return []


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _sealed(values: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(_canonical(values)).hexdigest()
    return _canonical({**values, "sha256": digest})


def _read(folder: Path, stage_index: int) -> KeptState | None:
    """Return a state by its manifest, or None if the manifest is bad."""
    try:
        if not is_plain_folder(folder):
            return None
        with opened(folder / _MANIFEST) as file:
            size_bytes = file.size_bytes()
            if size_bytes > MANIFEST_SIZE_MAX_BYTES:
                return None
            text = b"".join(read_exactly(file, 0, size_bytes))
        values = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or set(values) != _FIELDS | {"sha256"}:
        return None
    body = {key: value for key, value in values.items() if key != "sha256"}
    expected = (FORMAT_VERSION, stage_index, int(folder.name))
    found = (values["format_version"], values["stage_index"], values["iteration"])
    parameter_hash = values["parameter_hash"]
    chunks = values["chunks"]
    if text != _sealed(body) or found != expected:
        return None
    if not isinstance(chunks, str) or not _SHA256.match(str(parameter_hash)):
        return None
    try:
        entries = placed(parse_entries(values["tensors"]))
        tensors = [entry_json(entry) for entry in entries]
        description = parse_description(description_text(tensors, chunks))
    except CheckpointError:
        return None
    path = folder / stage_file(stage_index)
    return KeptState.of(path, stage_index, expected[2], parameter_hash, description)


def state_of_checkpoint(checkpoint: Checkpoint, stage_index: int) -> KeptState | None:
    """Return one stage's state from a checkpoint, after reading it in full. None if it is bad."""
    manifest = checkpoint.manifest
    if manifest is None or stage_index >= len(manifest.stages):
        return None
    entries = manifest.stages[stage_index]
    path = checkpoint.folder / stage_file(stage_index)
    digests = list[str]()
    try:
        first = len(file_header(entries))
        with opened(path) as file:
            for entry in entries:
                places = cut(replace(entry, offset=first + entry.offset))
                pieces = (b"".join(read_exactly(file, start, size)) for start, size in places)
                whole, chunks = hash_tensor(pieces)
                digests += chunks
                if whole != entry.sha256:
                    return None
    except (OSError, EOFError):
        return None
    tensors = [entry_json(entry) for entry in placed(entries)]
    description = parse_description(description_text(tensors, "".join(digests)))
    return KeptState.of(path, stage_index, checkpoint.iteration, "", description)


def _examined(state: KeptState) -> KeptState:
    """Read every byte of a state. Return it with its correct chunks."""
    entries = packed(state.description.entries)
    header = file_header(entries)
    right = dict[int, tuple[Chunk, int]]()
    try:
        with opened(state.path) as file:
            framed = file.size_bytes() == file_size_bytes(entries)
            framed = framed and file.read(0, len(header)) == header
            for offset, (chunk, start) in state.places.items():
                if _sha256_at(file, chunk, start) == chunk.sha256:
                    right[offset] = chunk, start
    except OSError:
        framed = False
    return replace(state, places=right, whole=framed and len(right) == len(state.places))


def _sha256_at(file: OpenFile, chunk: Chunk, start: int) -> str:
    try:
        return hashlib.sha256(file.read(start, chunk.num_bytes)).hexdigest()
    except OSError:
        return ""  # One unreadable sector says nothing about the others.


def _unreadable(path: File, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the state in {path} can't be read",
        why=reason,
        fix="nothing: another host's is used",
        code="E-CKP-015",
    )


def _unwritable(folder: Path, iteration: int | None, reason: str) -> CheckpointError:
    which = "a state" if iteration is None else f"the state of iteration {iteration}"
    return CheckpointError(
        f"{which} could not be written to {folder}",
        why=reason,
        fix="make room or mend the disk; training goes on, and it is tried again",
        code="E-CKP-016",
    )
