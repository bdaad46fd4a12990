"""Compare predictions with simulated runs: `python scripts/bench_plan_organisations.py`.

    python scripts/bench_plan_organisations.py
    python scripts/bench_plan_organisations.py --cuts 200

Random hosts are drawn, and `decod lab plan run`'s planner chooses their stages. The same hosts then
train in virtual time, with the protocol of real nodes. A line shows the predicted and the simulated
seconds of an iteration. Takes a few minutes. Exits with 1 if a mean error is above 15 %.

With `--cuts`, so many small sets of five unequal relays are drawn. The planner's stages and cut are
compared with the best of all stages and cuts, which are tried one by one, and with the best even
cut. Exits with 1 if the planner takes over 3 % longer than the best.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem
from decod.lab.planner.organisations.pipeline_forecast import gradients_s
from decod.lab.planner.organisations.pipeline_search import StagePlan, plan_stages
from decod.lab.planner.organisations.pipeline_time import PipelineClock, TimeOfPasses
from decod.lab.planner.organisations.run_work import PartNeeds, RunProblem, RunWork
from decod.lab.planner.organisations.servers_forecast import servers_forecasts
from decod.lab.sim.random_hosts import draw_problem
from decod.run.run_config import Organisation
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import seeded
from decod.sim.network import Links, LinkSpec, Site
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import HostSpec, Scenario, patient_protocol, sync_of
from decod.sim.simulation import Simulation

ERROR_MAX = 0.15
EXCESS_MAX = 0.03
_NUM_ITERATIONS = 11
_NUM_SETTLING = 8
"""Iterations until the relays have entered, and flows are those of measured links."""
_NUM_SCORES = 600
_NUM_EVALUATIONS = 4000


def draw_run(rng: random.Random) -> RunProblem:
    """Return random hosts and a model for them. All reliable hosts have a device."""
    base = draw_problem(
        rng,
        num_reliable=rng.randint(2, 4),
        num_unreliable=rng.randint(2, 6),
        num_layers=rng.choice((4, 6, 8, 12)),
    )
    base = replace(
        base,
        hosts=[
            host
            if host.kind is HostKind.DATA or host.speed_layers_per_s
            else replace(host, speed_layers_per_s=rng.uniform(4.0, 64.0))
            for host in base.hosts
        ],
    )
    return run_of(base)


def run_of(base: TrainingProblem) -> RunProblem:
    """Return a run on hosts. Each layer's state takes seven times its weights."""
    work = base.work
    needs = PartNeeds(
        wire_bytes={"none": work.layer_bytes, "int4": work.layer_bytes / 8},
        state_bytes=7 * work.layer_bytes,
        local_state_bytes=9 * work.layer_bytes,
        weights_bytes=2 * work.layer_bytes,
    )
    run = RunWork(
        num_layers=work.num_layers,
        num_microbatches=work.num_microbatches,
        tokens_per_microbatch=1024,
        activation_bytes=work.activation_bytes,
        layer=needs,
        outer=needs,
        outer_layers=1.0,
        head_s=work.head_s,
        step_s=work.step_s,
    )
    return RunProblem(base, run)


def scenario_of(
    problem: RunProblem,
    stages: list[tuple[int, list[int]]],
    layers: tuple[int, ...],
    capacities: dict[int, int],
) -> Scenario:
    """Return hosts in stages as a scenario. Its organisation is still to be filled in.

    Args:
        problem: Hosts, links and the run.
        stages: Stages, from 1, and their hosts, in the order of the scenario.
        layers: Of each stage.
        capacities: By host.
    """
    base, run = problem.base, problem.run
    shared = ComputeProfile(
        embed_s=0.0,
        head_s=run.head_s,
        optimizer_s=run.step_s,
        reduce_s=0.0,
        decide_s=0.0,
        jitter_ratio=0.0,
        activation_bytes=round(run.activation_bytes),
        parameter_bytes=round(run.outer.wire_bytes["none"]),
    )
    data = base.indexes(HostKind.DATA)
    each = run.num_microbatches // len(data)
    specs = [_spec(base.hosts[host], 0, each, shared) for host in data]
    for stage_index, members in stages:
        num = layers[stage_index - 1]
        for host in members:
            profile = replace(
                shared,
                forward_s=num / base.hosts[host].speed_layers_per_s / 3,
                optimizer_s=num * run.step_s,
                parameter_bytes=round(num * run.layer.wire_bytes["none"]),
            )
            specs.append(_spec(base.hosts[host], stage_index, capacities[host], profile))
    used = [*data, *(host for _, members in stages for host in members)]
    ids = [str(host.host_id) for host in base.hosts]
    links = {
        (ids[i], ids[j]): LinkSpec(base.latencies_s[i][j], base.bandwidths_bytes_per_s[i][j])
        for i in used
        for j in used
        if i != j
    }
    sites = tuple(
        Site(
            (ids[i],), LinkSpec(), base.hosts[i].uplink_bytes_per_s,
            base.hosts[i].downlink_bytes_per_s,
        )
        for i in used
    )  # fmt: skip
    num_relays = len(specs) - len(data)
    return Scenario(
        batch=BatchConfig(num_data_nodes=len(data), num_microbatches=each),
        num_relays=num_relays,
        stages=StagesConfig(num_relay_stages=len(layers)),
        num_iterations=_NUM_ITERATIONS,
        join_spread_s=0.0,
        duration_max_s=1e9,
        profile=replace(shared, parameter_bytes=round(max(layers) * run.layer.wire_bytes["none"])),
        links=Links(LinkSpec(), links, sites=sites),
        hosts=tuple(specs),
    )


def _spec(host: TrainingHost, stage_index: int, capacity: int, profile: ComputeProfile) -> HostSpec:
    return HostSpec(name=host.host_id, stage_index=stage_index, capacity=capacity, profile=profile)


def simulated_s(scenario: Scenario) -> float:
    """Return the mean seconds of an iteration of a simulated run."""
    simulation = Simulation(scenario)
    simulation.run()
    return statistics.mean(f.duration_s for f in simulation.meter.figures[_NUM_SETTLING:])


Case = tuple[float, float]
"""The predicted and the simulated seconds of an iteration."""


def pipeline_case(problem: RunProblem, seed: int, num_stages: int | None = None) -> Case | None:
    """Return the times with the stages that the planner chooses."""
    clock = PipelineClock(problem)
    score = _hosts_score if num_stages else _gradients_score
    plan = plan_stages(
        clock, seeded(seed, "plan"), score, num_stages=num_stages, scores=_NUM_SCORES
    )
    if plan is None:
        return None
    return gradients_s(clock, plan.time), simulated_s(_pipeline(problem, plan, seed))


def diloco_case(problem: RunProblem, seed: int) -> Case | None:
    """Return the times if members average in every fourth iteration."""
    clock, every = PipelineClock(problem, local=True), 4
    plan = plan_stages(clock, seeded(seed, "plan"), _hosts_score, num_stages=2, scores=_NUM_SCORES)
    if plan is None:
        return None
    time = plan.time
    predicted_s = time.total_s + clock.step_s(time)
    predicted_s += clock.average(time).time_s / every
    scenario = _pipeline(problem, plan, seed)
    scenario = replace(scenario, sync=sync_of(every), num_iterations=_NUM_SETTLING + 2 * every)
    return predicted_s, simulated_s(scenario)


def servers_case(problem: RunProblem, seed: int) -> Case | None:
    """Return the times of servers and clients, with the real cut of the layers."""
    forecasts = servers_forecasts(problem, seeded(seed, "plan"), evaluations=_NUM_EVALUATIONS)
    if not forecasts:
        return None
    forecast, places = forecasts[0], problem.base.positions()
    stages = [[(places[host.host_id], host.duty) for host in s.hosts] for s in forecast.stages]
    servers = [[host for host, duty in stage if duty != "client"] for stage in stages]
    clients = [[host for host, duty in stage if duty == "client"] for stage in stages]
    layers = tuple(stage.num_layers for stage in forecast.stages)
    shares = {
        places[host.host_id]: max(1, host.num_microbatches)
        for stage in forecast.stages
        for host in stage.hosts
    }
    scenario = scenario_of(
        problem,
        [*enumerate(servers, 1), *enumerate(clients, 1)],
        layers,
        shares,
    )
    scenario = replace(
        scenario,
        seed=seed,
        organisation=Organisation.SERVERS,
        servers=replace(scenario.servers, delay=problem.run.delays[0]),
        num_clients=sum(map(len, clients)),
        num_relays=sum(map(len, servers)),
        protocol=patient_protocol(min(map(len, servers))),
    )
    return forecast.iteration_s, simulated_s(scenario)


def _gradients_score(clock: PipelineClock, time: TimeOfPasses) -> float:
    return gradients_s(clock, time) + time.score - time.total_s


def _hosts_score(clock: PipelineClock, time: TimeOfPasses) -> float:
    """Return a score by which averages cost nothing, so that many hosts take part."""
    assert clock.problem.run.num_layers, "there is a model"
    return time.score


def _pipeline(problem: RunProblem, plan: StagePlan, seed: int) -> Scenario:
    shares = {host: count for share in plan.time.shares for host, count in share.items()}
    stages = [list(stage) for stage in plan.stages]
    scenario = scenario_of(problem, [*enumerate(stages, 1)], plan.time.layers, shares)
    return replace(
        scenario,
        seed=seed,
        num_relays=len(shares),
        protocol=patient_protocol(min(map(len, stages))),
    )


CASES: dict[str, Callable[[RunProblem, int], Case | None]] = {
    "pipeline": pipeline_case,
    "pipeline, 2 stages": partial(pipeline_case, num_stages=2),
    "pipeline, 3 stages": partial(pipeline_case, num_stages=3),
    "diloco, every 4": diloco_case,
    "servers": servers_case,
}


# --- cuts ----------------------------------------------------------------------------------------

_NUM_LAYERS = 6
_NUM_RELAYS = 5
_CARDS_GIB = (8, 12, 16, 24)
_LAYER_GIB = 3.5
_SLOWER = 4
"""So that devices decide as often as links."""


def draw_unequal(rng: random.Random) -> RunProblem:
    """Return relays with cards of unequal sizes and speeds."""
    base = draw_problem(rng, num_reliable=0, num_unreliable=_NUM_RELAYS, num_layers=_NUM_LAYERS)
    layer_bytes = base.work.layer_bytes
    gib = 7 * layer_bytes / _LAYER_GIB
    hosts = [
        host if host.kind is HostKind.DATA
        else replace(
            host,
            memory_bytes=rng.choice(_CARDS_GIB) * gib,
            speed_layers_per_s=host.speed_layers_per_s / _SLOWER,
        )
        for host in base.hosts
    ]  # fmt: skip
    return run_of(replace(base, hosts=hosts))


def best_s(problem: RunProblem, *, even: bool = False) -> float:
    """Return the seconds of the best iteration, from all stages and cuts, or all even cuts."""
    clock = PipelineClock(problem)
    relays = range(1, len(problem.hosts))
    found = math.inf
    for num in range(1, min(len(relays), _NUM_LAYERS) + 1):
        cuts = [clock.layers(num)] if even else [*_cuts(_NUM_LAYERS, num)]
        for places in itertools.product(range(num + 1), repeat=len(relays)):
            stages = tuple(
                tuple(host for host, place in zip(relays, places, strict=True) if place == k)
                for k in range(1, num + 1)
            )
            if all(stages):
                times = (clock.passes(stages, cut) for cut in cuts)
                found = min([found, *(gradients_s(clock, t) for t in times if t.shares)])
    return found


def _cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, num_layers)))


def compare_cuts(num: int, first_seed: int) -> int:
    """Print how near the planner comes to the best cut; return the exit code."""
    excesses, gains, num_even = list[float](), list[float](), 0
    for seed in range(first_seed, first_seed + num):
        problem = draw_unequal(seeded(seed, "bench cuts"))
        least_s = best_s(problem)
        plan = plan_stages(PipelineClock(problem), seeded(seed, "plan"), _gradients_score)
        if least_s == math.inf:
            assert plan is None, "it found what is not possible"
            continue
        assert plan is not None, "it found nothing, although there is something"
        excesses.append(gradients_s(PipelineClock(problem), plan.time) / least_s - 1)
        even_s = best_s(problem, even=True)
        num_even += even_s < math.inf
        if even_s < math.inf:
            gains.append(even_s / least_s)
    print(
        f"{len(excesses)} of {num} sets of hosts hold the model; {num_even} with an even cut\n"
        f"the planner takes {statistics.mean(excesses):.2%} longer than the best of all cuts,"
        f" {max(excesses):.2%} at most\n"
        f"the best even cut takes {statistics.mean(gains):.2f} times as long as the best,"
        f" {max(gains):.2f} at most"
    )
    return 0 if max(excesses) <= EXCESS_MAX else 1


def main(arguments: list[str]) -> int:
    """Print the table and the mean errors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", type=int, default=8, help="number of random settings")
    parser.add_argument("--seed", type=int, default=0, help="start of everything random")
    parser.add_argument("--case", choices=list(CASES), help="only this one")
    parser.add_argument("--cuts", type=int, metavar="N", help="compare N cuts with the best")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    if options.cuts:
        return compare_cuts(options.cuts, options.seed)
    rows = list[dict[str, Any]]()
    print("case                seed  hosts  predicted, s  simulated, s   error")
    for name, case in CASES.items():
        if options.case not in {None, name}:
            continue
        for seed in range(options.seed, options.seed + options.settings):
            problem = draw_run(seeded(seed, "bench organisations"))
            found = case(problem, seed)
            if found is None:
                continue
            error = found[0] / found[1] - 1
            rows.append({"case": name, "seed": seed, "predicted_s": found[0]})
            rows[-1] |= {"simulated_s": found[1], "error": error}
            print(
                f"{name:18} {seed:5}  {len(problem.hosts):5}  {found[0]:12.2f}  {found[1]:12.2f}"
                f"  {error:+6.1%}",
                flush=True,
            )
    means = {
        name: statistics.mean(abs(row["error"]) for row in rows if row["case"] == name)
        for name in dict.fromkeys(row["case"] for row in rows)
    }
    for name, mean in means.items():
        worst = max(abs(row["error"]) for row in rows if row["case"] == name)
        print(f"{name:18} mean error {mean:.1%}, worst {worst:.1%}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "means": means}, file, indent=2)
    return 0 if all(mean <= ERROR_MAX for mean in means.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
