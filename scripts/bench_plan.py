"""Compare routing algorithms and joining policies: `python scripts/bench_plan.py`.

The instances are the random ones of GWTF's evaluation: the flow tests of table V (figure 7) and the
joining tests of table IV (figure 5). The argument is the number of seeds. The default is 10, which
takes about four minutes.

A cost is a mean per flow, relative to the exact routing of the same instance. An improvement is the
relative fall of that cost, as a mean over 20 joining nodes.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable

from decod.lab.planner.fixed import fixed_routes
from decod.lab.planner.greedy_routes import greedy_routes
from decod.lab.planner.joins import JoinPolicy, plan_joins
from decod.lab.planner.optimal import optimal_routes
from decod.lab.sim.instances import TABLE_4, TABLE_5, table4, table5
from decod.planner.graph import FlowGraph, Route, broken_rules
from decod.sim.kernel import seeded

NUM_SEEDS = 10

Algorithm = Callable[[FlowGraph, random.Random], list[Route]]

ALGORITHMS: dict[str, Algorithm] = {
    "optimal": lambda graph, _: optimal_routes(graph),
    "greedy": greedy_routes,
    "closest": lambda graph, rng: greedy_routes(graph, rng, closest_only=True),
    "fixed": fixed_routes,
}


def bench_routes(num_seeds: int) -> None:
    """Print a line for each setting of table V and each algorithm."""
    print("setting  algorithm  flows  cost / optimal  (range)          time, s  most")
    for setting in TABLE_5:
        graphs = [table5(setting, seed) for seed in range(num_seeds)]
        optimum: list[float] = []
        for name, algorithm in ALGORITHMS.items():
            flows, costs, times_s = [], [], []
            for seed, graph in enumerate(graphs):
                start_s = time.perf_counter()
                routes = algorithm(graph, seeded(seed, "bench"))
                times_s.append(time.perf_counter() - start_s)
                assert not broken_rules(graph, routes), (setting, name, seed)
                flows.append(len(routes))
                costs.append(statistics.mean(graph.path_cost(route.path) for route in routes))
            optimum = optimum or costs
            ratios = [cost / least for cost, least in zip(costs, optimum, strict=True)]
            print(
                f"{setting:7}  {name:9}  {statistics.mean(flows):5.1f}"
                f"  {statistics.mean(ratios):14.3f}  {min(ratios):.3f} to {max(ratios):.3f}"
                f"  {statistics.mean(times_s):7.3f}  {max(times_s):.3f}",
                flush=True,
            )


def bench_joins(num_seeds: int) -> None:
    """Print a line for each setting of table IV, with all policies."""
    print("improvement by each joining node, and its part of the optimal policy's")
    print("setting  " + "  ".join(f"{policy:>16}" for policy in JoinPolicy))
    for setting in TABLE_4:
        improvements: dict[JoinPolicy, float] = {}
        for policy in JoinPolicy:
            found: list[float] = []
            for seed in range(num_seeds):
                graph, newcomers = table4(setting, seed)
                joins = plan_joins(graph, newcomers, policy=policy, rng=seeded(seed, "bench"))
                found += [joined.improvement for joined in joins]
            improvements[policy] = statistics.mean(found)
        best = improvements[JoinPolicy.OPTIMAL]
        cells = [f"{value:9.2%} ({value / best:.2f})" for value in improvements.values()]
        print(f"{setting:7}  " + "  ".join(cells), flush=True)


def main(arguments: list[str]) -> None:
    """Print both tables."""
    num_seeds = int(arguments[0]) if arguments else NUM_SEEDS
    bench_routes(num_seeds)
    bench_joins(num_seeds)


if __name__ == "__main__":
    main(sys.argv[1:])
