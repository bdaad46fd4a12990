"""A relay that was slow for a while, and has no work for that, gets work when it is fast again."""

from dataclasses import replace

import pytest

from decod.run.protocol_config import ProtocolConfig
from decod.run.training_config import BatchConfig
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation

BEGIN_S = 10.0
SLOW_S = 30.0
FAST_AT_S = BEGIN_S + SLOW_S

SCENARIO = Scenario(
    seed=5,
    num_relays=6,
    num_iterations=45,
    batch=BatchConfig(num_microbatches=4),
    speed_spread_ratio=0.0,
    duration_max_s=3000.0,
    protocol=ProtocolConfig(min_nodes_per_stage=3),
    faults=(HostFault(FaultKind.SLOW, "relay0", at_s=BEGIN_S, duration_s=SLOW_S),),
)


@pytest.mark.parametrize("seed", range(2))
def test_a_relay_that_is_fast_again_has_work_within_ten_iterations(seed: int) -> None:
    simulation = Simulation(replace(SCENARIO, seed=seed))
    relay, passes = simulation.hosts["relay0"], list[tuple[float, int, int]]()

    def look() -> None:
        iteration = simulation.checker.num_iterations
        passes.append((simulation.kernel.now_s, iteration, relay.device.num_microbatch_jobs))
        simulation.kernel.after(0.5, look)

    simulation.kernel.at(0.0, look)
    assert simulation.run().num_iterations == SCENARIO.num_iterations
    slow = [(i, num) for at_s, i, num in passes if FAST_AT_S - 10.0 <= at_s < FAST_AT_S]
    fast = [(i, num) for at_s, i, num in passes if at_s >= FAST_AT_S]
    idle = slow[-1][1] - slow[0][1]
    first = next(i for i, num in fast if num > fast[0][1])
    print(f"{idle} passes in the last ten slow seconds; work after {first - fast[0][0]} iterations")
    assert first - fast[0][0] <= 10
