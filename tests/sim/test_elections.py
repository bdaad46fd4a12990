"""Runs whose leader is lost: at any event, in every phase of an iteration, for good or for a
while."""

import os
import random
from dataclasses import replace

import pytest

from decod.ids import Iteration
from decod.protocol.core import messages as m
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.elections import early_loss, election_storm
from decod.sim.network import LinkFaults
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Result, Simulation
from tests.sim.mortal import simulation_with_mortal
from tests.support.quick import first_of

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "40"))

LOSSY_SEEDS = 12

TOGETHER = Scenario(
    batch=BatchConfig(num_data_nodes=2, num_microbatches=4),
    num_relays=6,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=5,
    capacity_min=4,
    capacity_max=6,
    duration_max_s=600.0,
    protocol=ProtocolConfig(min_data_nodes=2, min_nodes_per_stage=3),
)
"""Two data nodes, and three relays in each of two stages, from the first iteration on."""


def instants(result: Result, text: str) -> list[float]:
    """Return when lines with a text were written."""
    return [float(line.split()[0]) for line in result.trace if text in line]


def recovery_s(result: Result) -> float:
    """Return the time from the leader's death to its successor's first iteration."""
    (killed_s,) = instants(result, "data0    host.killed")
    elected_s = instants(result, "this node leads term 2")
    return elected_s[0] - killed_s if elected_s else 0.0


def simulation_of_death(kind: type, num_sent: int, *, vanish: bool, seed: int) -> Simulation:
    """Return `TOGETHER`. Its leader dies in iteration 3.1 after so many messages of a kind."""

    def counts(message: m.Message) -> bool:
        if isinstance(message, m.Open):
            return kind is m.Open and message.committed and message.closed == Iteration(3, 1)
        averaging = getattr(message, "averaging", None)
        iteration = averaging.iteration if averaging else getattr(message, "iteration", None)
        return isinstance(message, kind) and iteration == Iteration(3, 1)

    return simulation_with_mortal(replace(TOGETHER, seed=seed), counts, num_sent, vanish=vanish)


@pytest.mark.parametrize("first", [23, 48, 94])
def test_a_leader_is_followed_by_another_as_soon_as_anybody_knows_the_first_iteration(
    first: int,
) -> None:
    """It is lost while the run begins, at 5 % loss: some have not heard that they are members."""
    num_others = 0
    for seed in range(first, first + 10):
        simulation = Simulation(election_storm(seed, plot=early_loss, num_iterations=2))
        result = simulation.run()
        opened = [line.split()[1] for line in result.trace if " members, view 1 " in line]
        others = {name for name in opened if name != "data0"}
        if others:
            assert result.num_iterations == 2, (seed, simulation.scenario.command(), result.trace)
        num_others += bool(others)
    assert num_others >= 5


@pytest.mark.parametrize("at_s", [4.1])
def test_a_leader_whose_device_fails_is_as_one_that_is_lost(at_s: float) -> None:
    fault = HostFault(FaultKind.COMPUTE, "data0", at_s=at_s)
    result = Simulation(replace(TOGETHER, calm_s=at_s, faults=(fault,))).run()
    assert result.num_iterations == TOGETHER.num_iterations
    assert result.record.counts["leader.elected"] == 1


@pytest.mark.parametrize("vanish", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_sent", "finished"),
    [
        pytest.param(m.ForwardActivation, 1, False, id="training"),
        pytest.param(m.BeginAggregation, 0, False, id="before the flood"),
        pytest.param(m.BeginAggregation, 2, False, id="in the flood"),
        pytest.param(m.ReducePart, 0, False, id="reducing"),
        pytest.param(m.Open, 0, True, id="commit decided and not told"),
        pytest.param(m.Open, 1, True, id="commit told to one"),
        pytest.param(m.Open, 2, True, id="commit told to some"),
    ],
)
@pytest.mark.parametrize("seed", range(1))
def test_a_leader_that_dies_is_replaced_in_every_phase(
    kind: type, num_sent: int, finished: bool, vanish: bool, seed: int
) -> None:
    """The iteration is finished if it may have been committed, else repeated by the rest."""
    result = simulation_of_death(kind, num_sent, vanish=vanish, seed=seed).run()
    assert result.num_iterations == TOGETHER.num_iterations
    assert recovery_s(result) < 5.0
    repeated = any("iteration 3.1 is repeated: lost the leader" in line for line in result.trace)
    assert repeated is not finished
    # What the dead leader was to read is read by the other.
    trained = [
        line for line in result.trace if "data1    step of iteration" in line and "loss" in line
    ]
    assert all("over 8 tokens" in line for line in trained), trained


@pytest.mark.parametrize("block", first_of(range(10), 2))
def test_a_leader_that_dies_at_any_event_is_replaced_within_five_seconds(block: int) -> None:
    times: list[float] = []
    for seed in range(block, NUM_SEEDS, 10):
        rng = random.Random(f"leader/{seed}")
        kind = rng.choice((FaultKind.KILL, FaultKind.VANISH))
        fault = HostFault(kind, "data0", after_num_events=rng.randint(150, 550))
        num_data = rng.choice((2, 2, 3))
        protocol = replace(TOGETHER.protocol, min_data_nodes=num_data)
        scenario = replace(
            TOGETHER,
            seed=seed,
            faults=(fault,),
            batch=replace(TOGETHER.batch, num_data_nodes=num_data),
            protocol=protocol,
        )
        result = Simulation(scenario).run()
        assert result.num_iterations == scenario.num_iterations
        if instants(result, "data0    host.killed"):
            times.append(recovery_s(result))
    assert max(times) < 5.0, times
    assert sum(time_s > 0 for time_s in times) >= len(times) / 2


def replaced_s(seed: int, loss_ratio: float) -> float:
    """Have a leader lost at any time of an iteration; return how long nobody led."""
    rng = random.Random(f"lossy/{loss_ratio}/{seed}")
    num_data = rng.choice((2, 2, 3))
    simulation = Simulation(
        replace(
            TOGETHER,
            seed=seed,
            batch=replace(TOGETHER.batch, num_data_nodes=num_data),
            num_iterations=1000,
            protocol=ProtocolConfig(min_data_nodes=num_data, min_nodes_per_stage=3),
            link_faults=LinkFaults(loss_ratio=loss_ratio),
        )
    )
    kernel, counts = simulation.kernel, simulation.trace.counts
    assert kernel.run(until_s=60.0, done=lambda: simulation.checker.num_iterations > 0)
    kernel.run(until_s=kernel.now_s + rng.uniform(0.0, 3.0))
    leader, num_before, killed_s = simulation.acting, counts["leader.elected"], kernel.now_s
    assert leader is not None
    leader.kill(vanish=rng.random() < 0.5)
    kernel.run(until_s=killed_s + 60.0, done=lambda: counts["leader.elected"] > num_before)
    return kernel.now_s - killed_s


@pytest.mark.parametrize("loss_ratio", first_of([0.05, 0.01, 0.02]))
def test_a_lost_leader_is_replaced_within_six_seconds_though_packets_are_lost(
    loss_ratio: float,
) -> None:
    """Those of the election too; who has missed beats is more patient.

    With the settings that a run has if nobody says otherwise.
    """
    times = [replaced_s(seed, loss_ratio) for seed in range(LOSSY_SEEDS)]
    assert max(times) < 6.0, times


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_leader_that_stalls_is_told_that_it_leads_no_more(seed: int) -> None:
    fault = HostFault(FaultKind.FREEZE, "data0", at_s=6.0 + seed / 3, duration_s=8.0)
    result = Simulation(replace(TOGETHER, seed=seed, faults=(fault,))).run()
    assert result.num_iterations == TOGETHER.num_iterations
    assert any("data0    host.stopped reason=superseded" in line for line in result.trace)


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_leader_that_stalls_for_a_moment_stays_leader(seed: int) -> None:
    fault = HostFault(FaultKind.FREEZE, "data0", at_s=6.0 + seed / 3, duration_s=2.0)
    result = Simulation(replace(TOGETHER, seed=seed, faults=(fault,))).run()
    assert not instants(result, "leads term")


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_leader_that_restarts_joins_as_one_of_the_data_nodes(seed: int) -> None:
    fault = HostFault(FaultKind.RESTART, "data0", at_s=6.0 + seed / 3, duration_s=1.0)
    scenario = replace(TOGETHER, seed=seed, num_iterations=12, faults=(fault,))
    result = Simulation(scenario).run()
    assert result.num_iterations == 12
    last = [
        line for line in result.trace if "data1    step of iteration 12." in line and "loss" in line
    ]
    assert "over 8 tokens" in last[0], "both inject again"


def test_candidates_find_the_new_leader() -> None:
    fault = HostFault(FaultKind.KILL, "data0", at_s=8.0)
    late = HostFault(FaultKind.RESTART, "relay1", at_s=7.0, duration_s=2.0)
    scenario = replace(TOGETHER, num_iterations=12, faults=(fault, late))
    result = Simulation(scenario).run()
    assert any("relay1   state of iteration" in line for line in result.trace)


@pytest.mark.parametrize("seed", range(3))
def test_without_a_quorum_nothing_is_committed(seed: int) -> None:
    """The leader and one relay are left of eight: the others may be training elsewhere."""
    gone = ("data1", "relay0", "relay1", "relay2", "relay3")
    faults = tuple(HostFault(FaultKind.FREEZE, name, at_s=8.0, duration_s=60.0) for name in gone)
    scenario = replace(TOGETHER, seed=seed, num_iterations=30, faults=faults)
    simulation = Simulation(scenario)
    simulation.kernel.run(until_s=9.0)
    before = simulation.checker.num_iterations
    simulation.kernel.run(until_s=60.0)
    assert simulation.checker.num_iterations <= before + 1
    assert any("NO QUORUM" in line for line in simulation.trace.lines)


@pytest.mark.parametrize("seed", [0, 2])
def test_a_quorum_that_restarts_is_taken_in_again(seed: int) -> None:
    """While too many are gone iterations fail, and those who come back are no strangers."""
    gone = ("data1", "relay0", "relay1", "relay2", "relay3")
    faults = tuple(
        HostFault(FaultKind.RESTART, name, at_s=8.0, duration_s=20.0 + 30 * seed) for name in gone
    )
    protocol = replace(TOGETHER.protocol, iteration_timeout_s=5.0)
    scenario = replace(TOGETHER, seed=seed, num_iterations=12, faults=faults, protocol=protocol)
    result = Simulation(scenario).run()
    assert any("NO QUORUM" in line for line in result.trace)
    assert result.num_iterations == 12
