"""A compute process that stands still while its node answers every ping."""

from dataclasses import replace
from functools import cache

import pytest

from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import seeded
from decod.sim.scenario import FaultKind, HostFault, Scenario, random_scenario
from decod.sim.simulation import Result, run_scenario

SCENARIO = Scenario(
    num_relays=4,
    stages=StagesConfig(num_relay_stages=2),
    batch=BatchConfig(num_data_nodes=2),
    num_iterations=4,
    capacity_min=4,
    capacity_max=6,
    protocol=ProtocolConfig(min_nodes_per_stage=2, min_data_nodes=2),
)
"""Two relays in each of two stages; timeouts are the defaults."""


@cache
def undisturbed() -> Result:
    return run_scenario(SCENARIO)


def hangs(name: str, at_s: float) -> HostFault:
    return HostFault(FaultKind.HANG, name, at_s=at_s)


def lines(result: Result, *texts: str) -> list[str]:
    return [line for line in result.trace if all(text in line for text in texts)]


@pytest.mark.parametrize(
    ("name", "at_s"),
    [
        pytest.param("relay1", 3.0, id="first passes"),
        pytest.param("relay0", 8.0, id="microbatches"),
        pytest.param("relay2", 9.9, id="reduction"),
    ],
)
def test_a_relay_that_hangs_is_done_without_before_the_iteration_is_given_up(
    name: str, at_s: float
) -> None:
    result = run_scenario(replace(SCENARIO, faults=(hangs(name, at_s),)))
    assert result.num_iterations == SCENARIO.num_iterations
    assert len(lines(result, f"{name} is gone: its compute process stands still")) == 1
    assert not lines(result, "is repeated")
    assert result.losses == undisturbed().losses
    # What the relay had done, and that one does the work of two from then on.
    assert result.duration_s - undisturbed().duration_s < 10.0 + 11.0


@pytest.mark.parametrize("seed", range(5))
def test_a_hang_at_any_event_costs_no_iteration(seed: int) -> None:
    """While it joins, builds, loads, trains, reduces; where iterations are given up early too."""
    scenario = random_scenario(seed, num_iterations=5)
    scenario = replace(scenario, protocol=replace(scenario.protocol, iteration_timeout_s=40.0))
    rng = seeded(seed, "hangs")
    name = f"relay{rng.randrange(scenario.num_relays)}"
    fault = HostFault(FaultKind.HANG, name, after_num_events=rng.randint(5, 400))
    result = run_scenario(replace(scenario, faults=(fault,)))
    assert result.lost_stage or result.num_iterations == 5


def test_a_leader_that_hangs_is_as_one_that_is_lost() -> None:
    result = run_scenario(replace(SCENARIO, calm_s=8.0, faults=(hangs("data0", 8.0),)))
    assert result.num_iterations == SCENARIO.num_iterations
    assert result.record.counts["leader.elected"] == 1


def test_a_slow_device_is_not_taken_for_one_that_hangs() -> None:
    relays = [f"relay{index}" for index in range(SCENARIO.num_relays)]
    faults = tuple(HostFault(FaultKind.SLOW, name, at_s=5.0, duration_s=60.0) for name in relays)
    result = run_scenario(replace(SCENARIO, faults=faults))
    assert result.num_iterations == SCENARIO.num_iterations
    assert not lines(result, "is gone")
