"""A stage's state on its way to this host: its destination and its progress.

The code that fetches states (`decod.net`) and the code that uses them (`decod.driver`,
`decod.daemon`) do not know each other. Both know this module.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from decod.ids import NodeId
from decod.train.checkpoint.description import Chunk, Description
from decod.train.checkpoint.state_bytes import StateBytes

_COPY_LEAST_BYTES_PER_S = 5e7
"""Every device and disk copies and hashes a state faster than this."""


def copy_max_s(size_bytes: int) -> float:
    """Return how long a host may take to copy a state of this size, in seconds."""
    return size_bytes / _COPY_LEAST_BYTES_PER_S


@dataclass(slots=True)
class Transfer:
    """Progress of a state on its way."""

    stage_index: int
    iteration: int
    num_bytes: int = 0
    """Size of all chunks; 0 until it is known."""
    num_arrived: int = 0
    """Bytes of verified chunks that are here."""
    num_local: int = 0
    """The part of `num_arrived` that was found on this host."""
    begun_s: float = 0.0
    """When the first chunk was requested, by the event loop's clock."""
    from_donors: Counter[NodeId] = field(default_factory=Counter)
    """Bytes from each donor."""


class QuietSink:
    """A sink that shows no progress and has no chunks. Subclasses give the memory."""

    def expect(self, description: Description) -> None:
        """Take any state."""

    def began(self, transfer: Transfer) -> None:
        """Ignore the progress: it is not shown."""

    def donor_failed(self, donor: NodeId, reason: str) -> None:
        """Ignore the failure: the fetch's error names it too."""

    def local(self, chunk: Chunk) -> memoryview | bytes | None:  # noqa: ARG002
        """Return None: no chunks are here."""
        return None


class StateSink(Protocol):
    """The destination of a state. Hears of its progress."""

    def expect(self, description: Description) -> None:
        """Take in what comes next. Called before `allocate`.

        Raises:
            CheckpointError: This is not wanted.
        """

    def allocate(self, size_bytes: int) -> StateBytes | None:
        """Return a buffer for the blob, or None if there is no room. The sink keeps account."""

    def began(self, transfer: Transfer) -> None:
        """Take the transfer's progress, which changes as bytes arrive."""

    def donor_failed(self, donor: NodeId, reason: str) -> None:
        """Take in that the transfer has left a donor."""

    def local(self, chunk: Chunk) -> memoryview | bytes | None:
        """Return a chunk's bytes if this host has them. Called in a thread. The caller verifies."""
