"""Nodes of a flow graph that negotiate in rounds: all send, then all receive."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random

from typing_extensions import override

from decod.ids import FlowId, Iteration, NodeId
from decod.planner.deciding import decide
from decod.planner.graph import FlowGraph, GraphNode, Objective, Route
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.context import Context, Neighbours, RunFacts
from decod.protocol.core.effects import Effect, EffectSink, Send, StartJob
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import DecideFlows, FlowsDecided
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages import FlowAnswer, FlowCost, Message, RequestFlow, Withdraw
from decod.protocol.core.view import Member, Opening, Role, View
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.position import Position
from decod.protocol.flows.registry import ROUTINGS
from decod.protocol.flows.routing import Routing
from decod.protocol.flows.searching import Search, SearchingRouting
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import RunConfig

_FACTS = RunFacts(manifest_sha256="", activation_size_bytes=0)
_RUN = RunConfig(protocol=ProtocolConfig(answer_timeout_s=6.0))
"""A round counts as a second."""


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The outcome of a negotiation."""

    routes: list[Route]
    rounds: int
    messages_per_node_mean: float
    messages_per_node_max: int


@dataclass(frozen=True, slots=True)
class Weather:
    """Faults of the network, up to a round."""

    loss: float = 0.0
    """Share of messages that get lost."""
    repeat: float = 0.0
    """Share of messages that arrive twice."""
    delay_max: int = 0
    """Rounds that a message may take beyond one. Later messages overtake it."""
    until_round: int = 0


@dataclass(frozen=True, slots=True)
class _Letter:
    sender: NodeId
    receiver: NodeId
    message: Message


@dataclass(slots=True)
class Society:
    """All nodes of a graph, and the messages between them."""

    graph: FlowGraph
    seed: int = 0
    objective: Objective = Objective.SUM
    algorithm: str = "flow"
    """A name in `protocol.flows.registry`, of a routing that searches."""
    weather: Weather = field(default_factory=Weather)
    nodes: dict[NodeId, Search] = field(default_factory=dict)
    flows: dict[NodeId, RelayFlows | DataFlows] = field(default_factory=dict)
    """The first flows of each node, if the search begins with them."""
    round: int = 0
    num_messages: dict[NodeId, int] = field(default_factory=lambda: defaultdict(int))
    _version: int = 0
    _rng: Random = field(init=False)
    _out: EffectSink[Effect] = field(default_factory=EffectSink)
    _compute: ComputeQueue = field(init=False)
    """Of the node that settles."""
    _under_way: dict[int, deque[_Letter]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self._rng = Random(f"society {self.seed}")  # noqa: S311 - a seed replays it.
        self._compute = ComputeQueue(TensorStore(self._out), self._out)
        self.change(self.graph)

    def change(self, graph: FlowGraph) -> None:
        """Go on with another graph: nodes have come or gone, or link costs have changed."""
        self.graph = graph
        self._version += 1
        before, self.nodes, self.flows = self.nodes, {}, {}
        view = _view_of(graph, self._version)
        for node in sorted(graph.nodes.values(), key=lambda node: node.node_id):
            if node.capacity > 0:
                previous = before.get(node.node_id)
                self.nodes[node.node_id] = self._search(node, previous)
                if self.nodes[node.node_id].BEGINS_WITH_FLOWS:
                    self.flows[node.node_id] = self._first_flows(node, view)
        for node_id, flows in self.flows.items():
            flows.activate(self.round)
            self._post(node_id)

    def _search(self, node: GraphNode, previous: Search | None) -> Search:
        routing = ROUTINGS[self.algorithm]
        assert issubclass(routing, SearchingRouting)
        return routing.make_search(
            self._position(node),
            view_version=self._version,
            settler=min(self.data_nodes, default=NodeId("")),
            compute=self._compute,
            rng=Random(f"{self.seed} {self._version} {node.node_id}"),  # noqa: S311 - as above.
            previous=previous,
        )

    def _first_flows(self, node: GraphNode, view: View) -> RelayFlows | DataFlows:
        graph, node_id = self.graph, node.node_id
        links = _KnownLinks(graph, node_id)
        opening = Opening(Iteration(1, 1), Iteration(0, 0), view)
        context = Context(node_id, _RUN, _FACTS, links, opening, out=self._out)
        context.neighbours = Neighbours(
            previous=tuple(p for p in graph.previous[node_id] if p in view.by_id),
            next=tuple(p for p in graph.next[node_id] if p in view.by_id),
        )
        kind = RelayFlows if node.stage_index else DataFlows
        return kind(self.round, context, Routing(context, self._rng).price_s)

    def _position(self, node: GraphNode) -> Position:
        graph, node_id = self.graph, node.node_id
        data = node_id in self.data_nodes
        stage = [peer for peer in graph.stage(node.stage_index) if peer.capacity > 0]
        peers = [peer.node_id for peer in stage if peer.node_id != node_id]
        return Position(
            node_id=node_id,
            out=self._out,
            data=data,
            capacity=node.capacity,
            num_stages=graph.num_stages,
            previous=[p for p in graph.previous[node_id] if graph.nodes[p].capacity > 0],
            next=[peer for peer in graph.next[node_id] if graph.nodes[peer].capacity > 0],
            data_peers=peers if data else [],
            stage_peers=[] if data else peers,
            cost_to=lambda peer: graph.costs[node_id, peer],
            cost_from=lambda peer: graph.costs[peer, node_id],
            objective=self.objective,
            reward=_reward(graph, self.objective),
        )

    def step(self) -> None:
        """Run one round: all nodes take in the messages of the last round, then act."""
        self.round += 1
        for letter in self._under_way.pop(self.round, ()):
            if letter.receiver in self.nodes and self._current(letter.message):
                self._receive(letter)
                self._post(letter.receiver)
        for node_id, node in self.nodes.items():
            if (flows := self.flows.get(node_id)) is not None:
                flows.overdue(self.round)
                node.begin_with(flows)
            node.tick()
            self._post(node_id)

    def _receive(self, letter: _Letter) -> None:
        flows, sender, message = self.flows.get(letter.receiver), letter.sender, letter.message
        match message:
            case FlowCost() if flows is not None:
                flows.announced(self.round, sender, message)
            case RequestFlow() if flows is not None:
                flows.requested(self.round, sender, message)
            case FlowAnswer() if flows is not None:
                flows.answered(self.round, sender, message)
            case Withdraw() if flows is not None:
                flows.withdrawn(self.round, sender, message)
            case _:
                self.nodes[letter.receiver].received(sender, message)

    def settle(self, epoch: int = 1) -> None:
        """Let all data nodes end the search."""
        for node_id in self.data_nodes:
            self.nodes[node_id].settle(epoch)
            self._post(node_id)

    @property
    def data_nodes(self) -> list[NodeId]:
        """Data nodes that can carry anything, by id."""
        return [node.node_id for node in self.graph.stage(0) if node.capacity > 0]

    def routes(self) -> list[Route]:
        """Return the settled flows of all data nodes."""
        return [
            Route((flow_id.data_node, *path, flow_id.data_node))
            for node_id in self.data_nodes
            for flow_id, path in sorted(self._paths(node_id).items())
        ]

    def _paths(self, node_id: NodeId) -> dict[FlowId, tuple[NodeId, ...]]:
        decided = self.nodes[node_id].settling.decided
        return {flow_id: flow.path for flow_id, flow in decided.items()}

    def _current(self, message: Message) -> bool:
        return getattr(message, "view_version", self._version) == self._version

    def _post(self, sender: NodeId) -> None:
        """Carry out what a node wants done."""
        for effect in self._out.taken():
            if isinstance(effect, StartJob):
                assert isinstance(effect.job, DecideFlows)
                result = FlowsDecided(decide(effect.job.unsettled))
                done = JobFinished(effect.job_id, result, (), duration_s=0.0)
                self._compute.finished(0.0, done)
                self._post(sender)
            elif isinstance(effect, Send):
                letter = _Letter(sender, effect.to, effect.message)
                if effect.to == sender:
                    self._under_way[self.round + 1].append(letter)
                    continue
                self.num_messages[sender] += 1
                self._deliver(letter)

    def _deliver(self, letter: _Letter) -> None:
        weather, rng = self.weather, self._rng
        arrival = self.round + 1
        if self.round < weather.until_round:
            if rng.random() < weather.loss:
                return
            if rng.random() < weather.repeat:
                self._under_way[arrival + rng.randint(0, weather.delay_max)].append(letter)
            arrival += rng.randint(0, weather.delay_max)
        self._under_way[arrival].append(letter)


def negotiate(
    graph: FlowGraph,
    *,
    algorithm: str = "flow",
    rounds: int = 120,
    seed: int = 0,
    objective: str = "sum",
) -> Negotiated:
    """Let the nodes of a graph find flows by themselves.

    Args:
        graph: The nodes and links. Each node knows its own links and capacity.
        algorithm: A routing that searches, such as `flow` or `gwtf`.
        rounds: Number of message exchanges. The last ones, at most half, settle the draft. The
            first draft takes about two rounds per stage; settling it takes as long again.
        seed: Seed of the nodes' draws, such as how long a refused node waits.
        objective: `sum` or `max`.
    """
    society = Society(graph, seed=seed, objective=Objective(objective), algorithm=algorithm)
    settle_at = max(rounds // 2, rounds - settling_rounds(graph))
    for number in range(rounds):
        if number == settle_at:
            society.settle()
        society.step()
    counts = [society.num_messages[node_id] for node_id in society.nodes] or [0]
    return Negotiated(society.routes(), society.round, sum(counts) / len(counts), max(counts))


def settling_rounds(graph: FlowGraph) -> int:
    """Return the number of rounds for settling: along the paths, to the leader and back."""
    return graph.num_stages + 9


def rounds_min(graph: FlowGraph, algorithm: str) -> int:
    """Return the least number of rounds until the first flow stands.

    This is enough only if no node is in another's way. All flows, and good ones, take longer.
    """
    num = graph.num_stages
    # Offers of a draft run ahead of answers; Request Flow takes twice as long.
    return 2 * num + 8 if algorithm == "flow" else min(4 * num + 12, 6 * num + 6)


class _KnownLinks(LinkTable):
    """A node's links, with the costs that the graph says."""

    def __init__(self, graph: FlowGraph, node_id: NodeId) -> None:
        super().__init__(activation_size_bytes=1, compute_s=0.0)
        self._graph, self._node_id = graph, node_id

    @override
    def cost_s(self, peer: NodeId, *, peer_compute_s: float | None = None) -> float:
        return self._graph.costs[self._node_id, peer]

    @override
    def transfer_s(self, peer: NodeId) -> float:
        return 0.0


def _view_of(graph: FlowGraph, version: int) -> View:
    """Return a graph's nodes that can carry anything, as the members of a run."""
    members = [
        Member(
            node.node_id,
            "",
            Role.RELAY if node.stage_index else Role.DATA,
            node.stage_index,
            node.capacity,
        )
        for node in graph.nodes.values()
        if node.capacity > 0
    ]
    leader = min((m.node_id for m in members if not m.stage_index), default=NodeId(""))
    return View.of(members, version=version, leader=leader, term=1, num_stages=graph.num_stages + 1)


def _reward(graph: FlowGraph, objective: Objective) -> float:
    """Return a reward above the cost of any path."""
    dearest = max(graph.costs.values(), default=0.0)
    hops = graph.num_stages + 1
    if objective is Objective.SUM:
        return 4 * hops * (dearest + 1.0)
    largest = max((node.capacity for node in graph.nodes.values()), default=1)
    return 4 * hops * (dearest * largest + 1.0) ** 8
