"""Digest of a set of microbatches that can be added up: how I2 is checked without listing ids.

Every member of a stage sends the digest of what it has folded into its gradient sum; the digests
of a stage must add up to that of the committed set. Sixty-four bits guard against loss and
duplication by mistake, not against a forger.
"""

from collections.abc import Iterable

from decod.ids import MicrobatchId

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
