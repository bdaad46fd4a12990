"""Measure the simulator and the core's quietness: `python scripts/bench_sim.py [NUM_RELAYS ...]`.

Prints, for runs of growing size on the same pipeline, the real time and the control messages per
node and iteration. The latter must not grow with the run (I8), because each node deals with a
bounded number of others.
"""

import sys
import time

from decod.protocol.params import ProtocolConfig
from decod.sim.scenario import Scenario
from decod.sim.simulation import run_scenario

NUM_STAGES = 8
SIZES = (24, 96, 384)
NUM_ITERATIONS = 50
"""Of runs up to 96 relays; larger ones do 3, which is enough to count messages."""
MICROBATCHES_PER_RELAY = 3
"""Of its stage: the capacity is 2 to 4, so most flows are in use."""


def scenario(num_relays: int, *, num_iterations: int) -> Scenario:
    """Return a run of one data node and so many relays, most there from the start."""
    num_per_stage = num_relays // NUM_STAGES
    return Scenario(
        seed=1,
        num_relays=num_relays,
        num_relay_stages=NUM_STAGES,
        num_microbatches=MICROBATCHES_PER_RELAY * num_per_stage,
        num_iterations=num_iterations,
        # Stages are filled by capacity, not by heads: none can count on its exact share.
        protocol=ProtocolConfig(min_nodes_per_stage=num_per_stage * 2 // 3),
    )


def main(arguments: list[str]) -> None:
    """Print one line for each size."""
    sizes = [int(word) for word in arguments] or list(SIZES)
    print("relays  iterations  real_s  virtual_s  events  us/event  control (mean, max)")
    for num_relays in sizes:
        num_iterations = NUM_ITERATIONS if num_relays <= 96 else 3
        start_s = time.perf_counter()
        result = run_scenario(scenario(num_relays, num_iterations=num_iterations))
        real_s = time.perf_counter() - start_s
        print(
            f"{num_relays:6}  {result.num_iterations:10}  {real_s:6.1f}  {result.duration_s:9.1f}"
            f"  {result.num_events:6}  {1e6 * real_s / result.num_events:8.1f}"
            f"  {result.num_control_mean:.1f}, {result.num_control_max}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
