"""What the programs of `scripts/bench_allreduce.py` share: the tensor, its check, and the talk.

A member is a process. It prints its state and obeys the lines of its standard input:

    LISTENS PORT -> "PEERS ADDRESS ADDRESS ..." -> READY -> "GO" -> DONE {...} -> "GO" ...

The instants in `DONE` are of the machine's monotonic clock, so those of all members compare. This
file imports nothing of decod, so that programs of other environments can use it.
"""

import json
import resource
import sys
import time

NUM_ELEMENTS = 25_000_000
"""Of the tensor: 100 MB in float32."""

ERROR_MAX = {"float32": 1e-6, "int4": 0.25}
"""Largest error of an average, root mean square, relative to the average's. `int4` rounds each
contribution and the mean to 15 steps between the largest elements of 256. Each of the two roundings
costs about 0.12 here."""


def seed_of(member: int, num_elements: int) -> int:
    """Return the seed of a member's tensor: standard normal, from torch's generator on the CPU."""
    return 1_000_003 * member + num_elements


def say(word: str, *rest: object) -> None:
    """Print one line for the process that measures."""
    print(word, *rest, flush=True)


def done(start_s: float, end_s: float, cpu_s: float, error: float) -> None:
    """Report one all-reduce.

    Args:
        start_s: Instant at which it was asked for.
        end_s: Instant at which the average was here.
        cpu_s: Processor time that this process and its compute process spent meanwhile.
        error: Of the average, relative. See `ERROR_MAX`.
    """
    say("DONE", json.dumps({"start_s": start_s, "end_s": end_s, "cpu_s": cpu_s, "error": error}))


def read_line() -> list[str]:
    """Return the words of the next line, or end the process at the end of the input."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return line.split()


def now_s() -> float:
    """Return an instant of the clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def own_cpu_s() -> float:
    """Return the processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
