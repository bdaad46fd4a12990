"""Where the bytes of a state are: in memory, or in a file."""

from typing import Protocol

from decod.files import PieceFile


class StateBytes(Protocol):
    """The blob of a state. Slices without a step give and take its bytes.

    A file is read or written at each slice. That may raise OSError.
    """

    def __len__(self) -> int:
        """Return the size in bytes."""
        ...

    def __getitem__(self, place: slice, /) -> memoryview | bytes:
        """Return the bytes of a place."""

    def __setitem__(self, place: slice, piece: memoryview | bytes | bytearray, /) -> None:
        """Change the bytes of a place to others of the same number."""


class BytesInFile:
    """The bytes of a state in a file, from its beginning on. See `StateBytes`.

    Args:
        file: The file.
        size_bytes: Size of the state.
    """

    def __init__(self, file: PieceFile, size_bytes: int) -> None:
        self._file, self._size_bytes = file, size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, place: slice, /) -> bytes:
        return self._file.read_at(place.start, place.stop - place.start)

    def __setitem__(self, place: slice, piece: memoryview | bytes | bytearray, /) -> None:
        self._file.write_at(place.start, piece)
