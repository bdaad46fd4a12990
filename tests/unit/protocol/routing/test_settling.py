"""Settling: whose flows a draft's units become, and what peers may not make of it."""

import json
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import cast

import pytest

from decod.ids import FlowId, NodeId
from decod.planner.deciding import decide, shortened
from decod.planner.graph import FlowGraph, GraphNode, Link
from decod.planner.settlement import DraftPath, fair_shares, settle
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import Effect, EffectSink, Send, StartJob
from decod.protocol.core.events import JobFinished
from decod.protocol.core.job_codec import fields_of, parsed
from decod.protocol.core.jobs import DecideFlows, FlowsDecided
from decod.protocol.core.messages.routing_messages import (
    Claim,
    Claimed,
    Claims,
    Hop,
    Install,
    Routes,
    SettledFlow,
)
from decod.protocol.flows.negotiation.draft import Draft
from decod.protocol.flows.negotiation.settling import (
    SettledHop,
    Settling,
    SettlingMessage,
    unsettled,
)
from decod.protocol.flows.position import Position

D1, D2, R1, R2, T1, T2 = (NodeId(name) for name in ("d1", "d2", "r1", "r2", "t1", "t2"))
EVIL = NodeId("evil")


def position(node_id: NodeId, *, capacity: int = 1) -> Position:
    """Return a place in a graph of two data nodes and two stages of two relays."""
    data, first, last = [D1, D2], [R1, R2], [T1, T2]
    around = {D1: (last, first), D2: (last, first)}
    around |= {R1: (data, last), R2: (data, last), T1: (first, data), T2: (first, data)}
    previous, following = around[node_id]
    return Position(
        node_id=node_id,
        out=EffectSink(),
        data=node_id in data,
        capacity=capacity,
        num_stages=2,
        previous=previous,
        next=following,
        data_peers=[peer for peer in data if peer != node_id] if node_id in data else [],
        cost_to=lambda peer: 1.0,
        cost_from=lambda peer: 1.0,
    )


def settling(node_id: NodeId, *, units: dict[NodeId, int] | None = None) -> Settling:
    """Return a node's part; at a data node, with as many units outward, and begun."""
    place = position(node_id)
    draft = Draft(place, 1, Random(0))
    for peer, number in (units or {}).items():
        draft.links.outward[peer].grow(number)
    machine = Settling(place, draft, 1, D1, ComputeQueue(TensorStore(place.out), place.out))
    if place.data:
        machine.begin(1)
    place.out.taken()
    return machine


def received(machine: Settling, sender: NodeId, message: SettlingMessage) -> list[Effect]:
    """Return what a node does about a message."""
    machine.received(sender, message)
    return machine.position.out.taken()


def hops(*path: NodeId) -> tuple[Hop, ...]:
    return tuple(
        Hop(node_id, tuple((peer, 1.0) for peer in position(node_id).next)) for node_id in path
    )


def claims(*paths: tuple[Hop, ...], capacity: int = 1) -> Claims:
    return Claims(1, 1, capacity, ((R1, 1.0), (R2, 1.0)), paths)


def sent(effects: list[Effect], kind: type) -> list[object]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def job_in(effects: list[Effect]) -> StartJob:
    """Return the one effect there is: the start of a job that decides."""
    (started,) = effects
    assert isinstance(started, StartJob)
    assert isinstance(started.job, DecideFlows)
    return started


def finish(machine: Settling, effects: list[Effect]) -> list[Effect]:
    """End the job that decides, and return what comes of it."""
    started = job_in(effects)
    assert isinstance(started.job, DecideFlows)
    result = FlowsDecided(decide(started.job.unsettled))
    machine.compute.finished(0.0, JobFinished(started.job_id, result, (), 0.2))
    return machine.position.out.taken()


def deciding() -> tuple[Settling, list[Effect]]:
    """Return a settler that has just got all claims, and its effects."""
    machine = settling(D1, units={R2: 1})
    received(machine, T2, Claimed(1, 1, FlowId(D1, 0), ()))
    return machine, received(machine, D2, claims(WHOLE))


WHOLE = hops(R1, T1)
CUT = (Hop(R1, ()), Hop(T1, ()))


@pytest.mark.parametrize(
    "malformed",
    [
        claims(WHOLE, hops(R2, T2)),  # More than its capacity.
        claims(hops(R1)),
        claims(hops(R1, T1, R2)),
        claims(hops(T1, R1)),
        claims(hops(R1, R1)),
        claims(()),
        claims(CUT),
        claims(WHOLE, capacity=-1),
    ],
)
def test_a_malformed_report_of_claims_is_ignored(malformed: Claims) -> None:
    """The peer may still send a good one; until then nobody's flows are settled."""
    machine = settling(D1, units={R2: 1})
    received(machine, T2, Claimed(1, 1, FlowId(D1, 0), ()))
    received(machine, D2, malformed)
    assert machine.here is not None
    assert D2 in machine.here.silent
    assert received(machine, EVIL, claims(WHOLE)) == []
    started = received(machine, D2, claims(WHOLE))
    assert len(sent(finish(machine, started), Routes)) == 1


def test_routes_that_are_not_in_the_graph_or_too_many_are_dropped() -> None:
    machine = settling(D2)
    flows = tuple(SettledFlow(p, (1.0, 1.0, 1.0)) for p in ((EVIL, T1), (R1, T1), (R2, T2)))
    assert received(machine, EVIL, Routes(1, 1, flows)) == []
    machine.received(D1, Routes(1, 1, flows))
    assert machine.decided == {}, "one flow at most, and the first is no path"
    machine = settling(D2)
    effects = received(machine, D1, Routes(1, 1, flows[1:]))
    assert list(machine.decided.values()) == [flows[1]]
    assert len(sent(effects, Install)) == 1


def test_a_relay_installs_no_more_than_it_can_carry() -> None:
    machine = settling(R1)
    for slot in range(3):
        machine.received(D1, Install(1, 1, FlowId(D1, slot), (R1, T1)))
    assert machine.hops == {FlowId(D1, 0): SettledHop(D1, T1)}


def test_a_relay_installs_only_what_comes_by_its_own_links() -> None:
    machine = settling(R1)
    for sender, path in ((EVIL, (R1, T1)), (D1, (R1, EVIL)), (D1, (R1,)), (D2, (R1, T1))):
        assert received(machine, sender, Install(1, 1, FlowId(D1, 0), path)) == []
    assert received(machine, EVIL, Claim(1, 1, FlowId(EVIL, 0), ())) == []
    assert (machine.hops, machine.units.frozen) == ({}, False)


def test_claims_of_an_older_epoch_are_ignored() -> None:
    machine = settling(R1, units={T1: 1})
    cast("Draft", machine.units).links.inward[D1].grow(1)
    received(machine, D1, Claim(1, 5, FlowId(D1, 0), ()))
    assert received(machine, D1, Claim(1, 4, FlowId(D1, 0), ())) == []
    assert machine.epoch == 5


def test_a_claim_whose_unit_was_let_go_ends_with_nothing() -> None:
    machine = settling(R1)
    effects = received(machine, D1, Claim(1, 1, FlowId(D1, 0), ()))
    assert sent(effects, Claimed) == [Claimed(1, 1, FlowId(D1, 0), ())]


def test_open_claims_are_repeated_until_they_have_ended() -> None:
    machine = settling(D1, units={R1: 1})

    def claims_of_a_tick() -> list[object]:
        machine.tick()
        return sent(machine.position.out.taken(), Claim)

    repeats = [message for _ in range(33) for message in claims_of_a_tick()]
    assert repeats == [Claim(1, 1, FlowId(D1, 0), ())] * 2
    machine.received(D2, Claimed(1, 1, FlowId(D1, 0), WHOLE))
    assert not any(claims_of_a_tick() for _ in range(33))


# --- the settler's choice -----------------------------------------------------------------------


def test_a_decision_on_a_settlement_that_was_given_up_is_dropped() -> None:
    machine, started = deciding()
    machine.begin(2)
    machine.position.out.taken()
    assert finish(machine, started) == []
    received(machine, T2, Claimed(1, 2, FlowId(D1, 0), ()))
    again = received(machine, D2, replace(claims(WHOLE), epoch=2))
    assert [m.epoch for m in sent(finish(machine, again), Routes)] == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("in_run", [False, True])
def test_a_job_decides_the_same_as_its_two_parts_on_the_claims(
    seed: int,
    in_run: bool,
) -> None:
    """Nothing gets lost on the way to another process and back."""
    graph = random_graph(seed, num_data=2)
    stages = [graph.stage(s) for s in range(1, graph.num_stages + 1)]
    gathered = random_claims(graph, seed)
    rooms = [{n.node_id: 2 for n in stage} for stage in stages]
    place = replace(position(D1), fair=in_run, rooms=(lambda: rooms) if in_run else None)
    problem = unsettled(gathered, place)
    asked = DecideFlows(problem)
    assert parsed(DecideFlows, json.loads(json.dumps(fields_of(asked)))) == asked
    decided = decide(problem)
    found = FlowsDecided(decided)
    assert parsed(FlowsDecided, json.loads(json.dumps(fields_of(found)))) == found

    paths = [
        DraftPath(data_node, tuple(hop.node_id for hop in path))
        for data_node, told in gathered.items()
        for path in told.claims
    ]
    capacities = {data_node: told.capacity for data_node, told in gathered.items()}
    shares = fair_shares(capacities, len(paths)) if in_run else capacities
    known = {
        link: cost
        for link, cost in graph.costs.items()
        if link[0] in capacities or any(link[0] in path.relays for path in paths)
    }
    routes = settle(paths, known, shares)
    if in_run:
        routes = shortened(
            routes,
            graph.costs,
            compute_s=dict.fromkeys(graph.nodes, 0.5),
            rooms=rooms,
            numbers=capacities,
            work_max=150_000,
        )
    assert [flow.route for flow in decided] == routes
    for flow in decided:
        assert flow.costs == tuple(graph.costs[hop] for hop in pairwise(flow.route.path))


def random_claims(graph: FlowGraph, seed: int) -> dict[NodeId, Claims]:
    """Return what data nodes claim that have drawn two paths each, with all links' costs."""
    rng = Random(f"claims {seed}")

    def outward(node_id: NodeId) -> tuple[tuple[NodeId, float], ...]:
        return tuple((peer, graph.costs[node_id, peer]) for peer in graph.next[node_id])

    def inward(node_id: NodeId) -> tuple[tuple[NodeId, float], ...]:
        return tuple((peer, graph.costs[peer, node_id]) for peer in graph.previous[node_id])

    def path() -> tuple[Hop, ...]:
        relays = [rng.choice(graph.stage(s)).node_id for s in range(1, graph.num_stages + 1)]
        return tuple(Hop(relay, outward(relay), inward(relay), 0.5) for relay in relays)

    return {
        node.node_id: Claims(
            1, 1, 2, outward(node.node_id), (path(), path()), inward(node.node_id), 0.5
        )
        for node in graph.stage(0)
    }


def random_graph(seed: int, *, num_data: int) -> FlowGraph:
    rng = Random(f"settle {seed}")
    num_stages = rng.randint(1, 3)
    layers = [[NodeId(f"d{i}") for i in range(num_data)]]
    layers += [[NodeId(f"r{s}-{i}") for i in range(3)] for s in range(1, num_stages + 1)]
    nodes = {
        node_id: GraphNode(node_id, s, 2 if s == 0 else 1)
        for s, layer in enumerate(layers)
        for node_id in layer
    }
    costs: dict[Link, float] = {
        (a, b): round(10 ** rng.uniform(0, 2), 2)
        for here, there in zip(layers, [*layers[1:], layers[0]], strict=True)
        for a in here
        for b in there
    }
    return FlowGraph(num_stages, nodes, costs)
