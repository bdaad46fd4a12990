"""The settler: the data node that decides whose flows the claims of a settlement become.

For decod's search that is a job (`planner.deciding`). GWTF's flows are those that were claimed. A
decision that fails is asked for again with the next repeated report. One that comes when its
settlement has been given up is dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decod.ids import FlowId, NodeId
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import DecideFlows, FlowsDecided, Job
from decod.protocol.core.messages.routing_messages import Claims, Installed, Routes, SettledFlow
from decod.protocol.flows.negotiation.flow_decision import as_claimed, flows_of, unsettled
from decod.protocol.flows.position import Position


@dataclass(slots=True)
class Settler:
    """Gathers all claims of one settlement, and tells every data node its flows."""

    position: Position
    view_version: int
    tell: Callable[[NodeId, Routes], list[Effect]]
    """Sends a data node its flows."""
    compute: ComputeQueue | None
    """Takes the job of deciding. None: flows are what was claimed."""
    epoch: int = 0
    _deciding: DecideFlows | None = None
    """The job whose result is awaited."""
    _gathered: dict[NodeId, Claims] = field(default_factory=dict)
    _settled: dict[NodeId, Routes] = field(default_factory=dict)
    _installed: set[NodeId] = field(default_factory=set)
    """Other data nodes that have installed all of their flows."""

    def enter(self, epoch: int) -> None:
        """Begin another settlement."""
        self.epoch = epoch
        self.give_up()
        self._installed.clear()
        self._gathered.clear()
        self._settled.clear()

    def give_up(self) -> None:
        """Drop the decision that is awaited."""
        self._deciding = None

    @property
    def silent(self) -> list[NodeId]:
        """The other data nodes that have not claimed."""
        return [peer for peer in self.position.data_peers if peer not in self._gathered]

    @property
    def all_installed(self) -> bool:
        """Whether every other data node has installed its flows."""
        return self._installed.issuperset(self.position.data_peers)

    @property
    def serves_all(self) -> bool:
        """Once decided: whether every data node with room has a flow."""
        return all(
            self._settled[data_node].routes or not claims.capacity
            for data_node, claims in self._gathered.items()
        )

    @property
    def flows(self) -> dict[FlowId, SettledFlow]:
        """Return the flows of all data nodes, once decided."""
        return {
            FlowId(data_node, slot): flow
            for data_node, routes in self._settled.items()
            for slot, flow in enumerate(routes.routes)
        }

    @property
    def unsure(self) -> list[tuple[NodeId, Routes]]:
        """The flows of other data nodes that have not said that they installed them."""
        peers = self._settled.keys() - self._installed - {self.position.node_id}
        return [(peer, self._settled[peer]) for peer in sorted(peers)]

    def received(self, sender: NodeId, message: Claims | Installed) -> list[Effect]:
        """Take in what a data node reports."""
        if isinstance(message, Claims):
            return self._gather(sender, message)
        self._installed.add(sender)
        return []

    def _gather(self, sender: NodeId, message: Claims) -> list[Effect]:
        """Take in the claims of a data node, and decide when those of all are here."""
        position = self.position
        everybody = {position.node_id, *position.data_peers}
        if sender not in everybody:
            return []
        if sender in self._settled:
            return self.tell(sender, self._settled[sender])
        if self._deciding is not None or not self._acceptable(message):
            return []
        self._gathered[sender] = message
        for hops in message.claims:
            position.heard(hops)
        if self._gathered.keys() != everybody:
            return []
        if self.compute is None:
            return self._tell_all(as_claimed(self._gathered))
        self._deciding = DecideFlows(unsettled(self._gathered, position))
        return self.compute.submit(self._deciding, self)

    def _acceptable(self, message: Claims) -> bool:
        """Whether a data node may claim this: no more than it can carry, and whole paths only."""
        if not 0 <= len(message.claims) <= message.capacity:
            return False
        heads = {peer for peer, _ in message.costs}
        complete = self.position.complete_path
        return all(complete(hops) and hops[0].node_id in heads for hops in message.claims)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """Tell the data nodes what has been decided."""
        if job is not self._deciding:
            return []
        assert isinstance(event.result, FlowsDecided)
        self._deciding = None
        return self._tell_all(flows_of(event.result.flows, self._gathered))

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """Let the next repeated report try again; till then the flows of before are used."""
        if job is self._deciding:
            self._deciding = None
        return []

    def _tell_all(self, decided: Mapping[NodeId, tuple[SettledFlow, ...]]) -> list[Effect]:
        for data_node, flows in decided.items():
            self._settled[data_node] = Routes(self.view_version, self.epoch, flows)
        effects: list[Effect] = []
        for data_node in sorted(self._settled):
            effects += self.tell(data_node, self._settled[data_node])
        return effects
