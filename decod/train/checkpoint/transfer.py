"""A stage's state on its way to this host: where it goes, and how far it is.

What fetches states (`decod.net`) and what wants them (`decod.driver`, `decod.daemon`) do not know
each other; both know this.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from decod.ids import NodeId
from decod.train.checkpoint.description import Chunk


@dataclass(slots=True)
class Transfer:
    """How far a state on its way is."""

    stage_index: int
    iteration: int
    num_bytes: int = 0
    """Of all chunks; 0 until it is known."""
    num_arrived: int = 0
    """Of those, here and verified."""
    num_local: int = 0
    """Of those, found on this host."""
    begun_s: float = 0.0
    """When its first chunk was asked for, by the event loop's clock."""
    from_donors: Counter[NodeId] = field(default_factory=Counter)
    """Bytes that each donor has given."""


class StateSink(Protocol):
    """Where a state goes, and who wants to know how it is getting on."""

    def allocate(self, size_bytes: int) -> memoryview | None:
        """Return a buffer for the blob, or None if there is no room. The sink keeps account."""

    def began(self, transfer: Transfer) -> None:
        """Take what shows how far the transfer is; it changes as bytes arrive."""

    def donor_failed(self, donor: NodeId, reason: str) -> None:
        """A donor is left."""

    def local(self, chunk: Chunk) -> memoryview | bytes | None:
        """Return a chunk's bytes if this host has them. Called in a thread; verified after."""
