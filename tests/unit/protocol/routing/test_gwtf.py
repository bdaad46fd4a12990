"""GWTF's own search: its examples, its graphs, and the holes that the paper leaves."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from decod.ids import FlowId, NodeId
from decod.lab.sim.routing_trial import Negotiated, Society, Weather, negotiate, settling_rounds
from decod.planner.graph import FlowGraph, GraphNode, Link, Objective, broken_rules
from decod.protocol.core.effects import Effect, EffectSink, Send
from decod.protocol.core.messages.routing_messages import (
    ExchangeHops,
    HopsAnswer,
    HopsDecision,
    HopsRequest,
    LinkUse,
    NextHop,
    PeerFlows,
    PeerQuery,
    RequestRedirect,
)
from decod.protocol.flows.gwtf.gwtf_routing import GwtfSearch
from decod.protocol.flows.gwtf.hops import FlowHop
from decod.protocol.flows.position import Position

STORM = Weather(loss=0.2, repeat=0.1, delay_max=3, until_round=90)


def node(name: str) -> NodeId:
    return NodeId(name)


def graph_of(stages: list[dict[str, int]], costs: dict[tuple[str, str], float]) -> FlowGraph:
    """Return a graph of stages 0 to S (capacities by name); all links that `costs` lacks cost 1."""
    nodes = {
        node(name): GraphNode(node(name), index, capacity)
        for index, stage in enumerate(stages)
        for name, capacity in stage.items()
    }
    links: dict[Link, float] = {}
    for index, stage in enumerate(stages):
        for begin in stage:
            for end in stages[(index + 1) % len(stages)]:
                links[node(begin), node(end)] = costs.get((begin, end), 1.0)
    return FlowGraph(len(stages) - 1, nodes, links)


def draw(
    seed: int,
    *,
    num_data_nodes: int = 1,
    num_relays: int = 40,
    num_stages: int = 8,
    capacity_max: float = 3,
) -> FlowGraph:
    """Draw a graph of the kind of GWTF's table V."""
    rng = Random(seed)
    stages: list[dict[str, int]] = [{} for _ in range(num_stages + 1)]
    for index in range(num_relays):
        capacity = math.floor(rng.uniform(1, capacity_max))
        stages[index % num_stages + 1][f"r{index:02}"] = capacity
    smallest = min(sum(stage.values()) for stage in stages[1:])
    stages[0] = {f"d{index}": smallest for index in range(num_data_nodes)}
    costs = {
        (begin, end): float(math.floor(rng.uniform(1, 20)))
        for index, stage in enumerate(stages)
        for begin in stage
        for end in stages[(index + 1) % len(stages)]
    }
    return graph_of(stages, costs)


def without(graph: FlowGraph, *gone: NodeId) -> FlowGraph:
    nodes = {node_id: n for node_id, n in graph.nodes.items() if node_id not in gone}
    links = {link: cost for link, cost in graph.costs.items() if not {*link} & {*gone}}
    return FlowGraph(graph.num_stages, nodes, links)


def most_flows(graph: FlowGraph) -> int:
    stages = range(graph.num_stages + 1)
    return min(sum(n.capacity for n in graph.stage(index)) for index in stages)


def paths(negotiated: Negotiated) -> set[str]:
    return {" ".join(route.path) for route in negotiated.routes}


# --- all nodes of a graph -----------------------------------------------------------------------


def check(society: Society) -> None:
    """No node carries too much; what is not being changed is the same at both its ends."""
    nodes = {k: n for k, n in society.nodes.items() if isinstance(n, GwtfSearch)}
    taken: Counter[tuple[NodeId, FlowId]] = Counter()
    for node_id, search in nodes.items():
        capacity = society.graph.nodes[node_id].capacity
        if search.hops.position.data:
            assert sum(hop.upstream == node_id for hop in search.hops) <= capacity
            assert sum(hop.upstream != node_id for hop in search.hops) <= capacity
        else:
            assert len(search.hops.hops) + search.hops.num_reserved <= capacity
        for name, hop in search.hops.hops.items():
            assert hop.name == name
            if hop.locked or hop.next.peer == node_id:
                continue
            following = FlowId(hop.data_node, hop.next.number)
            taken[hop.next.peer, following] += 1
            other = nodes[hop.next.peer].hops.hops.get(following)
            assert other is None or other.locked or other.upstream == node_id
    assert all(times == 1 for times in taken.values())


def go_on(society: Society, rounds: int) -> None:
    for _ in range(rounds):
        society.step()
        check(society)


def gwtf(graph: FlowGraph, *, seed: int = 0, weather: Weather | None = None) -> Society:
    return Society(graph, seed=seed, algorithm="gwtf", weather=weather or Weather())


def end(society: Society) -> int:
    """Settle; return how many flows there are, all of them valid, and no lock left behind."""
    society.settle()
    go_on(society, settling_rounds(society.graph))
    routes = society.routes()
    assert broken_rules(society.graph, routes) == []
    go_on(society, 20)
    for negotiation in society.nodes.values():
        assert isinstance(negotiation, GwtfSearch)
        assert not negotiation.hops.frozen
    return len(routes)


CHANGE = graph_of(
    [{"d": 2}, {"n1": 1, "n3": 1}, {"n2": 1, "n4": 1}],
    {("n1", "n2"): 3, ("n3", "n4"): 8, ("n1", "n4"): 6, ("n3", "n2"): 6},
)
"""The paper's example: costs 3 and 8 become 6 and 6."""


def test_request_change_lowers_the_largest_cost() -> None:
    assert paths(negotiate(CHANGE, algorithm="gwtf", objective="max", rounds=60)) == {
        "d n1 n4 d",
        "d n3 n2 d",
    }


def test_flows_are_the_same_on_a_replay_and_messages_bounded() -> None:
    graph = draw(7)
    negotiated = negotiate(graph, algorithm="gwtf", seed=3)
    assert negotiated == negotiate(graph, algorithm="gwtf", seed=3)
    assert negotiated.messages_per_node_max < 6 * 120


@pytest.mark.parametrize("seed", range(4))
def test_messages_that_are_lost_repeated_or_late_leave_nothing_half_done(seed: int) -> None:
    graph = draw(seed, num_data_nodes=1 + seed % 2)
    society = gwtf(graph, seed=seed)
    go_on(society, 45)  # What Request Flow loses, its own timeouts make good: see `test_flow`.
    society.weather = STORM
    go_on(society, 125)
    assert end(society) == most_flows(without(graph, node("d1")))


# --- one node -----------------------------------------------------------------------------------


def relay(capacity: int = 2, objective: Objective = Objective.SUM) -> GwtfSearch:
    """Return node `b`: before it u, v; after it x (costs 1), y (costs 5); beside it a, c."""
    costs = {node("x"): 1.0, node("y"): 5.0, node("u"): 1.0, node("v"): 1.0}
    position = Position(
        node_id=node("b"),
        out=EffectSink(),
        data=False,
        capacity=capacity,
        num_stages=1,
        previous=[node("u"), node("v")],
        next=[node("x"), node("y")],
        data_peers=[],
        cost_to=costs.__getitem__,
        cost_from=costs.__getitem__,
        objective=objective,
        stage_peers=[node("a"), node("c")],
    )
    return GwtfSearch(position, view_version=1, settler=node("d"), rng=Random(0), temperature=0.0)


def carry(negotiation: GwtfSearch) -> FlowHop:
    """Give it a flow from u to y."""
    return negotiation.hops.add(FlowId(node("d"), 1), node("u"), NextHop(node("y"), 7))


def exchange(hop: FlowHop, *, version: int | None = None, change_id: int = 1) -> ExchangeHops:
    """Return a's request to give its x for this node's y, which saves 4 here."""
    return ExchangeHops(
        view_version=1,
        change_id=change_id,
        data_node=node("d"),
        number=3,
        next=NextHop(node("x"), 9),
        other=node("b"),
        other_number=hop.number,
        other_version=hop.version if version is None else version,
        other_next=hop.next,
        less=LinkUse(2.0, 1),
        more=LinkUse(3.0, 0),
    )


def received(
    negotiation: GwtfSearch, sender: str, message: HopsRequest | PeerQuery
) -> list[Effect]:
    """Return what a node does about a message."""
    negotiation.received(node(sender), message)
    return negotiation.hops.position.out.taken()


def answers(negotiation: GwtfSearch, sender: str, request: HopsRequest) -> list[bool]:
    """Return what a node answers to a request."""
    effects = received(negotiation, sender, request)
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message.agreed for message in sent if isinstance(message, HopsAnswer)]


def test_the_other_node_refuses_what_costs_more_by_its_own_measure() -> None:
    negotiation = relay()
    hop = negotiation.hops.add(FlowId(node("d"), 1), node("u"), NextHop(node("x"), 9))
    request = ExchangeHops(
        1, 1, node("d"), 3, NextHop(node("y"), 7), node("b"), hop.number, 0,
        NextHop(node("x"), 9), LinkUse(2.0, 1), LinkUse(1.0, 0),
    )  # fmt: skip
    assert answers(negotiation, "a", request) == [False]


def redirect(hop: FlowHop) -> RequestRedirect:
    """Return a's request to take over this node's flow."""
    return RequestRedirect(
        1, 1, node("d"), 4, node("b"), hop.number, hop.version, node("u"), hop.next,
        (LinkUse(1.0, 0), LinkUse(1.0, 0)),
    )  # fmt: skip


@pytest.mark.parametrize("asker", ["u", "x", "z"])
@pytest.mark.parametrize("request_of", [exchange, redirect])
def test_only_nodes_of_the_stage_change_where_its_flows_go(
    request_of: Callable[[FlowHop], HopsRequest], asker: str
) -> None:
    """A member of another stage that asks and decides by itself leaves all as it was."""
    hop = carry(negotiation := relay())
    before = replace(hop)
    assert answers(negotiation, asker, request_of(hop)) == [False]
    negotiation.received(node(asker), HopsDecision(1, 1, made=True))
    assert negotiation.hops.hops == {hop.name: before}


def test_the_next_node_refuses_a_change_of_a_flow_that_comes_from_another() -> None:
    negotiation = relay()
    hop = carry(negotiation)  # From u.
    here = NextHop(node("b"), hop.number)
    for owner, agreed in ((node("v"), False), (node("u"), True)):
        request = RequestRedirect(
            1, 1 + agreed, node("d"), 4, owner, 2, 0, node("t"), here,
            (LinkUse(1.0, 0), LinkUse(1.0, 0)),
        )  # fmt: skip
        assert answers(negotiation, "v", request) == [agreed]


def test_only_nodes_of_the_stage_are_told_of_flows() -> None:
    negotiation = relay()
    carry(negotiation)
    assert received(negotiation, "u", PeerQuery(1)) == []
    (told,) = received(negotiation, "a", PeerQuery(1))
    assert isinstance(told, Send)
    assert isinstance(told.message, PeerFlows)
    assert [flow.next.peer for flow in told.message.flows] == ["y"]
