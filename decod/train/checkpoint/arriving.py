"""States that go to a file as they arrive, so that no more than a few chunks are ever in memory.

Each tensor of a blob has a place of its own in the file, which need not be in the blob's order.
So the file is complete when the last chunk is there, and nothing is copied afterwards.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from decod.files import PieceFile
from decod.model.weights import DTYPE_NAMES
from decod.train.checkpoint.checkpoint_files import FileOperations, remove_tree
from decod.train.checkpoint.description import Description, aligned
from decod.train.checkpoint.entries import TensorEntry, refused_state
from decod.train.checkpoint.manifest import file_header, file_size_bytes, packed

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
        self._file, self._entries, self._starts, self._check = file, entries, starts, check
        self._offsets = [entry.offset for entry in entries]
        last = entries[-1]
        self._size_bytes = last.offset + aligned(last.num_bytes)

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
        if not description.entries:
            raise refused_state(["it has no tensors"])
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
