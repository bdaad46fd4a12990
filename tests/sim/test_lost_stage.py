"""Whole stages are lost, and the run goes on and learns what it would have learnt."""

import os
from dataclasses import replace

import pytest

from decod.protocol.core import messages as m
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import seeded
from decod.sim.network import LinkFaults
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Result, run_scenario
from tests.sim.mortal import simulation_with_mortal
from tests.support.quick import first_of
from tests.unit.protocol.cast import reopens

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "80"))
EVERY = 4
TOGETHER = Scenario(
    num_relays=7,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=11,
    batch=BatchConfig(num_microbatches=4),
    protocol=ProtocolConfig(min_nodes_per_stage=3, snapshot_every_iterations=EVERY),
)
"""Three relays in each of two stages from the first iteration on, and one more."""


def lines(result: Result, text: str) -> list[str]:
    return [line for line in result.trace if text in line]


def lose(host: str, at_s: float) -> HostFault:
    return HostFault(FaultKind.STAGE, host, at_s=at_s)


@pytest.mark.parametrize("seed", first_of(range(8), 3))
def test_a_stage_that_is_lost_is_taken_over_from_states_on_other_hosts(seed: int) -> None:
    """At any instant. The checker compares what is computed again with the first time."""
    scenario = replace(TOGETHER, seed=seed, faults=(lose("relay1", 15.0 + 1.1 * seed),))
    result = run_scenario(scenario)
    assert result.num_iterations == scenario.num_iterations
    assert len(lines(result, "STAGE ")) == 1
    (rebuilt,) = lines(result, "is rebuilt (kept)")
    num_repeated = int(rebuilt.split(": ")[1].split()[0])
    assert num_repeated <= 2 * EVERY
    undisturbed = run_scenario(replace(scenario, faults=()))
    assert result.losses == undisturbed.losses


def test_before_the_first_states_are_kept_all_begin_again() -> None:
    result = run_scenario(replace(TOGETHER, faults=(lose("relay1", 9.0),)))
    assert result.num_iterations == TOGETHER.num_iterations
    assert lines(result, "is rebuilt (start)")


def test_without_kept_states_the_neighbours_stand_in_and_nobody_goes_back() -> None:
    protocol = replace(TOGETHER.protocol, snapshot_every_iterations=0)
    result = run_scenario(replace(TOGETHER, protocol=protocol, faults=(lose("relay1", 20.0),)))
    assert result.num_iterations == TOGETHER.num_iterations
    assert lines(result, "is rebuilt (neighbours): 0 iterations repeated")


def test_a_run_of_one_stage_that_keeps_nothing_ends_with_it() -> None:
    protocol = replace(TOGETHER.protocol, snapshot_every_iterations=0)
    scenario = replace(
        TOGETHER,
        stages=replace(TOGETHER.stages, num_relay_stages=1),
        num_relays=3,
        protocol=protocol,
    )
    result = run_scenario(replace(scenario, faults=(lose("relay1", 12.0),)))
    assert result.lost_stage == 1
    assert lines(result, "its weights are nowhere")


def test_a_run_waits_for_a_host_and_takes_the_one_that_comes_back_with_its_disk() -> None:
    """All relays of the only stage restart: what they kept is what the run goes on from."""
    scenario = replace(TOGETHER, stages=replace(TOGETHER.stages, num_relay_stages=1), num_relays=3)
    faults = tuple(
        HostFault(FaultKind.RESTART, f"relay{index}", at_s=14.0, duration_s=30.0 + index)
        for index in range(3)
    )
    result = run_scenario(replace(scenario, faults=faults))
    assert result.num_iterations == scenario.num_iterations
    assert lines(result, "waits for a host to take it over")
    assert lines(result, "is rebuilt (kept)")
    assert result.duration_s > 44.0


def full(*hosts: str, at_s: float) -> tuple[HostFault, ...]:
    return tuple(HostFault(FaultKind.DISK, host, at_s=at_s, duration_s=60.0) for host in hosts)


def test_a_host_with_a_full_disk_keeps_its_last_states_and_the_others_serve() -> None:
    """All that come too late for the disks are told; what the stage had learnt is on the others."""
    faults = (*full("relay0", "relay1", "relay2", at_s=12.0), lose("relay1", 24.0))
    result = run_scenario(replace(TOGETHER, faults=faults))
    assert lines(result, "not kept: the disk is full")
    (rebuilt,) = lines(result, "is rebuilt (kept)")
    assert int(rebuilt.split(": ")[1].split()[0]) <= EVERY
    undisturbed = run_scenario(replace(TOGETHER, faults=()))
    assert result.losses == undisturbed.losses


def test_with_all_disks_full_the_states_of_the_mark_before_serve() -> None:
    everybody = [f"relay{index}" for index in range(7)]
    faults = (*full("data0", *everybody, at_s=17.0), lose("relay1", 24.0))
    result = run_scenario(replace(TOGETHER, faults=faults))
    assert lines(result, "not kept: the disk is full")
    (rebuilt,) = lines(result, "is rebuilt (kept)")
    assert EVERY < int(rebuilt.split(": ")[1].split()[0]) <= 2 * EVERY
    undisturbed = run_scenario(replace(TOGETHER, faults=()))
    assert result.losses == undisturbed.losses


EVERYBODY = ("data0", *(f"relay{index}" for index in range(7)))


def spoil(*hosts: str, at_s: float) -> tuple[HostFault, ...]:
    """Alter the newest state of each stage on the disks of these hosts."""
    return tuple(HostFault(FaultKind.SPOIL, host, at_s=at_s) for host in hosts)


def killed(result: Result) -> set[str]:
    return {line.split()[1] for line in lines(result, "killed")}


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_where_both_copies_were_altered_the_states_of_the_mark_before_serve(seed: int) -> None:
    """That is found before anybody goes back to them: nobody has to leave."""
    scenario = replace(TOGETHER, seed=seed, num_iterations=12)
    faults = (*spoil(*EVERYBODY, at_s=23.4), lose("relay1", 23.5))
    result = run_scenario(replace(scenario, faults=faults))
    assert lines(result, "is not used: it was altered")
    (rebuilt,) = lines(result, "is rebuilt (kept)")
    assert EVERY < int(rebuilt.split(": ")[1].split()[0]) <= 2 * EVERY
    told = {line.split()[1] for line in lines(result, "no whole state of stage")}
    assert told == {*EVERYBODY} - killed(result), "everybody who is left"
    assert not lines(result, "removed")
    assert result.losses == run_scenario(scenario).losses


def test_copies_that_are_altered_once_they_were_read_cost_another_era() -> None:
    """Who can't go back, the leader too, stays: all go back to the mark before."""
    scenario = replace(TOGETHER, num_iterations=12)
    lost = lose("relay1", 23.5)
    (line, *_) = lines(run_scenario(replace(scenario, faults=(lost,))), "back to iteration 8")
    # The last disk has been read, and its host's answer is on its way.
    at_s = float(line.split()[0]) - 0.001
    result = run_scenario(replace(scenario, faults=(lost, *spoil(*EVERYBODY, at_s=at_s))))
    told = {line.split()[2] for line in lines(result, "can't go back, and all are asked again")}
    assert told == {*EVERYBODY} - killed(result)
    assert len(lines(result, "is rebuilt (kept)")) == 1
    assert not lines(result, "removed")
    assert result.losses == run_scenario(scenario).losses


def test_where_all_copies_of_both_marks_were_altered_the_neighbours_stand_in() -> None:
    """Nobody has gone back to anything yet, so there are neighbours to mix."""
    faults = (
        *spoil(*EVERYBODY, at_s=23.3),
        *spoil(*EVERYBODY, at_s=23.5),
        lose("relay1", 24.0),
    )
    result = run_scenario(replace(TOGETHER, faults=faults))
    assert lines(result, "is rebuilt (neighbours)")
    assert result.num_iterations == TOGETHER.num_iterations


@pytest.mark.parametrize("num_sent", range(4))
def test_a_leader_that_dies_while_it_begins_an_era_is_replaced(num_sent: int) -> None:
    """Whoever has heard of the era brings the next leader up to it; if nobody has, it begins it."""
    protocol = replace(TOGETHER.protocol, min_data_nodes=2)
    scenario = replace(
        TOGETHER,
        batch=replace(TOGETHER.batch, num_data_nodes=2),
        num_relays=9,
        stages=replace(TOGETHER.stages, num_relay_stages=3),
        capacity_min=4,
        capacity_max=6,
        protocol=protocol,
        faults=(lose("relay1", 22.0),),
    )

    def begins_era(message: m.Message) -> bool:
        return reopens(message) and message.opening.iteration.era > 0

    result = simulation_with_mortal(scenario, begins_era, num_sent).run()
    assert lines(result, "this node leads term 2")
    assert lines(result, "back to iteration")
    assert result.num_iterations == scenario.num_iterations


def stormy(seed: int) -> Scenario:
    """Return a run that loses one or two stages, and often somebody else around that time."""
    rng = seeded(seed, "lost stages")
    stages = rng.choice((1, 2, 2, 3))
    num_relays = stages * 3 + rng.randint(0, 1)
    at_s = round(rng.uniform(5.0, 45.0), 3)
    faults = [lose(f"relay{rng.randrange(num_relays)}", at_s)]
    if rng.random() < 0.5:
        faults.append(lose(f"relay{rng.randrange(num_relays)}", round(at_s + rng.uniform(0, 9), 3)))
    if rng.random() < 0.5:
        kind = rng.choice((FaultKind.KILL, FaultKind.RESTART, FaultKind.FREEZE, FaultKind.COMPUTE))
        host = f"relay{rng.randrange(num_relays)}"
        when_s = round(max(1.0, at_s + rng.uniform(-3, 8)), 3)
        faults.append(HostFault(kind, host, at_s=when_s, duration_s=rng.uniform(1, 12)))
    every = rng.choice((0, 2, 3, 4))
    altered = seeded(seed, "altered states")
    if altered.random() < 0.4:
        names = ["data0", *(f"relay{index}" for index in range(num_relays))]
        names = altered.sample(names, altered.randint(1, len(names)))
        faults += spoil(*names, at_s=round(at_s + altered.uniform(-2, 3), 3))
    bad = LinkFaults(loss_ratio=0.01, duplicate_ratio=0.05, delay_ratio=0.05)
    return replace(
        TOGETHER,
        seed=seed,
        stages=replace(TOGETHER.stages, num_relay_stages=stages),
        num_relays=num_relays,
        faults=tuple(faults),
        link_faults=bad if seed % 3 == 0 else LinkFaults(),
        protocol=ProtocolConfig(min_nodes_per_stage=2, snapshot_every_iterations=every),
    )


@pytest.mark.parametrize("block", first_of(range(8), 2))
def test_stages_are_lost_beside_other_faults_and_the_run_goes_on(block: int) -> None:
    """If anybody is left who can be spared: else it says that it waits."""
    num_rebuilt = 0
    for seed in range(block, NUM_SEEDS, 8):
        scenario = stormy(seed)
        result = run_scenario(scenario)
        assert result.lost_stage or result.num_iterations == scenario.num_iterations
        num_rebuilt += len(lines(result, "is rebuilt"))
    assert num_rebuilt or NUM_SEEDS < 80  # Some come after the end of a run.
