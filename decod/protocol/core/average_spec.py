"""What an average is of, and how it travels: the leader decides, and says so in openings."""

from dataclasses import dataclass

FRAGMENTS_MAX, RANK_MAX = 1024, 1 << 20

BITS = (0, 4, 8, 16, 32)
"""Widths of numbers on their way. 0: what the run file says."""


@dataclass(frozen=True, slots=True)
class AverageSpec:
    """One average of a stage. All its members are told the same."""

    fragment: int = 0
    """The part of the parameters that is averaged, from 1. 0: all of them."""
    rank: int = 0
    """Of the factors of matrices. 0: as the run file says, or there are none."""
    bits: int = 0
    """Of each number on its way. 0: as the run file says."""


WHOLE = AverageSpec()
"""All parameters, as the run file says."""
