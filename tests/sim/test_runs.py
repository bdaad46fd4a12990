"""Whole runs of the real core in virtual time, over many seeds, without and with faults."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from decod.errors import ConfigError
from decod.protocol.core.effects import StopReason
from decod.protocol.core.events import DrainRequested
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.sim.__main__ import main
from decod.sim.kernel import seeded
from decod.sim.network import LinkFaults, Links
from decod.sim.scenario import (
    FaultKind,
    HostFault,
    Scenario,
    random_scenario,
)
from decod.sim.simulation import Result, Simulation, run_scenario
from tests.support.quick import first_of

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "100"))
"""Of each kind of run. Nightly checks raise it."""


TOGETHER = Scenario(
    num_relays=6,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=5,
    protocol=ProtocolConfig(min_nodes_per_stage=3),
)
"""Three relays in each of two stages, from the first iteration on."""


def enough_for_all(scenario: Scenario) -> Scenario:
    """Let every data node have a flow even when one relay of a stage is gone."""
    least = scenario.batch.num_data_nodes
    return replace(scenario, capacity_min=least, capacity_max=max(least, scenario.capacity_max))


def random_kill(scenario: Scenario, *, num_events_max: int = 300) -> HostFault:
    """Return the crash of one relay, at a moment drawn from the scenario's seed."""
    rng = seeded(scenario.seed, "kill")
    return HostFault(
        rng.choice((FaultKind.KILL, FaultKind.VANISH)),
        f"relay{rng.randrange(scenario.num_relays)}",
        after_num_events=rng.randint(1, num_events_max),
    )


def faulty_scenario(seed: int) -> Scenario:
    """Return a small run with one to four faults of relays. Every third also has bad links."""
    stages = 1 + seed % 4
    bad = LinkFaults(loss_ratio=0.01, duplicate_ratio=0.05, delay_ratio=0.05)
    scenario = random_scenario(
        seed,
        stages=StagesConfig(num_relay_stages=stages),
        num_relays=4 * stages,
        capacity_min=2,
        capacity_max=4,
        num_iterations=6,
        link_faults=bad if seed % 3 == 0 else LinkFaults(),
        protocol=ProtocolConfig(min_nodes_per_stage=2),
    )
    return replace(scenario, faults=tuple(_random_faults(scenario, begin_s=6.0, end_s=25.0)))


def _random_faults(scenario: Scenario, *, begin_s: float, end_s: float) -> list[HostFault]:
    rng = seeded(scenario.seed, "faults")
    kinds = (
        *[FaultKind.KILL] * 3,
        *[FaultKind.VANISH] * 2,
        FaultKind.FREEZE,
        FaultKind.RESTART,
        FaultKind.COMPUTE,
    )
    return [
        HostFault(
            rng.choice(kinds),
            f"relay{rng.randrange(scenario.num_relays)}",
            at_s=round(rng.uniform(begin_s, end_s), 3),
            duration_s=round(rng.uniform(1.0, 12.0), 3),
        )
        for _ in range(rng.randint(1, 4))
    ]


@pytest.mark.parametrize("block", first_of(range(10)))
def test_a_run_without_faults_commits_all_its_iterations(block: int) -> None:
    for seed in range(block, NUM_SEEDS, 10):
        scenario = random_scenario(seed)
        result = run_scenario(scenario)
        assert result.num_iterations == scenario.num_iterations
        assert len(result.losses) == scenario.num_iterations


@pytest.mark.parametrize("block", first_of(range(10)))
def test_a_run_that_loses_a_relay_commits_all_its_iterations(block: int) -> None:
    """The relay dies at any of its events: joining, training, aggregating, committing, paused."""
    lost: list[int | None] = []
    for seed in range(block, NUM_SEEDS, 10):
        scenario = random_scenario(seed)
        scenario = replace(scenario, faults=(random_kill(scenario),))
        result = run_scenario(scenario)
        # One death can take a stage only if that relay still was the stage's only holder.
        assert result.lost_stage or result.num_iterations == scenario.num_iterations
        lost.append(result.lost_stage)
    assert lost.count(None) >= len(lost) // 2


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_who_waits_long_for_others_does_not_take_the_leader_for_dead(seed: int) -> None:
    patience_s = TOGETHER.protocol.leader_timeout_s
    scenario = replace(TOGETHER, seed=seed, join_spread_s=8 * patience_s, num_iterations=2)
    result = run_scenario(scenario)
    assert result.num_iterations == 2
    assert not any("leader_lost" in line for line in result.trace)


def test_members_wait_for_a_stage_that_was_lost_before_anything_was_learnt() -> None:
    """Until somebody comes: its weights can be built anew. The leader lives, and they know it."""
    away_s = 2 * TOGETHER.protocol.leader_timeout_s
    stage = ("relay0", "relay2", "relay5")
    faults = tuple(HostFault(FaultKind.RESTART, n, at_s=3.5, duration_s=away_s) for n in stage)
    profile = replace(TOGETHER.profile, forward_s=5.0)
    result = run_scenario(replace(TOGETHER, profile=profile, faults=faults, num_iterations=2))
    assert result.num_iterations == 2
    assert any("is repeated: lost relay" in line for line in result.trace)
    assert not any("leader_lost" in line for line in result.trace)


def test_a_relay_that_dies_between_commits_costs_no_iteration() -> None:
    scenario = replace(
        TOGETHER, faults=(HostFault(FaultKind.KILL, "relay1", at_s=8.0),), num_iterations=4
    )
    result = run_scenario(scenario)
    assert result.num_iterations == 4
    assert any("goes on: lost relay1" in line for line in result.trace)
    assert not any("is repeated" in line for line in result.trace)


@pytest.mark.parametrize("block", first_of(range(10)))
def test_relays_die_freeze_and_return_and_all_iterations_are_committed(block: int) -> None:
    """Up to four faults, on good and bad links; hardly ever does one cost an iteration."""
    num_mended = num_repeated = 0
    for seed in range(block, NUM_SEEDS, 10):
        scenario = faulty_scenario(seed)
        result = run_scenario(scenario)
        assert result.lost_stage or result.num_iterations == scenario.num_iterations
        num_mended += sum(" goes on: " in line for line in result.trace)
        num_repeated += sum("is repeated" in line for line in result.trace)
    assert num_mended > 2 * num_repeated


@pytest.mark.parametrize("seed", first_of(range(10), 3))
def test_a_relay_that_stalls_and_comes_back_does_no_harm(seed: int) -> None:
    """It is removed, or waited for; either way what it says later belongs to no iteration."""
    fault = HostFault(FaultKind.FREEZE, "relay1", at_s=5.0 + seed, duration_s=3.0 + 2 * seed)
    result = run_scenario(replace(TOGETHER, seed=seed, faults=(fault,)))
    assert result.num_iterations == TOGETHER.num_iterations


@pytest.mark.parametrize("seed", first_of(range(10), 3))
def test_a_relay_that_restarts_is_taken_in_again(seed: int) -> None:
    fault = HostFault(FaultKind.RESTART, "relay1", at_s=5.0 + seed, duration_s=1.0 + seed)
    result = run_scenario(replace(TOGETHER, seed=seed, num_iterations=8, faults=(fault,)))
    assert result.num_iterations == 8
    joined = [line for line in result.trace if "relay1 wants to join" in line]
    assert len(joined) == 2


@pytest.mark.parametrize("kind", [FaultKind.COMPUTE, FaultKind.DRAIN])
@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_a_relay_that_leaves_is_done_without(kind: FaultKind, seed: int) -> None:
    fault = HostFault(kind, "relay1", at_s=5.0 + seed)
    result = run_scenario(replace(TOGETHER, seed=seed, faults=(fault,)))
    assert result.num_iterations == TOGETHER.num_iterations


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_a_relay_whose_time_is_up_goes_in_the_middle_of_an_iteration(seed: int) -> None:
    """The leader hears it from the relay itself: nobody waits for a heartbeat."""
    profile = replace(TOGETHER.profile, forward_s=5.0)
    simulation = Simulation(replace(TOGETHER, seed=seed, profile=profile, num_iterations=3))
    relay = simulation.hosts["relay1"]
    simulation.kernel.at(15.0 + seed, relay.deliver, DrainRequested(timeout_s=2.0))
    result = simulation.run()
    assert result.num_iterations == 3
    assert relay.stop is not None
    assert relay.stop.reason is StopReason.DRAINED
    (gone,) = (line for line in result.trace if "relay1 is gone: did not finish in time" in line)
    assert float(gone.split()[0]) < 17.0 + seed + 0.5


def lines_of(result: Result, host: str, text: str) -> list[int]:
    """Return where a host's lines with this text are in the trace."""
    return [i for i, line in enumerate(result.trace) if f" {host} " in line and text in line]


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_a_paused_relay_stays_in_step_and_works_again(seed: int) -> None:
    """It asks at any instant; meanwhile the others of its stage have all the microbatches."""
    faults = LinkFaults(duplicate_ratio=0.1, delay_ratio=0.1)
    pause = HostFault(FaultKind.PAUSE, "relay1", at_s=5.0 + 1.3 * seed, duration_s=25.0)
    scenario = replace(TOGETHER, seed=seed, num_iterations=16, faults=(pause,), link_faults=faults)
    result = run_scenario(scenario)
    assert result.num_iterations == 16
    (begin,) = lines_of(result, "relay1", "paused")
    (end,) = lines_of(result, "relay1", "takes microbatches again")
    meanwhile = [i for i in lines_of(result, "relay1", "loss") if begin < i < end]
    assert len(meanwhile) >= 2, "it commits while it is paused"


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_relay_whose_device_is_freed_leaves_in_order_and_comes_back(seed: int) -> None:
    """Nothing that it has computed is lost, and nobody computes anything again."""
    free = HostFault(FaultKind.FREE, "relay1", at_s=12.0 + 1.3 * seed, duration_s=25.0)
    scenario = replace(TOGETHER, seed=seed, num_iterations=20, faults=(free,))
    result = run_scenario(scenario)
    assert result.num_iterations == 20
    (left,) = lines_of(result, "relay1", "host.stopped reason=paused")
    back = max(i for i in lines_of(result, "relay1", " loaded") if i > left)
    assert [i for i in lines_of(result, "relay1", "loss") if i > back], "it takes part again"
    assert not any("is repeated" in line or "goes on:" in line for line in result.trace)


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_a_stage_is_never_paused_as_a_whole(seed: int) -> None:
    """Its three relays ask at about the same time; the last that asks is refused."""
    faults = tuple(
        HostFault(FaultKind.PAUSE, f"relay{index}", at_s=6.0 + 0.1 * index, duration_s=500.0)
        for index in range(TOGETHER.num_relays)
    )
    result = run_scenario(replace(TOGETHER, seed=seed, num_iterations=10, faults=faults))
    assert result.num_iterations == 10
    assert sum("this node stays as it is: stage" in line for line in result.trace) == 2


@pytest.mark.parametrize("block", first_of(range(10)))
def test_pauses_at_any_instant_cost_no_iteration(block: int) -> None:
    """Before they enter, while they load, in any phase; beside a death, and over a restart."""
    for seed in range(block, NUM_SEEDS // 4, 10):
        scenario = random_scenario(seed, num_iterations=5)
        rng = seeded(seed, "pauses")
        dies = rng.random() < 0.5
        faults = [random_kill(scenario)] if dies else []
        for kind in 3 * [FaultKind.PAUSE] + [FaultKind.RESTART] * (not dies):
            host = f"relay{rng.randrange(scenario.num_relays)}"
            num_events, duration_s = rng.randint(20, 400), rng.choice((0.5, 5.0, 50.0))
            fault = HostFault(kind, host, after_num_events=num_events, duration_s=duration_s)
            faults.append(fault)
        result = run_scenario(replace(scenario, faults=tuple(faults)))
        assert result.lost_stage or result.num_iterations == 5


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_a_stage_whose_workers_die_waits_for_those_that_are_paused(seed: int) -> None:
    """Its weights are safe with them: the run stands still until one takes part again."""
    paused = ("relay0", "relay1", "relay2", "relay3")
    faults = [HostFault(FaultKind.PAUSE, name, at_s=6.0, duration_s=120.0) for name in paused]
    faults += [HostFault(FaultKind.KILL, n, at_s=20.0 + seed) for n in ("relay4", "relay5")]
    result = run_scenario(replace(TOGETHER, seed=seed, num_iterations=20, faults=tuple(faults)))
    assert result.num_iterations == 20
    assert result.duration_s > 6.0 + 120.0


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_a_stages_last_worker_does_not_leave_it_to_those_that_are_paused(seed: int) -> None:
    """It waits for a successor, and trains meanwhile."""
    paused = ("relay0", "relay1", "relay2", "relay3")
    faults = [HostFault(FaultKind.PAUSE, name, at_s=6.0, duration_s=1e3) for name in paused]
    faults += [HostFault(FaultKind.DRAIN, n, at_s=20.0 + seed) for n in ("relay4", "relay5")]
    result = run_scenario(replace(TOGETHER, seed=seed, num_iterations=12, faults=tuple(faults)))
    assert result.num_iterations == 12


@pytest.mark.parametrize("seed", first_of(range(10), 3))
def test_bad_links_do_not_stop_a_run(seed: int) -> None:
    """Messages are lost (and the sender told so), repeated, and late."""
    faults = LinkFaults(loss_ratio=0.01, duplicate_ratio=0.05, delay_ratio=0.05)
    scenario = random_scenario(seed, link_faults=faults, links=Links(spread_ratio=0.5))
    assert run_scenario(enough_for_all(scenario)).num_iterations == scenario.num_iterations


# --- replay ---------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    """Nothing depends on the order of a hash table, which differs between these processes."""
    command = [sys.executable, "-m", "decod.sim", "--seed", "11", "--relays", "6"]
    command += ["--fault", "kill:relay2#150"]
    traces = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        traces.append(done.stdout)
    assert traces[0] == traces[1]
    assert traces[0].count(b"\n") > 50


def test_another_seed_gives_another_run() -> None:
    assert run_scenario(Scenario(seed=1)).trace != run_scenario(Scenario(seed=2)).trace


def test_the_command_of_a_scenario_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = replace(random_scenario(3), faults=(random_kill(random_scenario(3)),))
    words = scenario.command().replace("'", "").split()
    assert words[:3] == ["python", "-m", "decod.sim"]
    assert main(words[3:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == list(run_scenario(scenario).trace)


def test_a_fault_is_written_as_it_is_read() -> None:
    for text in ("kill:relay3@12.5+10.0", "freeze:data0#140+8.0"):
        assert str(HostFault.parse(text)) == text
    assert HostFault.parse("kill:relay3@12") == HostFault(FaultKind.KILL, "relay3", at_s=12.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "explode:relay0@1"],
        ["--fault", "kill:relay0"],
        ["--fault", "kill:relay99@1"],
        ["--relays", "1", "--stages", "2"],
        ["--data-nodes", "0"],
        ["--capacity-min", "5"],
        ["--microbatches", "0"],
    ],
)
def test_a_scenario_that_can_not_be_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == ConfigError.exit_code
    assert capsys.readouterr().err.startswith("error: E-CFG-")


@pytest.mark.parametrize("num_members", [2, 3])
@pytest.mark.parametrize("victim", ["relay0", "relay1", "relay2", "relay3"])
def test_a_flipped_bit_is_healed_from_the_other_members(victim: str, num_members: int) -> None:
    """One iteration is repeated, and no more. Of two, the first decides, whichever it is."""
    scenario = replace(
        TOGETHER,
        num_relays=2 * num_members,
        protocol=ProtocolConfig(min_nodes_per_stage=num_members),
    )
    for at_s in (6.0, 8.0, 11.0):
        fault = HostFault(FaultKind.FLIP, victim, at_s=at_s)
        result = run_scenario(replace(scenario, faults=(fault,)))
        assert result.num_iterations == scenario.num_iterations
        named = [line for line in result.trace if "differs from the rest of stage" in line]
        healed = [line for line in result.trace if "is not that of most" in line]
        repeated = [line for line in result.trace if "is repeated: members of stage" in line]
        assert len(named) == len(healed) == len(repeated) == 1
        assert num_members == 2 or f" {victim} " in healed[0]
