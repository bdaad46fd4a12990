"""The figures of `scripts/bench_allreduce.py`, and its table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.averaging import NUM_ELEMENTS

SIZE_BYTES = 4 * NUM_ELEMENTS

HEADER = "members  subject        median s     best s    MB/s   of line   of gloo   CPU s     error"


@dataclass(frozen=True, slots=True)
class Sample:
    """One all-reduce: from the first member's start to the last member's end."""

    subject: str
    num_members: int
    seconds: float
    cpu_s: float
    """Processor time of all members."""
    error: float
    """The largest of all members."""


def sent_bytes(num_members: int) -> float:
    """Return how much each member sends in a butterfly, and in a ring, of float32."""
    return 2 * SIZE_BYTES * (num_members - 1) / num_members


def line_s(num_members: int, mbit: float) -> float:
    """Return how long an all-reduce of float32 takes at line rate, without overhead or latency."""
    return sent_bytes(num_members) * 8e-6 / mbit


def median_s(samples: Sequence[Sample]) -> float:
    """Return how long it takes."""
    return statistics.median(sample.seconds for sample in samples)


def as_line(samples: Sequence[Sample], mbit: float | None, gloo_s: float | None) -> str:
    """Return one subject's line of the table.

    Args:
        samples: Of one subject and one number of members, at least one.
        mbit: The rate of each host's link; None over loopback.
        gloo_s: How long gloo takes; None if that is unknown.
    """
    first, seconds = samples[0], median_s(samples)
    of_line = "-" if mbit is None else f"{line_s(first.num_members, mbit) / seconds:.1%}"
    of_gloo = "-" if gloo_s is None else f"{gloo_s / seconds:.2f}"
    cpu_s = statistics.median(sample.cpu_s for sample in samples)
    return (
        f"{first.num_members:7}  {first.subject:12} {seconds:10.3f}"
        f" {min(sample.seconds for sample in samples):10.3f}"
        f" {sent_bytes(first.num_members) * 1e-6 / seconds:7.1f}"
        f" {of_line:>9} {of_gloo:>9} {cpu_s:7.2f} {max(each.error for each in samples):9.1e}"
    )
