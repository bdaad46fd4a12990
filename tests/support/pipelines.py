"""Small problems for the planners of rigid pipelines, and all of their pipelines."""

import itertools
from collections.abc import Iterator, Sequence

from decod.lab.planner.pipelines import Pipeline, PipelineProblem, PlannedStage


def make_problem(
    layer_s: Sequence[float],
    *,
    num_layers: int = 4,
    num_microbatches: int = 4,
    num_layers_max: int = 99,
    latency_s: float = 0.0,
    bandwidth: float | dict[tuple[int, int], float] = 1e12,
    activation_bytes: float = 1.0,
    layer_bytes: float = 0.0,
    machines: tuple[tuple[int, ...], ...] | None = None,
) -> PipelineProblem:
    """Return a problem. A layer's forward pass takes a third of `layer_s`.

    Links that `bandwidth` leaves out have 1e12 bytes a second.
    """
    num = len(layer_s)
    rates = [[1e12 if isinstance(bandwidth, dict) else bandwidth] * num for _ in range(num)]
    if isinstance(bandwidth, dict):
        for (one, other), rate in bandwidth.items():
            rates[one][other] = rates[other][one] = rate
    return PipelineProblem(
        num_layers=num_layers,
        num_microbatches=num_microbatches,
        forward_s=tuple(value / 3 for value in layer_s),
        backward_s=tuple(2 * value / 3 for value in layer_s),
        num_layers_max=(num_layers_max,) * num,
        latency_s=((latency_s,) * num,) * num,
        bandwidth_bytes_per_s=tuple(map(tuple, rates)),
        activation_bytes=activation_bytes,
        layer_bytes=layer_bytes,
        machines=machines or tuple((device,) for device in range(num)),
    )


def cuts(num: int, num_parts: int) -> Iterator[list[int]]:
    """Yield all ways to cut a row of things into parts that have at least one, as their sizes."""
    for places in itertools.combinations(range(1, num), num_parts - 1):
        yield [b - a for a, b in itertools.pairwise((0, *places, num))]


def ordered_pipelines(problem: PipelineProblem) -> Iterator[Pipeline]:
    """Yield all pipelines on the first devices in their order."""
    for num_devices in range(1, problem.num_devices + 1):
        for num_stages in range(1, min(num_devices, problem.num_layers) + 1):
            for layers in cuts(problem.num_layers, num_stages):
                for sizes in cuts(num_devices, num_stages):
                    ends = [*itertools.accumulate(sizes)]
                    groups = [tuple(range(e - s, e)) for s, e in zip(sizes, ends, strict=True)]
                    yield tuple(map(PlannedStage, layers, groups))


def placed_pipelines(problem: PipelineProblem) -> Iterator[Pipeline]:
    """Yield all pipelines that use all devices, wherever the stages are."""
    for num_stages in range(1, min(problem.num_devices, problem.num_layers) + 1):
        for stages in itertools.product(range(num_stages), repeat=problem.num_devices):
            groups = [
                tuple(d for d, stage in enumerate(stages) if stage == index)
                for index in range(num_stages)
            ]
            if all(groups):
                for layers in cuts(problem.num_layers, num_stages):
                    yield tuple(map(PlannedStage, layers, groups))
