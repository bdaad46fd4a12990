"""Measure the simulator's speed and the core's quietness: `python scripts/bench_sim.py`.

    python scripts/bench_sim.py                one data node with 96 relays in 8 stages for 50
                                               iterations, in real time; then growing runs
    python scripts/bench_sim.py 24 96          runs with so many relays
    python scripts/bench_sim.py --volunteers 1000
                                               so many volunteers come to a run within a minute

Growing runs have a fixed degree, and one data node for every 24 relays so that each node has the
same work: what a node sends and computes must not grow with the run (I8), because each node deals
with a bounded number of others. Its control messages are of three kinds: what an iteration needs;
heartbeats, questions and utilisation queries, which go by time; and the search for better flows,
which goes by its own rounds, and takes more of them in a larger run before it becomes quiet. The
leader is shown beside the others: it answers for all.
"""

import argparse
import time

from decod.protocol.core.dispatch import KINDS
from decod.protocol.core.messages.scopes import OfView
from decod.protocol.core.params import ProtocolConfig
from decod.sim.meter import NodeCost
from decod.sim.scenario import Scenario
from decod.sim.simulation import Result, Simulation

NUM_STAGES = 8
SIZES = (24, 96, 384, 1536)
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


def measure(num_relays: int, num_data_nodes: int, num_iterations: int) -> Result:
    """Run a scenario and print its line."""
    start_s = time.perf_counter()
    planned = scenario(num_relays, num_data_nodes, num_iterations)
    simulation = Simulation(planned, stopwatch=time.process_time)
    result = simulation.run()
    real_s = time.perf_counter() - start_s
    iteration_s = result.duration_s / result.num_iterations
    kinds = dict(result.control_by_kind)
    by_time = sum(num for kind, num in kinds.items() if kind in BY_TIME)
    search = sum(num for kind, num in kinds.items() if kind in OF_SEARCH)
    rounds = iteration_s / ProtocolConfig().negotiation_interval_s
    costs = simulation.meter.costs
    leader = costs.pop(simulation.leader.name)
    print(
        f"{num_relays:6}  {num_data_nodes:10}  {result.num_iterations:10}  {real_s:6.1f}"
        f"  {iteration_s:12.2f}  {sum(kinds.values()) - by_time - search:12.1f}"
        f"  {by_time / iteration_s:8.2f}  {search / rounds:7.1f}"
        f"  {_shown(NodeCost.mean(list(costs.values())))}  {_shown(leader)}",
        flush=True,
    )
    return result


def _shown(cost: NodeCost) -> str:
    return f"{cost.num_control:8.0f} {cost.control_bytes / 1000:6.1f} {1000 * cost.core_s:7.1f}"


def main() -> None:
    """Print one line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "relays, instead of the first run and 24, 96 and 384"
    parser.add_argument("sizes", type=int, nargs="*", help=help_text)
    sizes = parser.parse_args().sizes
    if any(size < NUM_STAGES for size in sizes):
        parser.error(f"each of {NUM_STAGES} stages needs a relay")
    print(
        "relays  data nodes  iterations  real s  virtual s/it"
        "  an iteration  a second  a round   (control messages per node:"
        " an iteration's own, those that go by time, and the search's)"
    )
    if not sizes:
        measure(96, 1, 50)
    results = [measure(size, max(1, size // RELAYS_PER_DATA_NODE), 6) for size in (sizes or SIZES)]
    print("of each kind, per node and iteration:")
    for result in results:
        print("  " + "  ".join(f"{kind} {num:.1f}" for kind, num in result.control_by_kind[:10]))


if __name__ == "__main__":
    main()
