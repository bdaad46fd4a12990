"""One run on hosts with unequal links: the links that its flows use, and its iterations' lengths.

Links are so slow, compared with the model's compute time, that they decide the length of an
iteration. An activation of 512 KiB takes 0.05 s over the fastest link and 0.8 s over the slowest.
Two relays of each stage begin. The third of each joins when links have been measured. It brings a
new view, in which every way of routing builds its flows anew, from costs that it has measured.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from decod.ids import NodeId
from decod.lab.planner.greedy_routes import greedy_routes
from decod.lab.planner.optimal import optimal_routes
from decod.planner.cost import Link, link_cost_s
from decod.planner.deciding import shortened
from decod.planner.graph import FlowGraph, GraphNode, Route
from decod.protocol.flows.registry import ROUTINGS
from decod.protocol.flows.searching import SearchingRouting
from decod.run.model_config import ModelConfig
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from tests.support.cluster import START_TIMEOUT_S, Cluster, Daemon, stage_nodes
from tests.support.network import Network, Pair

NUM_STAGES = 2
RELAYS_PER_STAGE = 3
RELAY_CAPACITY = 4
NUM_MICROBATCHES = 8
"""Microbatches in an iteration. The data node has as many slots. Stages have 1.5 times as many."""

RATE_MIN_MBIT_PER_S = 5.0
RATE_MAX_MBIT_PER_S = 80.0

LEADER = "leader"
STAGES = [
    [f"relay-{stage}-{index}" for index in range(RELAYS_PER_STAGE)]
    for stage in range(1, NUM_STAGES + 1)
]
HOSTS = [LEADER, *itertools.chain(*STAGES)]

ITERATION_TIMEOUT_S = 60.0
"""Ten times the length of an iteration over the slowest links."""

MODEL = ModelConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=NUM_STAGES,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
BATCH = BatchConfig(sequence_length=256, microbatch_size=8, num_microbatches=NUM_MICROBATCHES)
ACTIVATION_BYTES = BATCH.tokens_per_microbatch * MODEL.hidden_size * MODEL.dtype.num_bytes

STAYING_RATIO_MIN = 1.25
"""Least ratio of the cost of staying on a link to that of leaving it, if flows ought to leave."""

PASSES_S = (0.02, 0.05, 0.1)
"""Times of a pass on hosts like these, quiet or loaded."""

SLOWING = 10.0
"""Divisor of a slowed link's rate."""

_NUM_MEASURING = 2
"""Iterations with the first relays before the others join."""

_NUM_REBUILT = 3
"""Iterations in the last view before anything is examined."""

_NUM_SETTLED = 2
"""Settlements in the last view. The first may fall in the middle of the search."""

_NUM_SETTLED_ITERATIONS_MAX = 25

_NUM_TIMED = 5
"""Number of iterations for the median."""

Hop = tuple[str, str]
"""A link in the direction of the forward pass, by its hosts' names."""


def make_run(routing: str) -> RunConfig:
    """Return the run, which has no end. Only the way of finding flows differs."""
    return RunConfig(
        name="routing",
        seed=7,
        model=MODEL,
        stages=StagesConfig(num_relay_stages=NUM_STAGES),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=1e-3, warmup_iterations=3),
        # Seven nodes share the processors, so a late node need not be dead.
        protocol=ProtocolConfig(
            routing=routing,
            heartbeat_timeout_s=15.0,
            probe_timeout_s=10.0,
            min_nodes_per_stage=RELAYS_PER_STAGE - 1,
        ),
    )


def hops() -> list[Hop]:
    """Return all links that a flow can take."""
    stages = [[LEADER], *STAGES, [LEADER]]
    return [
        hop for here, there in itertools.pairwise(stages) for hop in itertools.product(here, there)
    ]


def draw_rates(seed: int) -> dict[Pair, float]:
    """Return the rate of every link in Mbit/s. Rates between stages are drawn, equal both ways."""
    rng = random.Random(seed)
    low, high = math.log(RATE_MIN_MBIT_PER_S), math.log(RATE_MAX_MBIT_PER_S)
    rates = dict.fromkeys(itertools.permutations(HOSTS, 2), RATE_MAX_MBIT_PER_S)
    for begin, end in hops():
        rates[begin, end] = rates[end, begin] = math.exp(rng.uniform(low, high))
    return rates


def transfer_s(rates: Mapping[Pair, float], hop: Hop) -> float:
    """Return d(i, j) of a link as laid out, by equation (1), without the compute times.

    Compute times are equal on every path, because all hosts are this machine.
    """
    forth, back = (Link(0.0, rates[pair] * 1e6 / 8) for pair in (hop, hop[::-1]))
    return link_cost_s(
        compute_here_s=0.0,
        compute_there_s=0.0,
        forth=forth,
        back=back,
        size_bytes=ACTIVATION_BYTES,
    )


def flow_graph(rates: Mapping[Pair, float]) -> FlowGraph:
    """Return the routing problem as laid out."""
    nodes = {NodeId(LEADER): GraphNode(NodeId(LEADER), 0, NUM_MICROBATCHES)}
    for index, names in enumerate(STAGES):
        for name in map(NodeId, names):
            nodes[name] = GraphNode(name, index + 1, RELAY_CAPACITY)
    costs = {(NodeId(a), NodeId(b)): transfer_s(rates, (a, b)) for a, b in hops()}
    return FlowGraph(NUM_STAGES, nodes, costs)


def mean_cost_s(graph: FlowGraph, routes: list[Route]) -> float:
    """Return the mean cost of a flow."""
    return sum(graph.path_cost(route.path) for route in routes) / len(routes)


def optimum_s(rates: Mapping[Pair, float]) -> float:
    """Return the least mean cost of any routing."""
    graph = flow_graph(rates)
    return mean_cost_s(graph, optimal_routes(graph))


def greedy_s(rates: Mapping[Pair, float]) -> float:
    """Return the mean cost of a greedy routing that knows all costs."""
    graph = flow_graph(rates)
    return mean_cost_s(graph, greedy_routes(graph, random.Random(0), closest_only=True))


def slowed(rates: Mapping[Pair, float], hop: Hop, factor: float) -> dict[Pair, float]:
    """Return the rates after dividing those of one link, both ways."""
    return {**rates, **{pair: rates[pair] / factor for pair in (hop, hop[::-1])}}


def mean_transfer_s(rates: Mapping[Pair, float], used: Mapping[Hop, int]) -> float:
    """Return the mean cost of a flow, given the number of flows on each link."""
    num_flows = sum(num for (begin, _), num in used.items() if begin == LEADER)
    return sum(num * transfer_s(rates, hop) for hop, num in used.items()) / num_flows


def shortest_iteration(
    rates: Mapping[Pair, float], routes: list[Route], pass_s: float
) -> list[Route]:
    """Return the routes that a node with full knowledge of the links makes of the cheapest ones.

    Args:
        rates: Rates of the links as laid out.
        routes: The cheapest routes.
        pass_s: Time of one pass at every node.
    """
    return shortened(
        routes,
        {(NodeId(a), NodeId(b)): transfer_s(rates, (a, b)) for a, b in hops()},
        compute_s={NodeId(name): pass_s for name in HOSTS},
        rooms=[{NodeId(name): RELAY_CAPACITY for name in names} for names in STAGES],
        numbers={NodeId(LEADER): NUM_MICROBATCHES},
        work_max=150_000,
    )


def link_to_slow(rates: Mapping[Pair, float], used: Mapping[Hop, int], factor: float) -> Hop:
    """Return the fastest link in use that flows should leave when its rate is divided.

    Flows should leave a link if neither the optimum nor the shortest iteration then uses it, for
    any time of a pass here. Staying must also cost at least a quarter more. This compares mean
    costs of flows, because there may be fewer flows than microbatches (`planner.deciding`). The
    fastest such link is chosen so that five iterations are soon over.
    """
    found: list[tuple[float, Hop]] = []
    for hop in used:
        cut = slowed(rates, hop, factor)
        graph = flow_graph(cut)
        routes = optimal_routes(graph)
        iterations = [
            route for pass_s in PASSES_S for route in shortest_iteration(cut, routes, pass_s)
        ]
        staying_s = mean_transfer_s(cut, used)
        kept = {link for route in (*routes, *iterations) for link in itertools.pairwise(route.path)}
        left = (NodeId(hop[0]), NodeId(hop[1])) not in kept
        if left and staying_s >= STAYING_RATIO_MIN * mean_cost_s(graph, routes):
            found.append((rates[hop], hop))
    assert found, f"every link of {used} is worth keeping at a part of its rate"
    return max(found)[1]


@dataclass(frozen=True, slots=True)
class Measured:
    """Quality of the flows in use."""

    cost_s: float
    """Mean cost of a flow, by the links as laid out."""
    iteration_s: float
    """Median over the last iterations."""


@dataclass(slots=True)
class Trial:
    """A run that trains on a network, and its observable state."""

    cluster: Cluster
    network: Network

    def start(self) -> None:
        """Start all, and wait until the last relays have joined and their flows have been built."""
        cluster = self.cluster
        cluster.start_leader("--capacity", str(NUM_MICROBATCHES), name=LEADER)
        self._start_relays(slice(None, -1))
        timeout_s = START_TIMEOUT_S + ITERATION_TIMEOUT_S * _NUM_MEASURING
        cluster.wait_for_iteration(_NUM_MEASURING, timeout_s=timeout_s)
        self._start_relays(slice(-1, None))
        for names in STAGES:
            newcomer = self._daemon(names[-1])
            cluster.wait_for(newcomer.is_ready, f"{newcomer.name} to train")
        self.next_iterations(_NUM_REBUILT)

    def settle(self) -> None:
        """Wait until the search has found something."""
        wanted = len(self.settled()) + _NUM_SETTLED
        for _ in range(_NUM_SETTLED_ITERATIONS_MAX):
            if len(self.settled()) >= wanted:
                return
            self.next_iterations(1)
        raise AssertionError(f"settlements in use: {self.settled()}\n{self.cluster.tails()}")

    def measure(self) -> "Measured":
        """Train some more iterations. Return their length, and the cost of flows at their end."""
        self.next_iterations(_NUM_TIMED)
        durations_s = list(self.iteration_durations_s().values())[-_NUM_TIMED:]
        return Measured(self.mean_cost_s(), median(durations_s))

    def _start_relays(self, which: slice) -> None:
        for index, names in enumerate(STAGES):
            for name in names[which]:
                options = ("--stage", str(index + 1), "--capacity", str(RELAY_CAPACITY))
                self.cluster.start_relay(name, *options)

    def _daemon(self, name: str) -> Daemon:
        return next(daemon for daemon in self.cluster.daemons if daemon.name == name)

    @property
    def leader(self) -> Daemon:
        return self.cluster.leader

    def next_iterations(self, num: int) -> None:
        """Wait for some more iterations."""
        last = self.leader.iteration + num
        self.cluster.wait_for_iteration(last, timeout_s=ITERATION_TIMEOUT_S * num)

    def iteration_durations_s(self) -> dict[int, float]:
        """Return the length of each committed iteration."""
        records = self.leader.events("iteration.committed")
        return {
            int(r["iteration"].partition(".")[0]): r["duration_s"]
            for r in records
            if "duration_s" in r
        }

    def hops_in_use(self) -> Counter[Hop]:
        """Return the number of flows on each link, according to the relays."""
        names = {node["id"]: node["name"] for node in stage_nodes(self.leader.status())}
        used = {
            (flow["slot"], hop)
            for daemon in self.cluster.daemons[1:]
            for flow in daemon.status()["flows"]
            for hop in itertools.pairwise(names[node] for node in flow["path"])
        }
        return Counter(hop for _, hop in used)

    def mean_cost_s(self) -> float:
        """Return the mean cost of a flow in use, by the present links."""
        return mean_transfer_s(self.network.rates, self.hops_in_use())

    def settled(self) -> list[int]:
        """Return the epochs of the settlements that were adopted."""
        return [record["epoch"] for record in self.leader.events("flows.settled")]

    def set_rates(self, rates: Mapping[Pair, float]) -> None:
        """Give links new rates from now on."""
        for pair, rate in rates.items():
            if rate != self.network.rates[pair]:
                self.network.set_rate(*pair, rate)

    def iterations_until_left(self, hop: Hop, *, num_max: int) -> int | None:
        """Return the number of iterations until no flow uses a link. None: more than `num_max`."""
        for num in range(1, num_max + 1):
            self.next_iterations(1)
            if not self.hops_in_use()[hop]:
                return num
        return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of both ways of routing on the same network."""

    by_routing: Mapping[str, Measured]
    """For each of the routings that were compared."""
    slowed: Hop
    """The link that was slowed under the flows of `flow`."""
    left_after: int | None
    """Iterations until none used it, including the one in which it became slow. None: never."""


def compare(
    folder: Path,
    corpus: Path,
    rates: Mapping[Pair, float],
    *,
    num_max: int,
    routings: Sequence[str] = ("greedy", "flow"),
) -> Comparison:
    """Run the same with one routing after the other; under `flow`, slow a link down at the end.

    Args:
        folder: An existing folder with a short path, for the daemons' folders.
        corpus: Folder of prepared data.
        rates: The network.
        num_max: Number of iterations after which a link counts as never left.
        routings: Names of routings, `flow` among them.
    """
    found: dict[str, Measured] = {}
    hop: Hop | None = None
    left_after: int | None = None
    for routing in routings:
        with (
            Network(HOSTS, rates) as network,
            Cluster(folder / routing, make_run(routing), corpus, network) as cluster,
        ):
            trial = Trial(cluster, network)
            trial.start()
            if issubclass(ROUTINGS[routing], SearchingRouting):
                trial.settle()
            found[routing] = trial.measure()
            if routing == "flow":
                hop = link_to_slow(rates, trial.hops_in_use(), SLOWING)
                trial.set_rates(slowed(rates, hop, SLOWING))
                left_after = trial.iterations_until_left(hop, num_max=num_max)
    assert hop is not None
    return Comparison(found, hop, left_after)
