"""Short fingerprints that add up: digests of sets of microbatches, and sketches of tensors.

**Digests** show how I2 is checked without listing ids. Every member of a stage sends the digest of
what it has folded into its gradient sum; the digests of a stage must add up to that of the
committed set. Sixty-four bits guard against loss and duplication by mistake, not against a forger.

**Sketches** tell how far two tensors are from each other. A sketch is a few sums over a tensor, in
each of which every element has a random sign. The squared distance of two sketches is, on average,
that of their tensors. Sketches with the same signs add up as their tensors do. The signs follow
from a seed. Nobody but its maker may know it until the tensor is there, so nobody can make another
tensor of the same sketch. `decod.train.standing_out` makes
them.

Source: M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", 2002.
Deviation: an element's bucket follows from its position, and only its sign is drawn.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from decod.ids import MicrobatchId
from decod.limits import none_or

_MASK = (1 << 63) - 1


def digest_of(microbatches: Iterable[MicrobatchId]) -> int:
    """Return the digest of a set; the order does not matter, a repeat does."""
    return sum(_mix(m) for m in microbatches) & _MASK


def add_digests(digests: Iterable[int]) -> int:
    """Return the digest of the disjoint union."""
    return sum(digests) & _MASK


def _mix(microbatch: MicrobatchId) -> int:
    """Spread an id over 64 bits (the finalizer of splitmix64, applied to each field in turn)."""
    value = 0
    for field in (microbatch.iteration, microbatch.data_node_index, microbatch.index):
        value = (value + field + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value


NUM_SUMS = 32
SEED_BYTES = 16
_SUMS = struct.Struct(f"<{NUM_SUMS}f")
SKETCH_BYTES = SEED_BYTES + _SUMS.size
SketchBytes = Annotated[bytes, none_or(SKETCH_BYTES)]

ERROR_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Sketch:
    """A fingerprint of a tensor."""

    seed: bytes
    """16 bytes, from which the signs follow."""
    sums: tuple[float, ...]

    def to_bytes(self) -> bytes:
        """Return the sketch as it travels, `SKETCH_BYTES` long."""
        try:
            return self.seed + _SUMS.pack(*self.sums)
        except OverflowError:
            return self.seed + _SUMS.pack(*[math.nan] * NUM_SUMS)

    @staticmethod
    def from_bytes(data: bytes) -> "Sketch":
        """Return the sketch in some bytes.

        Raises:
            ValueError: They are none.
        """
        if len(data) != SKETCH_BYTES:
            raise ValueError(f"a sketch of {len(data)} bytes")
        return Sketch(data[:SEED_BYTES], _SUMS.unpack(data[SEED_BYTES:]))


def added(sketches: Sequence[Sketch]) -> Sketch:
    """Return the sketch of the sum of some tensors, at least one, whose signs are the same."""
    sums = tuple(math.fsum(column) for column in zip(*(s.sums for s in sketches), strict=True))
    return Sketch(sketches[0].seed, sums)


def error_of(told: Sketch, true: Sketch) -> float:
    """Return how far two tensors are from each other.

    Returns:
        The distance, as a share of the longer one's length. 0: they are the same. 1: one of them is
        zero. 2: one is the other's opposite, or not finite, or the sketches have other signs.
    """
    if told.seed != true.seed or not all(map(math.isfinite, (*told.sums, *true.sums))):
        return ERROR_MAX
    length = max(math.hypot(*told.sums), math.hypot(*true.sums))
    away = math.hypot(*(a - b for a, b in zip(told.sums, true.sums, strict=True)))
    return min(away / length, ERROR_MAX) if length else 0.0
