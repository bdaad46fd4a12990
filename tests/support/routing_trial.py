"""One run on hosts with unequal links: which links its flows use, and how long iterations take.

Links are so slow beside the model's compute time that they decide how long an iteration takes: an
activation of 256 KiB takes 26 ms over the fastest link and 0.4 s over the slowest. Two relays of
each stage begin; the third of each joins when links have been measured. With it comes a new view,
in which every way of routing builds its flows anew, from costs that it has measured.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from decod.config.schema import RunConfig
from decod.data.params import BatchConfig
from decod.ids import NodeId
from decod.model.config import ModelConfig, StagesConfig
from decod.planner.cost import Link, link_cost_s
from decod.planner.graph import FlowGraph, GraphNode, Route
from decod.protocol.params import ProtocolConfig, Routing
from decod.train.params import OptimizerConfig
from tests.support.cluster import Cluster, Daemon, stage_nodes
from tests.support.network import Network, Pair

NUM_STAGES = 2
RELAYS_PER_STAGE = 3
RELAY_CAPACITY = 4
NUM_MICROBATCHES = 8
"""Of an iteration; the data node has as many slots. Stages have half as much room again."""

RATE_MIN_MBIT_PER_S = 5.0
RATE_MAX_MBIT_PER_S = 80.0

LEADER = "leader"
STAGES = [
    [f"relay-{stage}-{index}" for index in range(RELAYS_PER_STAGE)]
    for stage in range(1, NUM_STAGES + 1)
]
HOSTS = [LEADER, *itertools.chain(*STAGES)]

ITERATION_TIMEOUT_S = 60.0
"""Ten times what an iteration over the slowest links takes."""

MODEL = ModelConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=NUM_STAGES,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
BATCH = BatchConfig(sequence_length=256, microbatch_size=4, num_microbatches=NUM_MICROBATCHES)
ACTIVATION_BYTES = BATCH.tokens_per_microbatch * MODEL.hidden_size * MODEL.dtype.num_bytes

Hop = tuple[str, str]
"""A link in the direction of the forward pass, by its hosts' names."""


def make_run(routing: Routing) -> RunConfig:
    """Returns the run, the same but for how flows are found; it has no end."""
    return RunConfig(
        name="routing",
        seed=7,
        model=MODEL,
        stages=StagesConfig(num_relay_stages=NUM_STAGES),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=1e-3, warmup_iterations=3),
        # Seven nodes share the processors: what is late need not be dead.
        protocol=ProtocolConfig(
            routing=routing,
            heartbeat_timeout_s=15.0,
            probe_timeout_s=10.0,
            min_nodes_per_stage=RELAYS_PER_STAGE - 1,
        ),
    )


def hops() -> list[Hop]:
    """Returns all links that a flow can take."""
    stages = [[LEADER], *STAGES, [LEADER]]
    return [
        hop for here, there in itertools.pairwise(stages) for hop in itertools.product(here, there)
    ]


def draw_rates(seed: int) -> dict[Pair, float]:
    """Returns the rate of every link in Mbit/s; those between stages are drawn, both ways alike."""
    rng = random.Random(seed)
    low, high = math.log(RATE_MIN_MBIT_PER_S), math.log(RATE_MAX_MBIT_PER_S)
    rates = dict.fromkeys(itertools.permutations(HOSTS, 2), RATE_MAX_MBIT_PER_S)
    for begin, end in hops():
        rates[begin, end] = rates[end, begin] = math.exp(rng.uniform(low, high))
    return rates


def transfer_s(rates: Mapping[Pair, float], hop: Hop) -> float:
    """Returns d(i, j) of a link by equation (1) as it is laid out, without the compute times.

    These are the same on every path: all hosts are this machine.
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
    """Returns the routing problem as it is laid out."""
    nodes = {NodeId(LEADER): GraphNode(NodeId(LEADER), 0, NUM_MICROBATCHES)}
    for index, names in enumerate(STAGES):
        for name in map(NodeId, names):
            nodes[name] = GraphNode(name, index + 1, RELAY_CAPACITY)
    costs = {(NodeId(a), NodeId(b)): transfer_s(rates, (a, b)) for a, b in hops()}
    return FlowGraph(NUM_STAGES, nodes, costs)


def mean_cost_s(graph: FlowGraph, routes: list[Route]) -> float:
    """Returns what a flow costs on average."""
    return sum(graph.path_cost(route.path) for route in routes) / len(routes)


@dataclass(slots=True)
class Trial:
    """A run that trains on a network, and what can be seen of it."""

    cluster: Cluster
    network: Network

    def start(self, *, num_measuring: int) -> None:
        """Start all; returns when the last relays have joined.

        Args:
            num_measuring: Iterations that the first relays train before the others come.
        """
        cluster = self.cluster
        cluster.start_leader("--capacity", str(NUM_MICROBATCHES), name=LEADER)
        self._start_relays(slice(None, -1))
        cluster.wait_for_iteration(num_measuring, timeout_s=ITERATION_TIMEOUT_S * num_measuring)
        self._start_relays(slice(-1, None))
        for names in STAGES:
            newcomer = self._daemon(names[-1])
            cluster.wait_for(newcomer.is_ready, f"{newcomer.name} to train")

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
        """Wait for some iterations more."""
        last = self.leader.iteration + num
        self.cluster.wait_for_iteration(last, timeout_s=ITERATION_TIMEOUT_S * num)

    def iteration_durations_s(self) -> dict[int, float]:
        """Returns how long each committed iteration took."""
        records = self.leader.events("iteration.committed")
        return {int(r["round"].partition(".")[0]): r["duration_s"] for r in records}

    def hops_in_use(self) -> dict[Hop, int]:
        """Returns how many flows each link carries, as the relays say."""
        names = {node["id"]: node["name"] for node in stage_nodes(self.leader.status())}
        used = {
            (flow["slot"], hop)
            for daemon in self.cluster.daemons[1:]
            for flow in daemon.status()["flows"]
            for hop in itertools.pairwise(names[node] for node in flow["path"])
        }
        return Counter(hop for _, hop in used)

    def mean_cost_s(self) -> float:
        """Returns what a flow in use costs on average, by the links as they are now."""
        used = self.hops_in_use()
        num_flows = sum(num for (begin, _), num in used.items() if begin == LEADER)
        total_s = sum(num * transfer_s(self.network.rates, hop) for hop, num in used.items())
        return total_s / num_flows

    def settled(self) -> list[int]:
        """Returns the epochs of the settlements that were taken up."""
        return [record["epoch"] for record in self.leader.events("flows.settled")]

    def slow_down(self, hop: Hop, factor: float) -> None:
        """Divide the rate of a link, both ways."""
        for pair in (hop, hop[::-1]):
            self.network.set_rate(*pair, self.network.rates[pair] / factor)
