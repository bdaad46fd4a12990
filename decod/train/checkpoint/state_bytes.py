"""Where the bytes of a state are: in memory, or in a file."""

from typing import Protocol


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
