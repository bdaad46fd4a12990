"""Single stages' states on a host's disk: its own and others', so that no stage is ever lost whole.

    STATE_DIR/runs/RUN_ID/states/STAGE/ITERATION/manifest.json
                                                /stage-STAGE.safetensors

Written as checkpoints are, see `folders`; the newest few of each stage stay. The manifest is
canonical JSON with a hash of itself, and holds the hash of every chunk: nothing is given to anybody
before its hash has been compared, and a state is listed only after all have been. Of one in which
some are wrong the others are still of use to this host: each of them is what it was.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decod.errors import CheckpointError
from decod.files import open_ordinary
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
from decod.train.checkpoint.entries import parse_entries
from decod.train.checkpoint.files import FileOperations, is_plain_folder, read_exactly
from decod.train.checkpoint.folders import Abandoned, Folders, StageBlob, numbered, stage_file
from decod.train.checkpoint.manifest import (
    MANIFEST_SIZE_MAX_BYTES,
    file_header,
    file_size_bytes,
    packed,
)
from decod.train.checkpoint.store import Checkpoint

FORMAT_VERSION = 1
"""Of folder and manifest."""

KEPT_PER_STAGE = 2
"""A state that everybody has is thrown away only when a newer one is there."""

_MANIFEST = "manifest.json"
_STAGE = re.compile(r"0|[1-9][0-9]{0,3}\Z", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FIELDS = {"format_version", "stage_index", "iteration", "parameter_hash", "tensors", "chunks"}


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state on this host's disk."""

    path: Path
    """Of its tensors."""
    stage_index: int
    iteration: int
    parameter_hash: str
    """As voted on; empty if that is not known here."""
    description: Description
    """The very text that its donors say of it."""
    places: Mapping[int, tuple[Chunk, int]]
    """For the offset of each chunk in the blob: the chunk, and where it begins in the file. Without
    those that were found to be wrong."""
    whole: bool = True
    """Whether the file is what the manifest says, as far as anybody has looked."""

    @property
    def defect(self) -> str:
        """What is wrong with it, for people; empty if it is whole."""
        if self.whole:
            return ""
        num, num_right = len(self.description.chunks), len(self.places)
        if num_right == num:
            return "its file has another length or header than was written"
        return f"{num - num_right} of {num} chunks are not what was written"

    @staticmethod
    def of(
        path: Path, stage_index: int, iteration: int, parameter_hash: str, description: Description
    ) -> "KeptState":
        """Return a state with the places of its chunks, which follow from its description."""
        entries = packed(description.entries)
        header = len(file_header(entries))
        starts = (header + offset for entry in entries for offset, _ in cut(entry))
        pairs = zip(description.chunks, starts, strict=True)
        places = {chunk.offset: (chunk, start) for chunk, start in pairs}
        return KeptState(path, stage_index, iteration, parameter_hash, description, places)

    def read(self, offset: int) -> bytes:
        """Return the bytes of the chunk at this offset of the blob.

        Raises:
            CheckpointError: The file can't be read, or holds something else by now.
        """
        chunk, start = self.places[offset]
        try:
            with open_ordinary(self.path, follow_links=False) as descriptor:
                piece = os.pread(descriptor, chunk.num_bytes, start)
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error
        if hashlib.sha256(piece).hexdigest() != chunk.sha256:
            raise _unreadable(self.path, f"the bytes from {start} on were altered")
        return piece


class StateStore:
    """The states that a host keeps of one run; the only writer of their folder.

    Args:
        folder: `states` of the run.
        files: Operations on files.
    """

    def __init__(self, folder: Path, files: FileOperations | None = None) -> None:
        self._folder = folder
        self._files = files or FileOperations()
        self._newest: dict[int, int] = {}
        """For each stage the iteration of the state that was written last."""

    def write(
        self,
        stage_index: int,
        iteration: int,
        parameter_hash: str,
        description: Description,
        data: memoryview,
        *,
        abandoned: Abandoned = lambda: False,
    ) -> KeptState:
        """Write a state.

        Args:
            stage_index: Whose it is.
            iteration: The iteration after which it was taken, from 1.
            parameter_hash: Of its parameters, as voted on.
            description: Of it.
            data: The blob.
            abandoned: Once it is true, nothing more is written.

        Raises:
            CheckpointError: The disk refuses or has too little room, or the blob is not what the
                description says. What was there before is as it was.
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
            self.require_room(stage_index, file_size_bytes(entries))
            folder = folders.write(iteration, fill, abandoned)
        except OSError as error:
            raise _unwritable(folders.folder, iteration, error.strerror or str(error)) from error
        self._newest[stage_index] = iteration
        path = folder / stage_file(stage_index)
        return KeptState.of(path, stage_index, iteration, parameter_hash, description)

    def _folders(self, stage_index: int) -> Folders:
        return Folders(self._folder / str(stage_index), self._files, "kept state")

    def require_room(self, stage_index: int, size_bytes: int) -> None:
        """Refuse to write so much of a stage, if the disk has too little room.

        Raises:
            CheckpointError: It has.
            OSError: It can't be looked at.
        """
        folder = self._folders(stage_index).folder
        self._files.make_folder(folder)
        free = os.statvfs(folder)
        free_bytes = free.f_bavail * free.f_frsize
        # As much again stays free: the disk is the owner's.
        if 2 * size_bytes > free_bytes:
            needed = f"{size_bytes / 2**20:.1f} MiB, {free_bytes / 2**20:.1f} MiB are free"
            raise _unwritable(folder, None, f"it takes {needed}, and as much again is left free")

    def prune(self, stage_index: int, keep: int = KEPT_PER_STAGE) -> list[int]:
        """Remove the oldest states of a stage beyond `keep`; return their iterations.

        Those of later iterations than the one that was written last, from before the run went back,
        go first.

        Raises:
            OSError: Something can't be removed.
        """
        return self._folders(stage_index).prune(keep, self._newest.get(stage_index))

    def examine(self) -> Iterator[tuple[tuple[int, int], KeptState | None]]:
        """Yield every state, the newest first, after reading every byte of it. Never raises.

        Yields:
            Stage index and iteration; and the state, whole or not, or None if its manifest is bad.
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
        """Return every state of which every byte is right, the newest first. Never raises."""
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
    """Return a state by its manifest, or None if that is not one."""
    try:
        if not is_plain_folder(folder):
            return None
        with open_ordinary(folder / _MANIFEST, follow_links=False) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes > MANIFEST_SIZE_MAX_BYTES:
                return None
            text = b"".join(read_exactly(descriptor, size_bytes))
        values = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or set(values) != _FIELDS | {"sha256"}:
        return None
    body = {key: value for key, value in values.items() if key != "sha256"}
    expected = (FORMAT_VERSION, stage_index, int(folder.name))
    found = (values["format_version"], values["stage_index"], values["iteration"])
    parameter_hash, chunks = values["parameter_hash"], values["chunks"]
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
    """Return one stage's state out of a checkpoint, all of which was read, or None if it is bad."""
    manifest = checkpoint.manifest
    if manifest is None or stage_index >= len(manifest.stages):
        return None
    entries = manifest.stages[stage_index]
    path, digests = checkpoint.folder / stage_file(stage_index), list[str]()
    try:
        with open_ordinary(path, follow_links=False) as descriptor:
            os.lseek(descriptor, len(file_header(entries)), os.SEEK_SET)
            for entry in entries:
                pieces = (b"".join(read_exactly(descriptor, size)) for _, size in cut(entry))
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
    """Read every byte of a state; return it with what is right of it."""
    entries = packed(state.description.entries)
    header, right = file_header(entries), dict[int, tuple[Chunk, int]]()
    try:
        with open_ordinary(state.path, follow_links=False) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            framed = size_bytes == file_size_bytes(entries)
            framed = framed and os.pread(descriptor, len(header), 0) == header
            for offset, (chunk, start) in state.places.items():
                if _sha256_at(descriptor, chunk, start) == chunk.sha256:
                    right[offset] = chunk, start
    except OSError:
        framed = False
    return replace(state, places=right, whole=framed and len(right) == len(state.places))


def _sha256_at(descriptor: int, chunk: Chunk, start: int) -> str:
    try:
        return hashlib.sha256(os.pread(descriptor, chunk.num_bytes, start)).hexdigest()
    except OSError:
        return ""  # One sector that can't be read says nothing of the others.


def _unreadable(path: Path, reason: str) -> CheckpointError:
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
