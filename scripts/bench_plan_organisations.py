"""Compare predictions with simulated runs: `python scripts/bench_plan_organisations.py`.

Random hosts are drawn, and `decod plan run`'s planner chooses their stages. The same hosts then
train in virtual time, with the protocol of real nodes. A line shows the predicted and the simulated
seconds of an iteration. Takes a few minutes. Exits with 1 if a mean error is above 15 %.
"""

import random
import statistics
import sys
from dataclasses import replace
from typing import Any

from decod.planner.hosts import HostKind, TrainingProblem
from decod.planner.organisations.pipeline_search import plan_stages
from decod.planner.organisations.pipeline_time import PassTime, PipelineClock
from decod.planner.organisations.run_work import PartNeeds, RunProblem, RunWork
from decod.protocol.core.params import ProtocolConfig
from decod.sim.compute import ComputeProfile
from decod.sim.kernel import seeded
from decod.sim.network import Links, LinkSpec, Site
from decod.sim.random_hosts import draw_problem
from decod.sim.scenario import HostSpec, Scenario
from decod.sim.simulation import Simulation

ERROR_MAX = 0.15
_NUM_ITERATIONS = 5
_NUM_SETTLING = 2
"""Iterations in which flows are not measured yet."""
_PATIENCE_S = 36_000.0


def draw_run(rng: random.Random) -> RunProblem:
    """Return random hosts and a model for them. All reliable hosts have a device."""
    base = draw_problem(
        rng,
        num_reliable=rng.randint(2, 4),
        num_unreliable=rng.randint(2, 6),
        num_layers=rng.choice((4, 6, 8, 12)),
    )
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


def gradients_s(clock: PipelineClock, time: PassTime) -> float:
    """Return the seconds of an iteration with an average of gradients."""
    return time.total_s + clock.average(time.shares).time_s + clock.step_s(time.shares)


def scenario_of(
    problem: TrainingProblem,
    stages: list[list[int]],
    layers: tuple[int, ...],
    capacities: dict[int, int],
    run: RunWork,
    **fields: Any,
) -> Scenario:
    """Return hosts in stages as a scenario."""
    data = problem.indexes(HostKind.DATA)
    size = round(run.activation_bytes)
    shared = ComputeProfile(
        embed_s=0.0,
        head_s=run.head_s,
        optimizer_s=max(layers) * run.step_s,
        reduce_s=0.0,
        decide_s=0.0,
        jitter_ratio=0.0,
        activation_bytes=size,
        parameter_bytes=round(max(layers) * run.layer.wire_bytes["none"]),
    )
    per_node = run.num_microbatches // len(data)
    specs = [
        HostSpec(
            name=problem.hosts[i].host_id,
            stage_index=0,
            capacity=per_node,
            profile=replace(shared, optimizer_s=run.step_s),
        )
        for i in data
    ]
    for index, (hosts, num) in enumerate(zip(stages, layers, strict=True), 1):
        for host in hosts:
            profile = replace(
                shared,
                forward_s=num / problem.hosts[host].speed_layers_per_s / 3
                if problem.hosts[host].speed_layers_per_s
                else 1e9,
                optimizer_s=num * run.step_s,
                parameter_bytes=round(num * run.layer.wire_bytes["none"]),
            )
            specs.append(
                HostSpec(
                    name=problem.hosts[host].host_id,
                    stage_index=index,
                    capacity=capacities[host],
                    profile=profile,
                )
            )
    names = {host.name for host in specs}
    ids = [host.host_id for host in problem.hosts]
    overrides = {
        (ids[i], ids[j]): LinkSpec(problem.latencies_s[i][j], problem.bandwidths_bytes_per_s[i][j])
        for i in range(len(ids))
        for j in range(len(ids))
        if i != j and ids[i] in names and ids[j] in names
    }
    sites = tuple(
        Site((host.host_id,), LinkSpec(), host.uplink_bytes_per_s, host.downlink_bytes_per_s)
        for host in problem.hosts
        if host.host_id in names
    )
    return Scenario(
        num_data_nodes=len(data),
        num_relay_stages=len(stages),
        num_microbatches=per_node,
        num_iterations=_NUM_ITERATIONS,
        join_spread_s=0.0,
        duration_max_s=1e9,
        profile=shared,
        links=Links(LinkSpec(), overrides, sites=sites),
        hosts=tuple(specs),
        **fields,
    )


def protocol(least: int, num_data: int) -> ProtocolConfig:
    """Return timeouts that no slow link reaches."""
    return ProtocolConfig(
        min_nodes_per_stage=least,
        min_data_nodes=num_data,
        complete_timeout_s=_PATIENCE_S,
        iteration_timeout_s=2 * _PATIENCE_S,
        heartbeat_interval_s=10.0,
        heartbeat_timeout_s=30.0,
        election_timeout_s=60.0,
        utilisation_interval_s=60.0,
        keep_max_bytes=1 << 43,
        snapshot_every_iterations=0,
    )


def simulated_s(scenario: Scenario) -> float:
    """Return the mean seconds of an iteration of a simulated run."""
    simulation = Simulation(scenario)
    simulation.run()
    return statistics.mean(f.duration_s for f in simulation.meter.figures[_NUM_SETTLING:])


def pipeline_case(problem: RunProblem, seed: int) -> tuple[float, float, str] | None:
    """Return the predicted and the simulated seconds of an iteration, and what it waits for."""
    clock = PipelineClock(problem)
    plan = plan_stages(clock, seeded(seed, "plan"), gradients_s, scores=1500)
    if plan is None:
        return None
    shares = {host: count for share in plan.time.shares for host, count in share.items()}
    scenario = scenario_of(
        problem.base,
        [list(stage) for stage in plan.stages],
        clock.layers(len(plan.stages)),
        shares,
        problem.run,
        seed=seed,
        num_relays=len(shares),
        protocol=protocol(min(map(len, plan.stages)), 1),
    )
    t = plan.time
    note = (
        f"{t.limit.kind} S={len(plan.stages)} n={len(shares)} M={problem.run.num_microbatches}"
        f" total {t.total_s:.2f} fill {t.fill_s:.2f} cmp {t.compute_s:.2f} avg {clock.average(t.shares).time_s:.2f}"
        f" step {clock.step_s(t.shares):.2f}"
    )
    return gradients_s(clock, plan.time), simulated_s(scenario), note


def main(arguments: list[str]) -> int:
    for seed in range(8):
        problem = draw_run(seeded(seed, "bench organisations"))
        p, s, note = pipeline_case(problem, seed)
        print(f"{p:8.2f} {s:8.2f} {p / s - 1:+.1%} {note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
