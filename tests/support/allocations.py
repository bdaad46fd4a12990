"""Memory that torch takes on the CPU while something runs, as its allocator reports it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Allocations:
    """Sizes in bytes."""

    largest: int
    """The largest piece of memory."""
    peak: int
    """The most that all pieces took at a time, beyond what there was before."""


def allocations_of(run: Callable[[], object]) -> Allocations:
    """Run something. Return the memory that it took."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda each: each.start_ns())]
    return Allocations(max(sizes), max(itertools.accumulate(sizes)))
