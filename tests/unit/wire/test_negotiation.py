"""Nodes that look for flows say nothing that would not arrive, and find them over the wire."""

from itertools import product
from random import Random
from typing import get_args

import pytest

from decod.ids import NodeId, RunId
from decod.planner.deciding import decide
from decod.planner.graph import Objective
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import Effect, EffectSink, Send, StartJob
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import DecideFlows, FlowsDecided
from decod.protocol.core.messages.routing_messages import DraftUnits, GwtfMessage, RoutingMessage
from decod.protocol.flows.negotiation.negotiated_routing import Negotiation
from decod.protocol.flows.position import Position
from decod.wire import codec
from decod.wire.v1 import control_pb2 as pb

RUN = RunId("r" * 26)
STAGES = [[NodeId(a + b * 51) for b in "234"] for a in "abcd"]
"""The first is that of the data nodes."""

CAPACITY = 4
SEARCH_TICKS, SETTLE_TICKS = 60, 60


class Nodes:
    """Every node of a small run, and what is on its way between them as bytes."""

    def __init__(self, objective: Objective) -> None:
        rng = Random(5)
        num = len(STAGES)
        self.costs = {
            link: rng.uniform(1, 20)
            for i, stage in enumerate(STAGES)
            for link in product(stage, STAGES[(i + 1) % num])
        }
        self.seen: set[type] = set()
        self._letters: list[tuple[NodeId, bytes]] = []
        self._out = EffectSink[Effect]()
        self._compute = ComputeQueue(TensorStore(self._out), self._out)
        self._nodes = {
            node_id: self._negotiation(node_id, i, objective)
            for i, stage in enumerate(STAGES)
            for node_id in stage
        }

    def _negotiation(self, node_id: NodeId, stage: int, objective: Objective) -> Negotiation:
        position = Position(
            node_id=node_id,
            out=self._out,
            data=stage == 0,
            capacity=CAPACITY,
            num_stages=len(STAGES) - 1,
            previous=STAGES[stage - 1],
            next=STAGES[(stage + 1) % len(STAGES)],
            data_peers=[peer for peer in STAGES[0] if peer != node_id and stage == 0],
            cost_to=lambda peer: self.costs[node_id, peer],
            cost_from=lambda peer: self.costs[peer, node_id],
            objective=objective,
            reward=1e6 if objective is Objective.SUM else 1e18,
        )
        return Negotiation(
            position,
            view_version=1,
            settler=STAGES[0][0],
            compute=self._compute,
            rng=Random(node_id),
        )

    def tick(self) -> None:
        letters, self._letters = self._letters, []
        for receiver, data in letters:
            decoded = codec.decode(codec.parse(pb.Envelope, data))
            message = decoded.message
            assert isinstance(message, RoutingMessage)
            self.seen.add(type(message))
            self._nodes[receiver].received(decoded.sender, message)
            self._post(receiver)
        for node_id, node in self._nodes.items():
            node.tick()
            self._post(node_id)

    def settle(self) -> None:
        for node_id in STAGES[0]:
            self._nodes[node_id].settle(1)
            self._post(node_id)

    def num_flows(self) -> int:
        settlings = [self._nodes[node_id].settling for node_id in STAGES[0]]
        assert all(settling.complete for settling in settlings)
        return sum(len(settling.flows) for settling in settlings)

    def _post(self, sender: NodeId) -> None:
        for effect in self._out.taken():
            if isinstance(effect, StartJob):
                assert isinstance(effect.job, DecideFlows)
                result = FlowsDecided(decide(effect.job.unsettled))
                done = JobFinished(effect.job_id, result, (), duration_s=0.0)
                self._compute.finished(0.0, done)
                self._post(sender)
                continue
            assert isinstance(effect, Send)
            envelope = codec.encode(RUN, sender, 1, 1, effect.message)
            assert codec.decode(envelope).message == effect.message
            self._letters.append((effect.to, envelope.SerializeToString()))


@pytest.mark.parametrize("objective", Objective)
def test_nodes_that_only_hear_bytes_find_all_flows(objective: Objective) -> None:
    nodes = Nodes(objective)
    for _ in range(SEARCH_TICKS):
        nodes.tick()
    nodes.settle()
    for _ in range(SETTLE_TICKS):
        nodes.tick()
    assert nodes.num_flows() == CAPACITY * len(STAGES[0])
    # GWTF's own search is another algorithm: who negotiates by drafts says nothing of it. And both
    # ends of a link always agree here, where no message is lost.
    unsaid = {*get_args(GwtfMessage), DraftUnits}
    assert nodes.seen == set(get_args(RoutingMessage)) - unsaid
