"""Links that are cut or slow for good: the run goes round them, and nobody leaves for that."""

from dataclasses import replace

import pytest

from decod.run.protocol_config import ProtocolConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import LinkFaults
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Cut, HostSpec, Scenario
from decod.sim.simulation import Result, Simulation
from tests.support.quick import first_of

CUT_S = 15.0
SCENARIO = Scenario(
    seed=3,
    num_relays=6,
    num_iterations=10,
    batch=BatchConfig(num_microbatches=6),
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


@pytest.mark.parametrize("retry_timeout_s", first_of([3.0, 20.0]))
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
def test_two_relays_that_can_not_reach_each_other_both_keep_their_place(
    cuts: list[tuple[str, str]],
    retry_timeout_s: float,
) -> None:
    """Between stages and within one; however late their transport finds out."""
    whole = Simulation(SCENARIO).run()
    faults = LinkFaults(retry_timeout_s=retry_timeout_s)
    result = run_with_cuts(replace(SCENARIO, link_faults=faults), cuts)
    assert result.num_iterations == SCENARIO.num_iterations
    assert not [line for line in result.trace if "is gone" in line]
    assert not [line for line in result.trace if "is repeated" in line]
    assert [line for line in result.trace if "no way to" in line], "and the operator knows it"
    assert result.duration_s < whole.duration_s + 10.0
    assert result.losses == whole.losses


@pytest.mark.parametrize("retry_timeout_s", [8.0, 10.0, 12.0])
def test_what_was_sent_before_the_link_broke_and_fails_late_casts_no_doubt(
    retry_timeout_s: float,
) -> None:
    """Both ends know the link to be broken by then, and go round it."""
    faults = LinkFaults(retry_timeout_s=retry_timeout_s)
    scenario = replace(SCENARIO, seed=4, link_faults=faults)
    result = run_with_cuts(scenario, [("relay0", "relay1"), ("relay1", "relay0")])
    assert result.num_iterations == SCENARIO.num_iterations
    assert not [line for line in result.trace if "is gone" in line]


@pytest.mark.parametrize("others", [(1, 3, 5), (1, 3), (2, 4)], ids=str)
def test_a_host_that_reaches_few_others_keeps_its_place(others: tuple[int, ...]) -> None:
    """Its links to a whole stage are down, say: the data node passes everything on."""
    cuts = [("relay0", f"relay{index}") for index in others]
    result = run_with_cuts(SCENARIO, cuts)
    assert not [line for line in result.trace if "is gone" in line]
    assert result.num_iterations == SCENARIO.num_iterations


def test_a_member_that_the_leader_can_not_reach_keeps_its_place() -> None:
    """Others ask it whether it lives, and pass on what is decided."""
    cuts = [("data0", "relay0"), ("relay0", "data0")]
    result = run_with_cuts(SCENARIO, cuts)
    assert not [line for line in result.trace if "is gone" in line]
    assert result.num_iterations == SCENARIO.num_iterations


def test_whoever_reaches_nobody_goes() -> None:
    cuts = [("relay0", name) for name in SCENARIO.host_names if name != "relay0"]
    result = run_with_cuts(SCENARIO, cuts)
    gone = [line for line in result.trace if "is gone" in line]
    assert len(gone) == 1
    assert "relay0 is gone" in gone[0]
    assert result.num_iterations == SCENARIO.num_iterations


def test_flows_leave_a_link_that_is_cut() -> None:
    """By way of another a microbatch takes two hops for one."""
    scenario = replace(SCENARIO, num_iterations=25)
    direct = {"relay0", "relay1"}
    result = run_with_cuts(scenario, [("relay0", "relay1"), ("relay1", "relay0")])
    assert result.num_iterations == scenario.num_iterations
    ends_s = [float(line.split()[0]) for line in result.trace if "is committed" in line]
    before_s, after_s = ends_s[4] - ends_s[3], ends_s[-1] - ends_s[-2]
    assert after_s < 1.5 * before_s, direct


# --- tensors that trickle ---------------------------------------------------------------------

CRAWL = replace(SCENARIO, num_iterations=12, duration_max_s=1600.0)


def crawling(scenario: Scenario, senders: tuple[str, ...], receivers: tuple[str, ...]) -> Result:
    """Returns what came of a run in which tensors travel at a byte a second on some links."""
    cut = Cut(senders, receivers, CUT_S, 1e6, both_ways=False, rate_bytes_per_s=1.0)
    return Simulation(replace(scenario, cuts=(cut,))).run()


@pytest.mark.parametrize("up", [True, False], ids=["from it", "to it"])
@pytest.mark.parametrize("num_relays", [4, 6])
def test_a_relay_whose_tensors_trickle_is_named_and_set_aside(num_relays: int, up: bool) -> None:
    """Everything else of it is normal: it answers whoever asks."""
    protocol = ProtocolConfig(min_nodes_per_stage=num_relays // 2)
    scenario = replace(CRAWL, num_relays=num_relays, protocol=protocol)
    others = tuple(name for name in scenario.host_names if name != "relay0")
    result = crawling(scenario, *((("relay0",), others) if up else (others, ("relay0",))))
    assert result.num_iterations == scenario.num_iterations
    aside = [line for line in result.trace if "is set aside for" in line]
    assert len(aside) == 1
    assert "relay0 is set aside for 60 s: tensors between it and" in aside[0]
    assert float(aside[0].split()[0]) < CUT_S + 150.0, "not eleven minutes"
    gone = [line for line in result.trace if "is gone" in line]
    assert len(gone) == 1


@pytest.mark.parametrize("ends", [("relay0", "relay1"), ("relay0", "relay2")], ids=str)
def test_one_link_on_which_tensors_trickle_costs_nobody_its_place(ends: tuple[str, str]) -> None:
    """Between stages, and within one."""
    result = crawling(CRAWL, ends[:1], ends[1:])
    assert result.num_iterations == CRAWL.num_iterations
    assert not [line for line in result.trace if "is gone" in line or "is set aside" in line]


def test_who_was_set_aside_comes_back_when_its_tensors_travel_again() -> None:
    others = tuple(name for name in CRAWL.host_names if name != "relay0")
    cut = Cut(("relay0",), others, CUT_S, 150.0, both_ways=False, rate_bytes_per_s=1.0)
    scenario = replace(CRAWL, cuts=(cut,), calm_s=CUT_S + 150.0, num_iterations=80)
    simulation = Simulation(scenario)
    result = simulation.run()
    assert result.num_iterations == scenario.num_iterations
    assert [line for line in result.trace if "relay0 is set aside" in line]
    assert simulation.hosts["relay0"].compute.iteration == scenario.num_iterations


def test_a_host_that_is_slow_for_long_is_not_cut_off() -> None:
    """Its COMPLETE is late again and again, but it is reached: it keeps its work."""
    profile = ComputeProfile()
    stages = {"d": 0, "a1": 1, "b1": 1, "a2": 2, "b2": 2}
    scenario = Scenario(
        batch=BatchConfig(num_data_nodes=1, num_microbatches=4),
        num_relays=4,
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
