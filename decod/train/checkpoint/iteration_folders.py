"""Folders that are named after iterations, and written as a whole or not at all.

A folder is first written as `.writing-ITERATION`, beside its final place. Once the disk has every
file, one rename gives the folder its name. A reader therefore sees all of it or nothing, whenever
the machine stops. For the same reason, a surplus folder is renamed before it is removed.

States go to their files as they arrive, so that no more than a few chunks are ever in memory. Each
tensor of a blob has a place of its own in the file, which need not be in the blob's order. So the
file is complete when the last chunk is there, and nothing is copied afterwards.
"""

import bisect
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from decod.errors import CheckpointError
from decod.files import PieceFile
from decod.model.weights import DTYPE_NAMES
from decod.train.checkpoint.description import Description, aligned
from decod.train.checkpoint.entries import StateBytes, TensorEntry, refused_state
from decod.train.checkpoint.manifest import file_header, file_size_bytes, packed
from decod.train.checkpoint.places import PIECE_BYTES, FileOperations, remove_tree

ARRIVING = ".arriving"
"""Name of the folder beside the finished ones. What a process leaves there that was killed, the
next removes."""


class StateInFile:
    """The bytes of a state in a file. See `StateBytes`. No slice may cross a tensor's border.

    Args:
        file: The file.
        entries: The tensors, by their offsets in the blob.
        starts: Where each of them begins in the file.
        check: Called with the entry of a piece that is to be written, and the piece. Raises an
            error if it may not be.
    """

    def __init__(
        self,
        file: PieceFile,
        entries: Sequence[TensorEntry],
        starts: Sequence[int],
        check: Callable[[TensorEntry, memoryview], None] | None = None,
    ) -> None:
        self._file = file
        self._entries = entries
        self._starts = starts
        self._check = check
        self._offsets = [entry.offset for entry in entries]
        self._size_bytes = sum(aligned(entry.num_bytes) for entry in entries)

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, place: slice, /) -> bytes:
        _, start = self._find(place)
        return self._file.read_at(start, place.stop - place.start)

    def __setitem__(self, place: slice, piece: memoryview | bytes | bytearray, /) -> None:
        entry, start = self._find(place)
        assert len(piece) == place.stop - place.start, (len(piece), place)
        if self._check is not None:
            self._check(entry, memoryview(piece))
        self._file.write_at(start, piece)

    def _find(self, place: slice) -> tuple[TensorEntry, int]:
        """Return the tensor of a place, and where the place begins in the file."""
        index = bisect.bisect_right(self._offsets, place.start) - 1
        entry = self._entries[index]
        inside = place.start - entry.offset
        assert inside >= 0, place
        assert place.stop - entry.offset <= entry.num_bytes, place
        return entry, self._starts[index] + inside


class ArrivedStage(StateInFile):
    """A stage's state in a file that is named and built as in a checkpoint.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, file: PieceFile, entries: Sequence[TensorEntry]) -> None:
        places = packed(tuple(entries))
        header = len(file_header(places))
        super().__init__(file, entries, [header + place.offset for place in places])
        self.path = path


class ArrivingStages:
    """The folder into which states of stages arrive. All methods may raise OSError.

    Args:
        folder: The folder that is to contain the finished ones.
        files: Operations on files.
    """

    def __init__(self, folder: Path, files: FileOperations) -> None:
        self._files = files
        self._folder = folder / ARRIVING
        self._open: dict[str, PieceFile] = {}
        remove_tree(self._folder, files)
        files.make_folder(self._folder)

    def place(self, name: str, description: Description) -> ArrivedStage:
        """Return the bytes of a state that is about to arrive, all zero, in a file of this name.

        What has arrived under that name before is removed.

        Raises:
            CheckpointError: No stage has such tensors.
        """
        if odd := [entry for entry in description.entries if entry.dtype not in DTYPE_NAMES]:
            raise refused_state([f"{ascii(each.name)[:100]} is {each.dtype}" for each in odd])
        path = self._folder / name
        if (before := self._open.pop(name, None)) is not None:
            before.close()
            self._files.remove_file(path)
        places = packed(description.entries)
        file = self._open[name] = PieceFile(self._files.create(path))
        file.resize(file_size_bytes(places))
        file.write_at(0, file_header(places))
        return ArrivedStage(path, file, description.entries)

    def close(self) -> None:
        """Remove what nobody has taken away."""
        for file in self._open.values():
            file.close()
        with suppress(OSError):  # The next process removes it.
            remove_tree(self._folder, self._files)


def slices(entry: TensorEntry, piece_bytes: int) -> Iterator[slice]:
    """Yield the places of a tensor's pieces in its blob, in order."""
    end = entry.offset + entry.num_bytes
    for start in range(entry.offset, end, piece_bytes):
        yield slice(start, min(end, start + piece_bytes))


_ITERATION = re.compile(r"[1-9][0-9]{0,14}\Z", re.ASCII)
_UNFINISHED = (".writing-", ".removing-")

Abandoned = Callable[[], bool]
"""Asked between pieces. Once it returns true, nothing more is written."""


@dataclass(frozen=True, slots=True)
class StageBlob:
    """A stage's state as its member sent it: in memory, or in its file already."""

    entries: tuple[TensorEntry, ...]
    data: StateBytes
    """The bytes, with each tensor at its entry's offset."""


def stage_file(stage_index: int) -> str:
    """Return the file name of a stage's tensors. It is never read from a file."""
    return f"stage-{stage_index}.safetensors"


def numbered(folder: Path) -> list[Path]:
    """Return the paths in a folder that are named after iterations."""
    try:
        return [path for path in folder.iterdir() if _ITERATION.match(path.name)]
    except OSError:
        return []


def checked_content(
    name: str,
    what: str,
    entries: tuple[TensorEntry, ...],
    blob: StageBlob,
    abandoned: Abandoned,
) -> Iterator[memoryview | bytes]:
    """Yield a stage's tensors piece by piece, in the order of `entries`.

    Args:
        name: The stage's name, for errors.
        what: Name of what is written, for errors.
        entries: The tensors as the file is to hold them.
        blob: The tensors as they are here.
        abandoned: Asked before each piece.

    Raises:
        CheckpointError: The write was abandoned, or a tensor does not match its hash.
        OSError: The blob can't be read.
    """
    for source, entry in zip(blob.entries, entries, strict=True):
        digest = hashlib.sha256()
        num_bytes = 0
        for place in slices(source, PIECE_BYTES):
            if abandoned():
                raise _given_up(f"the {what}")
            piece = blob.data[place]
            digest.update(piece)
            num_bytes += len(piece)
            yield piece
        if num_bytes != entry.num_bytes or digest.hexdigest() != entry.sha256:
            raise CheckpointError(
                f"{name}: {entry.name[:100]} is not what its member said of it",
                why=f"a {what} must hold exactly the bits that the run trains with",
                fix="nothing: it is tried again",
                code="E-CKP-012",
            )


def _given_up(which: str) -> CheckpointError:
    return CheckpointError(
        f"{which} was given up", why="the node ends", fix="nothing", code="E-CKP-012"
    )


class Folders:
    """The only writer of one folder that contains a folder per iteration.

    Args:
        folder: The outer folder, created with the first inner one.
        files: Operations on files.
        what: Name of an inner folder's content, for errors.
    """

    def __init__(self, folder: Path, files: FileOperations, what: str) -> None:
        self.folder = folder
        self._files = files
        self._what = what

    def write(self, iteration: int, fill: Callable[[Path], None], abandoned: Abandoned) -> Path:
        """Write an iteration's folder, and return its path.

        Args:
            iteration: The name of the folder.
            fill: Writes the files, with `write_file` and `write_stage`.
            abandoned: Asked a last time before the folder gets its name.

        Raises:
            CheckpointError: The write was abandoned, or `fill` raised it. Earlier folders are
                unchanged.
            OSError: The disk refuses. Earlier folders are unchanged.
        """
        scratch = self.folder / f".writing-{iteration}"
        place = self.folder / str(iteration)
        try:
            self._files.make_folder(self.folder)
            with suppress(OSError):
                self.remove_unfinished()
            # Other leftovers do no harm.
            remove_tree(scratch, self._files)
            self._files.make_folder(scratch)
            fill(scratch)
            self._files.sync(scratch)
            if abandoned():
                raise _given_up(f"the {self._what} of {iteration}")
            replaced = place.is_dir()
            if replaced:
                # It is from before a rollback.
                self._files.rename(place, self._doomed(iteration))
            self._files.rename(scratch, place)
            self._files.sync(self.folder)
            if replaced:
                with suppress(OSError):  # The new folder is there in any case.
                    self.remove_unfinished()
        except (OSError, CheckpointError):
            with suppress(OSError):
                self.remove_unfinished()
            raise
        return place

    def write_stage(
        self,
        path: Path,
        entries: tuple[TensorEntry, ...],
        blob: StageBlob,
        abandoned: Abandoned,
    ) -> None:
        """Write a stage's tensors in the order of `entries`, and compare their hashes.

        A blob that has arrived in a file is read again from there, and the file is renamed.
        """

        content = checked_content(path.stem, self._what, entries, blob, abandoned)
        if isinstance(blob.data, ArrivedStage):
            for _ in content:
                pass
            self._files.sync(blob.data.path)
            self._files.rename(blob.data.path, path)
        else:
            self.write_file(path, chain([file_header(entries)], content))

    def write_file(self, path: Path, content: Iterable[memoryview | bytes]) -> None:
        """Write a new file and wait until the disk has it."""
        descriptor = self._files.create(path)
        try:
            for piece in content:
                self._files.write(descriptor, piece)
        finally:
            os.close(descriptor)
        self._files.sync(path)

    def prune(self, keep: int, newest: int | None = None) -> list[int]:
        """Remove the oldest folders beyond `keep`, and unfinished ones. Return their iterations.

        Args:
            keep: Number of folders to keep.
            newest: Iteration of the folder written last. Later iterations are from before a
                rollback and go first. None: the highest iteration is the newest.

        Raises:
            OSError: Something can't be removed.
        """
        last = math.inf if newest is None else newest
        found = (int(path.name) for path in numbered(self.folder))
        gone = sorted(found, key=lambda number: (number > last, -number))[keep:]
        for iteration in gone:
            self._files.rename(self.folder / str(iteration), self._doomed(iteration))
        self.remove_unfinished()
        return gone

    def _doomed(self, iteration: int) -> Path:
        """Return the name that a folder gets before `remove_unfinished` removes it."""
        return self.folder / f".removing-{iteration}"

    def arriving(self) -> ArrivingStages:
        """Return a folder for states that are about to arrive. There may be one at a time.

        Raises:
            OSError: The disk refuses.
        """
        return ArrivingStages(self.folder, self._files)

    def remove_arrived(self) -> None:
        """Remove states that a process has left which was killed while they arrived.

        Raises:
            OSError: Something can't be removed.
        """
        remove_tree(self.folder / ARRIVING, self._files)

    def remove_unfinished(self) -> None:
        """Remove the remains of writes and removals that were cut short.

        Raises:
            OSError: Something can't be removed. The rest is gone.
        """
        problem: OSError | None = None
        for path in sorted(self.folder.iterdir()):
            try:
                if path.name.startswith(_UNFINISHED):
                    remove_tree(path, self._files)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem
