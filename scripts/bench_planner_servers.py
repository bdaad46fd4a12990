"""Compare planners of the servers organisation: `python scripts/bench_planner_servers.py`.

Small random instances have up to 4 reliable hosts, 3 unreliable ones and 8 layers, so that the best
layout can be found. A ratio is the predicted time of an iteration with a planner's layout, over the
best one. A layout whose stage nobody can compute counts as impossible. 200 hosts are planned at the
end. Takes two to five minutes. Exits with 1 if decod's planner is worse than its limits: 1.03 on
average, 1.15 at most.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from decod.lab.planner.hosts import TrainingProblem
from decod.lab.planner.servers.exact import exact_layout
from decod.lab.planner.servers.objective import iteration_time_s
from decod.lab.planner.servers.paper_planner import paper_layout
from decod.lab.planner.servers.servers_layout import ServersLayout, broken_rules
from decod.lab.planner.servers.servers_search import local_layout, plan_layout
from decod.lab.sim.random_hosts import draw_problem, draw_small_problem
from decod.sim.kernel import seeded

MEAN_MAX, WORST_MAX = 1.03, 1.15

Planner = Callable[[TrainingProblem, random.Random], ServersLayout | None]

PLANNERS: dict[str, Planner] = {
    "exact": lambda problem, _: exact_layout(problem),
    "decod": plan_layout,
    "local": local_layout,
    "paper": paper_layout,
}


def timed(name: str, problem: TrainingProblem, seed: int) -> tuple[float, float, int]:
    """Return the seconds of an iteration, the seconds of planning, and the number of stages."""
    start_s = time.perf_counter()
    layout = PLANNERS[name](problem, seeded(seed, name))
    planning_s = time.perf_counter() - start_s
    if layout is None:
        return math.inf, planning_s, 0
    assert not broken_rules(problem, layout), (name, seed)
    return iteration_time_s(problem, layout).total_s, planning_s, len(layout.stages)


def bench_small(num_instances: int, seed: int) -> dict[str, Any]:
    """Print a line for each planner, and return the same figures."""
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in PLANNERS}
    drawn = 0
    while len(times["exact"]) < num_instances:
        problem = draw_small_problem(seeded(seed, "small", drawn))
        drawn += 1
        best = timed("exact", problem, drawn)
        if best[0] == math.inf:
            continue  # Nobody could compute such a model.
        times["exact"].append(best)
        for name in PLANNERS:
            if name != "exact":
                times[name].append(timed(name, problem, drawn))
    print(f"{num_instances} small instances: time of an iteration / best")
    print("planner    mean  median    p90   worst  impossible  planning, s")
    rows = {}
    for name, found in times.items():
        pairs = zip(found, times["exact"], strict=True)
        ratios = sorted(one[0] / best[0] for one, best in pairs if one[0] < math.inf)
        rows[name] = {
            "mean": statistics.mean(ratios),
            "median": statistics.median(ratios),
            "p90": ratios[min(len(ratios) - 1, int(0.9 * len(ratios)))],
            "worst": ratios[-1],
            "impossible": len(found) - len(ratios),
            "planning_s": statistics.mean(one[1] for one in found),
        }
        row = rows[name]
        print(
            f"{name:7}  {row['mean']:6.3f}  {row['median']:6.3f} {row['p90']:6.3f}"
            f"  {row['worst']:6.3f}  {row['impossible']:10}  {row['planning_s']:11.3f}",
            flush=True,
        )
    return rows


def bench_large(seed: int) -> dict[str, Any]:
    """Print a line for each planner with 200 hosts, and return the same figures."""
    sizes = {"num_reliable": 60, "num_unreliable": 140, "num_layers": 32}
    problem = draw_problem(seeded(seed, "large"), **sizes)
    print("200 hosts")
    print("planner  iteration, s  stages  planning, s")
    rows = {}
    for name in ("decod", "local", "paper"):
        iteration_s, planning_s, num_stages = timed(name, problem, seed)
        rows[name] = {
            "iteration_s": None if iteration_s == math.inf else iteration_s,
            "planning_s": planning_s,
            "stages": num_stages,
        }
        line = f"{name:7}  {iteration_s:12.2f}  {num_stages:6}  {planning_s:11.2f}"
        print(line, flush=True)
    return rows


def main(arguments: list[str]) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=100, help="number of small instances")
    parser.add_argument("--seed", type=int, default=0, help="start of everything random")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    small = bench_small(options.instances, options.seed)
    large = bench_large(options.seed)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"small": small, "large": large}, file, indent=2)
    ours = small["decod"]
    good = ours["mean"] <= MEAN_MAX and ours["worst"] <= WORST_MAX and not ours["impossible"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
