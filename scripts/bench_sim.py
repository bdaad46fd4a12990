"""Measure the simulator's speed and the core's quietness: `python scripts/bench_sim.py`.

    python scripts/bench_sim.py                one data node with 96 relays in 8 stages for 50
                                               iterations, in real time; then growing runs
    python scripts/bench_sim.py 24 96          runs with so many relays
    python scripts/bench_sim.py --search 24    ... that search for better flows
    python scripts/bench_sim.py --stage-size 12 96 384
                                               ... in as many stages of 12 as that makes
    python scripts/bench_sim.py --volunteers 1000
                                               so many volunteers come to a run within a minute

Without `--search` flows stay as they were built, since the search goes on for longer in larger
runs. Growing runs have a fixed degree, and one data node for every 24 relays so that each node has
the same work: what a node sends and computes must not grow with the run (I8), because each node
deals with a bounded number of others. Its control messages are of three kinds: what an iteration
needs; heartbeats, questions and utilisation queries, which go by time; and the search for better
flows, which goes by its own rounds, and takes more of them in a larger run before it becomes quiet.
The leader is shown beside the others: it answers for all.

Each first line ends with the longest step of any node, in milliseconds of processor time. A node's
event loop stands still for so long. Collections of garbage don't count, because this process holds
the garbage of all nodes. A run repeats itself exactly, so with `--repeats` the least time of each
step counts, which takes away the noise of a busy machine.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from decod.protocol.core.dispatch import KINDS
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event
from decod.protocol.core.messages.scopes import OfView
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import core_stopwatch
from decod.sim.meter import NodeCost
from decod.sim.scenario import Scenario, rush_scenario
from decod.sim.simulation import Result, Simulation

NUM_STAGES = 8
SIZES = (24, 96, 384, 1536)
NUM_ITERATIONS = 6
LARGE, FEW_ITERATIONS = 1000, 2
"""A run of so many relays has fewer iterations: it takes minutes."""
RELAYS_PER_DATA_NODE = 24
MICROBATCHES_PER_DATA_NODE = 8
NUM_PEERS_MAX = 3
"""Nodes of an adjacent stage with which a node deals: the same number at every size."""

BY_TIME = {"Heartbeat", "Ping", "Pong", "UtilisationQuery", "UtilisationAnswer"}
OF_SEARCH = {kind.__name__ for kind in KINDS if issubclass(kind, OfView)}


def scenario(
    num_relays: int,
    num_data_nodes: int,
    num_iterations: int,
    *,
    search: bool,
    num_stages: int = NUM_STAGES,
) -> Scenario:
    """Return a run whose nodes are all present from the start."""
    return Scenario(
        seed=1,
        batch=BatchConfig(
            num_data_nodes=num_data_nodes,
            num_microbatches=MICROBATCHES_PER_DATA_NODE * num_relays // 24 // num_data_nodes,
        ),
        num_relays=num_relays,
        stages=StagesConfig(num_relay_stages=num_stages),
        num_iterations=num_iterations,
        protocol=ProtocolConfig(
            min_nodes_per_stage=num_relays // num_stages,
            min_data_nodes=num_data_nodes,
            max_peers_per_stage=NUM_PEERS_MAX,
            routing="flow" if search else "greedy",
        ),
    )


@contextmanager
def timed_steps(stopwatch: Callable[[], float]) -> Iterator[list[float]]:
    """Yield the time of each step of any node, in seconds, as they come."""
    durations_s, step = list[float](), NodeMachine.step

    def timed(machine: NodeMachine, now_s: float, event: Event) -> list[Effect]:
        start_s = stopwatch()
        effects = step(machine, now_s, event)
        durations_s.append(stopwatch() - start_s)
        return effects

    NodeMachine.step = timed  # type: ignore[method-assign, assignment]
    try:
        yield durations_s
    finally:
        NodeMachine.step = step  # type: ignore[method-assign]


def play(planned: Scenario) -> tuple[Simulation, Result, float, list[float]]:
    """Run a scenario. Return it, its result, its real time, and the time of each step."""
    start_s = time.perf_counter()
    with core_stopwatch() as stopwatch, timed_steps(stopwatch) as steps_s:
        simulation = Simulation(planned, stopwatch=stopwatch)
        result = simulation.run()
    return simulation, result, time.perf_counter() - start_s, steps_s


def measure(planned: Scenario, *, num_repeats: int = 1) -> Result:
    """Run a scenario and print its lines."""
    played = [play(planned) for _ in range(num_repeats)]
    simulation, result, real_s, _ = played[-1]
    longest_s = max(min(step) for step in zip(*(steps_s for *_, steps_s in played), strict=True))
    iteration_s = result.duration_s / result.num_iterations
    kinds = dict(result.control_by_kind)
    by_time = sum(num for kind, num in kinds.items() if kind in BY_TIME)
    search = sum(num for kind, num in kinds.items() if kind in OF_SEARCH)
    rounds = iteration_s / ProtocolConfig().negotiation_interval_s
    costs = simulation.meter.costs
    leader = costs.pop(simulation.leader.name)
    print(
        f"{planned.num_relays:6}  {planned.batch.num_data_nodes:10}  {result.num_iterations:10}"
        f"  {real_s:6.1f}  {iteration_s:12.2f}  {sum(kinds.values()) - by_time - search:12.1f}"
        f"  {by_time / iteration_s:8.2f}  {search / rounds:7.1f}  {longest_s * 1e3:15.1f}\n"
        f"      {_shown(NodeCost.mean(list(costs.values())))}; {_shown(leader)}",
        flush=True,
    )
    return result


def _shown(cost: NodeCost) -> str:
    return (
        f"{cost.num_control:.0f}, {cost.control_bytes / 1000:.1f}, {cost.num_events:.0f},"
        f" {1000 * cost.core_s:.1f}"
    )


def rush(num_volunteers: int) -> None:
    """Let volunteers come to a run within a minute; print how its members become more."""
    planned = rush_scenario(
        num_volunteers, num_relay_stages=max(3, num_volunteers // 100), num_iterations=8
    )
    with core_stopwatch() as stopwatch:
        simulation = Simulation(planned, stopwatch=stopwatch)
        result = simulation.run()
    for now_s, num in simulation.meter.members:
        print(f"{now_s:7.1f} s: {num} members")
    leader = simulation.leader
    print(
        f"{result.record.counts['iteration.aborted']} iterations lost; the leader's core computed"
        f" for {leader.core_s:.1f} s, and it sent {leader.control_bytes_sent / 1e6:.1f} MB"
    )


def main() -> None:
    """Print one line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "relays, instead of the first run and 24, 96, 384 and 1536"
    parser.add_argument("sizes", type=int, nargs="*", help=help_text)
    parser.add_argument("--search", action="store_true", help="with the search for better flows")
    help_text = f"relays of a stage; without it every run has {NUM_STAGES} stages"
    parser.add_argument("--stage-size", type=int, help=help_text)
    parser.add_argument("--volunteers", type=int, help="only a run to which so many come at once")
    parser.add_argument("--repeats", type=int, default=1, help="how often each run is played")
    options = parser.parse_args()
    if options.volunteers is not None:
        rush(options.volunteers)
        return
    sizes, repeats = options.sizes, max(1, options.repeats)
    if any(size < (options.stage_size or NUM_STAGES) for size in sizes):
        parser.error("each stage needs a relay")
    print(
        "relays  data nodes  iterations  real s  virtual s/it"
        "  an iteration  a second  a round  longest step ms   (control messages per node:"
        " an iteration's own, those that go by time, and the search's)\n"
        "      per node and iteration: messages, kB, events, ms of its core; the leader's"
    )
    if not sizes:
        measure(scenario(96, 1, 50, search=True), num_repeats=repeats)
    results = []
    for size in sizes or SIZES:
        planned = scenario(
            size,
            max(1, size // RELAYS_PER_DATA_NODE),
            FEW_ITERATIONS if size >= LARGE else NUM_ITERATIONS,
            search=options.search,
            num_stages=size // options.stage_size if options.stage_size else NUM_STAGES,
        )
        results.append(measure(planned, num_repeats=repeats))
    print("of each kind, per node and iteration:")
    for result in results:
        print("  " + "  ".join(f"{kind} {num:.1f}" for kind, num in result.control_by_kind[:10]))


if __name__ == "__main__":
    main()
