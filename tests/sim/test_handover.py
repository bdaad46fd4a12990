"""Leaders that are asked to leave: another data node leads, and nothing is trained twice."""

import os
import random
from dataclasses import replace

import pytest

from decod.protocol.core.effects import StopReason
from decod.protocol.core.events import DrainRequested
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import LinkFaults
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Result, Simulation
from tests.support.quick import first_of

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "40")) // 5

TOGETHER = Scenario(
    batch=BatchConfig(num_data_nodes=2, num_microbatches=4),
    num_relays=4,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=8,
    capacity_min=4,
    capacity_max=6,
    duration_max_s=600.0,
    protocol=ProtocolConfig(min_data_nodes=2, min_nodes_per_stage=2),
)


def lines(result: Result, text: str) -> list[str]:
    return [line for line in result.trace if text in line]


def instant(result: Result, text: str) -> float:
    (line,) = lines(result, text)
    return float(line.split()[0])


def leave(host: str, at_s: float) -> HostFault:
    return HostFault(FaultKind.DRAIN, host, at_s=at_s)


@pytest.mark.parametrize("seed", range(4))
def test_a_leader_that_leaves_finishes_the_iteration_and_another_leads(seed: int) -> None:
    """At any instant of an iteration. What had only been opened is repeated without it."""
    scenario = replace(TOGETHER, seed=seed, faults=(leave("data0", 8.0 + seed / 2),))
    result = Simulation(scenario).run()
    assert result.num_iterations == scenario.num_iterations
    resigned_s = instant(result, "data0    this node gives up term 1")
    assert instant(result, "data1    this node leads term 2") - resigned_s < 1.0
    assert instant(result, "data0    host.stopped reason=drained") - resigned_s < 1.0
    assert len(lines(result, "is repeated: the leader has handed over")) == 1
    assert not lines(result, "is gone")
    (before,) = [line for line in lines(result, "data0    step of iteration") if "loss" in line][
        -1:
    ]
    assert resigned_s - float(before.split()[0]) < 0.5
    # Of the first iteration in the new view on, the other reads all tokens.
    last = [line for line in lines(result, "data1    step of iteration 8.") if "loss" in line]
    assert "over 8 tokens" in last[0]


def test_a_leader_that_has_no_time_left_resigns_in_the_middle_of_an_iteration() -> None:
    simulation = Simulation(TOGETHER)
    leader = simulation.leader
    simulation.kernel.at(8.0, leader.deliver, DrainRequested(timeout_s=0.0))
    result = simulation.run()
    assert result.num_iterations == TOGETHER.num_iterations
    assert instant(result, "data0    this node gives up term 1") == pytest.approx(8.0)
    assert instant(result, "data0    host.stopped reason=drained") < 9.0


def test_a_leader_without_another_data_node_ends_the_run() -> None:
    protocol = replace(TOGETHER.protocol, min_data_nodes=1)
    scenario = replace(
        TOGETHER,
        batch=replace(TOGETHER.batch, num_data_nodes=1),
        protocol=protocol,
        faults=(leave("data0", 9.0),),
    )
    simulation = Simulation(scenario)
    simulation.kernel.run(until_s=11.0)
    stop = simulation.leader.stop
    assert stop is not None
    assert stop.reason is StopReason.FINISHED


@pytest.mark.parametrize("seed", range(2))
def test_a_leader_whose_only_heir_is_lost_leads_until_it_finds_that_out(seed: int) -> None:
    """Nobody but a leader could let the heir in again; who resigns at once never is one."""
    lost = HostFault(FaultKind.RESTART, "data1", before_message=("Candidacy", 1), duration_s=1.0)
    scenario = replace(
        TOGETHER, seed=seed, num_iterations=12, calm_s=14.0, faults=(leave("data0", 8.0), lost)
    )
    result = Simulation(scenario).run()
    assert result.num_iterations == scenario.num_iterations
    assert len(lines(result, "data0    this node gives up term")) == 1
    assert lines(result, "data0    this node goes on leading: no other data node can lead")
    last = [line for line in lines(result, "data1    step of iteration 12.") if "loss" in line]
    assert "over 8 tokens" in last[0], "it is back"


def test_a_leader_whose_heir_could_not_stand_resigns_again_when_an_iteration_is_done() -> None:
    stalls = HostFault(FaultKind.FREEZE, "data1", before_message=("Candidacy", 1), duration_s=5.0)
    scenario = replace(
        TOGETHER, num_iterations=12, calm_s=14.0, faults=(leave("data0", 8.0), stalls)
    )
    result = Simulation(scenario).run()
    assert result.num_iterations == scenario.num_iterations
    resigned = lines(result, "data0    this node gives up term")
    assert len(resigned) == 2
    won = instant(result, "data0    this node leads term")
    done = [line for line in lines(result, "data0    iteration") if "is committed" in line]
    assert won < float(done[-1].split()[0]) <= float(resigned[1].split()[0])
    assert lines(result, "data1    this node leads term")


# In run 19 a second candidate, behind the winner, is bound to a term that the winner has heard of.
@pytest.mark.parametrize("seed", first_of([19, *(s for s in range(NUM_SEEDS) if s != 19)], 5))
def test_handing_over_survives_what_may_happen_meanwhile(seed: int) -> None:
    """The successor is lost, stalls or leaves too, another node is lost, messages go astray."""
    rng = random.Random(f"handover/{seed}")
    num_data = rng.choice((2, 3, 3))
    at_s = rng.uniform(13.0, 17.0)
    kinds = (FaultKind.KILL, FaultKind.VANISH, FaultKind.FREEZE, FaultKind.RESTART)
    other = HostFault(
        rng.choice(kinds),
        rng.choice(("data1", "relay0", "relay1")),
        at_s=at_s + rng.uniform(-0.5, 1.5),
        duration_s=rng.uniform(0.5, 6.0),
    )
    if num_data == 2 and other.host == "data1":
        other = replace(other, kind=FaultKind.FREEZE)  # One data node has to live.
    faults = [leave("data0", at_s), other]
    if num_data == 3 and rng.random() < 0.5:
        faults.append(leave(rng.choice(("data1", "data2")), at_s + rng.uniform(0.0, 0.5)))
    bad = LinkFaults(loss_ratio=0.03, delay_ratio=0.05, duplicate_ratio=0.05, until_s=24.0)
    scenario = replace(
        TOGETHER,
        seed=seed,
        batch=replace(TOGETHER.batch, num_data_nodes=num_data),
        faults=tuple(faults),
        link_faults=bad if seed % 2 else LinkFaults(),
        calm_s=24.0,
        num_iterations=12,
        protocol=replace(TOGETHER.protocol, min_data_nodes=num_data),
    )
    result = Simulation(scenario).run()
    assert result.num_iterations == scenario.num_iterations
    # Where nothing had been committed yet, or nobody was left to lead, it would have ended the run.
    ends = ("host.stopped reason=drained", "drain.spared", "this node goes on leading")
    assert any(lines(result, f"data0    {end}") for end in ends)
