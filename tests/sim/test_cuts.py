"""Links that are cut for good: the round goes on without one end, and nothing is lost."""

from dataclasses import replace

import pytest

from decod.protocol.params import ProtocolConfig
from decod.sim.compute import ComputeProfile
from decod.sim.network import LinkFaults
from decod.sim.scenario import HostSpec, Scenario
from decod.sim.simulation import Result, Simulation

CUT_S = 15.0
SCENARIO = Scenario(
    seed=3,
    num_relays=6,
    num_iterations=10,
    num_microbatches=6,
    duration_max_s=600.0,
    protocol=ProtocolConfig(min_nodes_per_stage=3),
)


def run_with_cuts(scenario: Scenario, cuts: list[tuple[str, str]]) -> Result:
    """Returns what came of a run in which some links are cut in one direction, for ever."""
    simulation = Simulation(scenario)
    for begin, end in cuts:
        simulation.kernel.at(
            CUT_S, lambda b=begin, e=end: simulation.world.network.cut(b, e, until_s=1e6)
        )
    return simulation.run()


@pytest.mark.parametrize("retry_timeout_s", [3.0, 20.0], ids=["early", "late"])
@pytest.mark.parametrize(
    "cuts",
    [
        [("relay0", "relay1")],
        [("relay1", "relay0")],
        [("relay0", "relay1"), ("relay1", "relay0")],
        [("relay0", "relay3")],
        [("relay1", "relay4"), ("relay4", "relay1")],
    ],
    ids=lambda cuts: ",".join(">".join(cut) for cut in cuts),
)
def test_two_relays_that_can_not_reach_each_other_do_not_stop_the_run(
    cuts: list[tuple[str, str]],
    retry_timeout_s: float,
) -> None:
    """However late their transport finds out: a large tensor may take its time."""
    whole = Simulation(SCENARIO).run()
    faults = LinkFaults(retry_timeout_s=retry_timeout_s)
    result = run_with_cuts(replace(SCENARIO, link_faults=faults), cuts)
    gone = [line for line in result.trace if "can't reach each other" in line]
    assert result.num_iterations == SCENARIO.num_iterations
    assert len([line for line in gone if "is gone" in line]) <= 1, gone
    assert not [line for line in result.trace if "is repeated" in line]
    told_s = [float(line.split()[0]) for line in gone if "is gone" in line]
    assert all(at_s < CUT_S + 10.0 for at_s in told_s), "and the operator knows it"
    # Then others do it again.
    assert result.duration_s < whole.duration_s + 10.0 + 8.0
    assert result.losses == whole.losses


def test_a_host_that_reaches_nobody_of_the_next_stage_is_who_goes() -> None:
    """Its uplink is broken, but for the leader: each of the others misses one, it misses three."""
    cuts = [("relay0", f"relay{index}") for index in (1, 3, 5)]
    result = run_with_cuts(SCENARIO, cuts)
    gone = [line for line in result.trace if "is gone: it and" in line]
    assert len(gone) == 1
    assert "relay0 is gone" in gone[0]
    assert result.num_iterations == SCENARIO.num_iterations


def test_the_last_of_a_stage_stays_whomever_it_can_not_reach() -> None:
    scenario = Scenario(
        seed=3,
        num_relays=3,
        num_iterations=10,
        num_microbatches=4,
        join_spread_s=0.0,
        duration_max_s=600.0,
    )
    result = run_with_cuts(scenario, [("relay0", "relay1"), ("relay1", "relay0")])
    gone = [line for line in result.trace if "is gone: it and" in line]
    assert all("relay0 is gone" not in line for line in gone), "it serves stage 2 alone"
    assert gone
    assert result.num_iterations == scenario.num_iterations


def test_a_host_that_is_slow_for_long_is_not_cut_off() -> None:
    """Its COMPLETE is late again and again, but it is reached: it keeps its work."""
    profile = ComputeProfile()
    stages = {"d": 0, "a1": 1, "b1": 1, "a2": 2, "b2": 2}
    scenario = Scenario(
        num_data_nodes=1,
        num_relays=4,
        num_microbatches=4,
        num_iterations=2,
        duration_max_s=2000.0,
        hosts=tuple(
            HostSpec(
                name=name,
                stage_index=stage,
                capacity=4,
                profile=replace(profile, forward_s=40.0) if name == "b1" else profile,
            )
            for name, stage in stages.items()
        ),
        protocol=ProtocolConfig(min_nodes_per_stage=2, complete_timeout_s=5.0),
    )
    result = Simulation(scenario).run()
    assert result.num_iterations == scenario.num_iterations
    assert result.duration_s > 80.0, "it has worked, slowly"
    assert not [line for line in result.trace if "is gone" in line]
