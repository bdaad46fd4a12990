"""Measure the simulator's speed and the core's quietness: `python scripts/bench_sim.py`.

First one data node with 96 relays in 8 stages for 50 iterations, in real time. Then runs of growing
size at fixed degree, with one data node for every 24 relays so that each node has the same work:
control messages must not grow with the run (I8), because each node deals with a bounded number of
others. They are of three kinds: what an iteration needs; heartbeats, questions and utilisation
queries, which go by time; and the search for better flows, which goes by its own rounds, and takes
more of them in a larger run before it becomes quiet.

Each line ends with the longest step of any node, in milliseconds of processor time. A node's event
loop stands still for so long. Collections of garbage don't count, because this process holds the
garbage of all nodes. A run repeats itself exactly, so with `--repeats` the least time of each step
counts, which takes away the noise of a busy machine.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from decod.protocol.core.dispatch import KINDS
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event
from decod.protocol.core.messages.scopes import OfView
from decod.protocol.core.params import ProtocolConfig
from decod.protocol.node import NodeMachine
from decod.sim.scenario import Scenario
from decod.sim.simulation import Result, run_scenario

NUM_STAGES = 8
SIZES = (24, 96, 384)
RELAYS_PER_DATA_NODE = 24
MICROBATCHES_PER_DATA_NODE = 8
NUM_PEERS_MAX = 3
"""Nodes of an adjacent stage with which a node deals: the same number at every size."""

BY_TIME = {"Heartbeat", "Ping", "Pong", "UtilisationQuery", "UtilisationAnswer"}
OF_SEARCH = {kind.__name__ for kind in KINDS if issubclass(kind, OfView)}


def scenario(num_relays: int, num_data_nodes: int, num_iterations: int) -> Scenario:
    """Return a run whose nodes are all present from the start."""
    return Scenario(
        seed=1,
        num_data_nodes=num_data_nodes,
        num_relays=num_relays,
        num_relay_stages=NUM_STAGES,
        num_microbatches=MICROBATCHES_PER_DATA_NODE * num_relays // 24 // num_data_nodes,
        num_iterations=num_iterations,
        protocol=ProtocolConfig(
            min_nodes_per_stage=num_relays // NUM_STAGES,
            min_data_nodes=num_data_nodes,
            max_peers_per_stage=NUM_PEERS_MAX,
        ),
    )


@contextmanager
def timed_steps() -> Iterator[list[float]]:
    """Yield the processor time of each step of any node, in seconds, as they come."""
    durations_s, step = list[float](), NodeMachine.step
    collecting_s = [0.0]

    def collected(phase: str, _: dict[str, int]) -> None:
        collecting_s[0] += time.thread_time() if phase == "stop" else -time.thread_time()

    def timed(machine: NodeMachine, now_s: float, event: Event) -> list[Effect]:
        start_s = time.thread_time() - collecting_s[0]
        effects = step(machine, now_s, event)
        durations_s.append(time.thread_time() - collecting_s[0] - start_s)
        return effects

    gc.callbacks.append(collected)
    NodeMachine.step = timed  # type: ignore[method-assign]
    try:
        yield durations_s
    finally:
        NodeMachine.step = step  # type: ignore[method-assign]
        gc.callbacks.remove(collected)


def measure(
    num_relays: int, num_data_nodes: int, num_iterations: int, *, num_repeats: int
) -> Result:
    """Run a scenario and print its line."""
    steps_s: list[list[float]] = []
    for _ in range(num_repeats):
        start_s = time.perf_counter()
        with timed_steps() as durations_s:
            result = run_scenario(scenario(num_relays, num_data_nodes, num_iterations))
        real_s = time.perf_counter() - start_s
        steps_s.append(durations_s)
    longest_s = max(map(min, *steps_s)) if num_repeats > 1 else max(steps_s[0])
    iteration_s = result.duration_s / result.num_iterations
    kinds = dict(result.control_by_kind)
    by_time = sum(num for kind, num in kinds.items() if kind in BY_TIME)
    search = sum(num for kind, num in kinds.items() if kind in OF_SEARCH)
    rounds = iteration_s / ProtocolConfig().negotiation_interval_s
    print(
        f"{num_relays:6}  {num_data_nodes:10}  {result.num_iterations:10}  {real_s:6.1f}"
        f"  {iteration_s:12.2f}  {sum(kinds.values()) - by_time - search:12.1f}"
        f"  {by_time / iteration_s:8.2f}  {search / rounds:7.1f}  {longest_s * 1e3:15.1f}",
        flush=True,
    )
    return result


def main() -> None:
    """Print one line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "relays, instead of the first run and 24, 96 and 384"
    parser.add_argument("sizes", type=int, nargs="*", help=help_text)
    parser.add_argument("--repeats", type=int, default=1, help="how often each run is played")
    options = parser.parse_args()
    sizes, repeats = options.sizes, max(1, options.repeats)
    if any(size < NUM_STAGES for size in sizes):
        parser.error(f"each of {NUM_STAGES} stages needs a relay")
    print(
        "relays  data nodes  iterations  real s  virtual s/it"
        "  an iteration  a second  a round  longest step ms   (control messages per node:"
        " an iteration's own, those that go by time, and the search's)"
    )
    if not sizes:
        measure(96, 1, 50, num_repeats=repeats)
    results = [
        measure(size, max(1, size // RELAYS_PER_DATA_NODE), 6, num_repeats=repeats)
        for size in (sizes or SIZES)
    ]
    print("of each kind, per node and iteration:")
    for result in results:
        print("  " + "  ".join(f"{kind} {num:.1f}" for kind, num in result.control_by_kind[:10]))


if __name__ == "__main__":
    main()
