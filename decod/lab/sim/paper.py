"""The experiments of GWTF's evaluation without training: routes, and places for new nodes.

Each gives figures (`Row`) beside the paper's. Most of the paper's results are in drawings without
numbers; there `paper` is None.

Source: GWTF, section VI: table V with figure 7, and table IV with figure 5.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from decod.lab.planner.greedy_routes import greedy_routes
from decod.lab.planner.joins import JoinPolicy, plan_joins
from decod.lab.planner.optimal import optimal_routes
from decod.lab.sim.instances import TABLE_4, TABLE_5, table4, table5
from decod.lab.sim.routing_trial import negotiate
from decod.planner.graph import FlowGraph, Route
from decod.sim.kernel import seeded

NUM_ITERATIONS = 120
"""Number of iterations that the paper gives every algorithm of the flow tests."""

JOIN_RATIO_MIN = 0.75
"""The paper's rule is "never more than 25 % slower than the optimal schedule": a bound."""

Progress = Callable[[str], None]
"""Called with a description of each part before it is computed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, over all seeds."""

    setting: str
    policy: str
    metric: str
    mean: float
    stdev: float
    """Deviation of single runs, not of the mean; 0 with one seed."""
    paper: float | None = None
    """The paper's value, if it gives one."""


def make_row(
    setting: object, policy: str, metric: str, values: Sequence[float], paper: float | None = None
) -> Row:
    """Return the figure of a metric from its value in each run; there is at least one."""
    stdev = statistics.stdev(values) if len(values) > 1 else 0.0
    return Row(str(setting), policy, metric, statistics.mean(values), stdev, paper)


def flow_tests(
    num_seeds: int, progress: Progress, *, settings: Iterable[int] = TABLE_5
) -> list[Row]:
    """Return figure 7: the cost of routes per flow, by algorithm, in the settings of table V.

    Ratios compare with the exact routing of the same instance. The mean cost of an algorithm that
    finds fewer flows than possible says little, because it leaves out the expensive ones.
    """
    rows: list[Row] = []
    for setting in settings:
        progress(f"table V, setting {setting}")
        graphs = [table5(setting, seed) for seed in range(num_seeds)]
        optima = [optimal_routes(graph) for graph in graphs]
        for policy, route in _ROUTINGS.items():
            found = [
                optimum if route is None else route(graph, seed)
                for seed, (graph, optimum) in enumerate(zip(graphs, optima, strict=True))
            ]
            rows += _compare_routes(setting, policy, graphs, found, optima)
    return rows


def _negotiated(algorithm: str) -> Callable[[FlowGraph, int], list[Route]]:
    return lambda graph, seed: (
        negotiate(graph, algorithm=algorithm, rounds=NUM_ITERATIONS, seed=seed).routes
    )


_ROUTINGS: Mapping[str, Callable[[FlowGraph, int], list[Route]] | None] = {
    "flow": _negotiated("flow"),
    "gwtf": _negotiated("gwtf"),
    "greedy": lambda graph, seed: greedy_routes(graph, seeded(seed, "bench")),
    "optimal": None,
}
"""How routes are found. None: the exact ones."""


def _compare_routes(
    setting: int,
    policy: str,
    graphs: Sequence[FlowGraph],
    found: Sequence[list[Route]],
    optima: Sequence[list[Route]],
) -> list[Row]:
    costs, ratios, shares = [], [], []
    for graph, routes, optimum in zip(graphs, found, optima, strict=True):
        shares.append(len(routes) / len(optimum))
        if routes:
            costs.append(_mean_cost(graph, routes))
            ratios.append(costs[-1] / _mean_cost(graph, optimum))
    rows = []
    if costs:
        rows.append(make_row(setting, policy, "mean_cost_per_flow", costs))
        rows.append(make_row(setting, policy, "cost_ratio_to_optimal", ratios))
    rows.append(make_row(setting, policy, "flows", [len(routes) for routes in found]))
    rows.append(make_row(setting, policy, "flows_ratio_to_maximum", shares))
    return rows


def _mean_cost(graph: FlowGraph, routes: Sequence[Route]) -> float:
    return statistics.mean(graph.path_cost(route.path) for route in routes)


def joining_tests(
    num_seeds: int, progress: Progress, *, settings: Iterable[int] = TABLE_4
) -> list[Row]:
    """Return figure 5: the gain from each new node, by joining policy, in table IV's settings.

    The improvement of a run is the mean over its 20 placements. Its ratio compares with the
    improvement of the `optimal` policy on the same instance.
    """
    rows: list[Row] = []
    policies = [JoinPolicy.OPTIMAL, *(p for p in JoinPolicy if p is not JoinPolicy.OPTIMAL)]
    for setting in settings:
        best: list[float] = []
        for policy in policies:
            progress(f"table IV, setting {setting}, {policy}")
            gains = [_mean_improvement(setting, seed, policy) for seed in range(num_seeds)]
            best = best or gains
            ratios = [gain / top for gain, top in zip(gains, best, strict=True) if top > 0]
            bound = JOIN_RATIO_MIN if policy is JoinPolicy.GWTF else None
            rows.append(make_row(setting, policy, "improvement", gains))
            if ratios:
                rows.append(make_row(setting, policy, "ratio_to_optimal", ratios, bound))
    return rows


def _mean_improvement(setting: int, seed: int, policy: JoinPolicy) -> float:
    graph, newcomers = table4(setting, seed)
    joins = plan_joins(graph, newcomers, policy=policy, rng=seeded(seed, "bench"))
    return statistics.mean(joined.improvement for joined in joins)
