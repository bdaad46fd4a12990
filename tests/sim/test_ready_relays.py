"""Data nodes don't wait for CAN TAKE after an iteration that has not averaged."""

import re
from dataclasses import replace

from decod.run.protocol_config import ProtocolConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Scenario, sync_of
from decod.sim.simulation import Simulation

ONE_WAY_S = 0.5

SCENARIO = Scenario(
    seed=1,
    num_relays=2,
    capacity_min=4,
    capacity_max=4,
    batch=BatchConfig(num_microbatches=2),
    num_iterations=6,
    sync=sync_of(3),
    speed_spread_ratio=0.0,
    profile=ComputeProfile(jitter_ratio=0.0),
    links=Links(default=LinkSpec(latency_s=ONE_WAY_S, bandwidth_bytes_per_s=1e9)),
    protocol=ProtocolConfig(heartbeat_timeout_s=30.0, routing="greedy"),
)


def durations(scenario: Scenario) -> list[float]:
    """Return the duration of each iteration."""
    found = (
        re.search(r"is committed.*duration_s=([0-9.]+)", x)
        for x in Simulation(scenario).run().trace
    )
    return [float(match[1]) for match in found if match]


def test_an_iteration_between_averages_saves_a_way_through_all_stages() -> None:
    """Iteration 4 follows an average, and waits. 5 does not: its opening travels meanwhile."""
    _, _, _, fourth, fifth, _ = durations(SCENARIO)
    assert fourth - fifth > 2 * ONE_WAY_S


def test_every_iteration_waits_when_each_averages() -> None:
    _, _, _, fourth, fifth, _ = durations(replace(SCENARIO, sync=sync_of(1)))
    assert abs(fourth - fifth) < 0.1 * ONE_WAY_S
