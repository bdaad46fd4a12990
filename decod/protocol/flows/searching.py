"""Routings that search for better flows beside training: when they act, what becomes of it.

How they search is a `Search`: decod's own (`negotiation`) or GWTF's (`gwtf`). The leader's node has
what was found settled from time to time, and opens each iteration with the last settlement that
stands with all data nodes and leaves none without a flow: in that iteration every node uses it.
"""

import math
from abc import abstractmethod
from random import Random
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from decod.ids import FlowId, NodeId
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.core.context import Context
from decod.protocol.core.messages.routing_messages import RoutingMessage, SettledFlow
from decod.protocol.core.view import flow_quota, flow_room, stage_peers
from decod.protocol.flows.building import DataFlows, Granted, RelayFlows
from decod.protocol.flows.negotiation.settling import Settling
from decod.protocol.flows.position import Position
from decod.protocol.flows.routing import KnownFlow, Routing
from decod.protocol.flows.substitutes import replaced

_SEARCH_TICKS = 16
"""Rounds of search before the first settlement of a view, beyond those of building."""

_PAUSE_TICKS = 8
"""Rounds of search between a settlement that stands and the next: enough to find a way round a
link that has become slow."""

_SETTLE_TICKS_PER_STAGE = 8
"""A settlement that does not stand after so many rounds for each stage is given up."""

_SETTLE_WORK_MAX = 40_000
"""About a fifth of a second: enough to find the best that can be for a dozen flows, and for a
hundred what is nearly as good."""

_NOISE = 0.05
"""Costs that move by a smaller share are noise: no change of flows should chase it."""


class Search(Protocol):
    """One node's part in a search, for one version of the view."""

    MESSAGES: ClassVar[tuple[type, ...]]
    """What peers may say in the search."""
    BEGINS_WITH_FLOWS: ClassVar[bool]
    """Whether the search begins with the first flows; else it builds something of its own."""

    @property
    def settling(self) -> Settling:
        """How what was found becomes flows that can be used."""

    def begin_with(self, flows: RelayFlows | DataFlows) -> None:
        """Take up first flows that have become complete since it was called last."""

    def end(self) -> None:
        """Wait for nothing any more: the view is over."""

    def tick(self) -> None:
        """Do what a node does once in each round."""

    def received(self, sender: NodeId, message: Any) -> None:
        """Take in a peer's message, one of `MESSAGES`."""

    def settle(self, epoch: int) -> None:
        """At a data node: have what was found made flows of."""


class SearchingRouting(Routing):
    """A routing with a search. Subclasses say which."""

    def __init__(self, context: Context, rng: Random) -> None:
        super().__init__(context, rng)
        self._search: Search | None = None
        self._wait = 0
        """Ticks until the leader's node has the search settled."""
        self._agreed_epoch = 0
        self._seen_epoch = 0
        """At the leader: the last settlement that stood, whether or not it is to be used."""
        self._costs: dict[NodeId, float] = {}
        self._compute_s = 0.0
        self._known: tuple[KnownFlow, ...] = ()
        self._last: dict[FlowId, SettledFlow] = {}
        """At a data node: its flows of the newest settlement that stood before this view."""

    @staticmethod
    @abstractmethod
    def make_search(
        position: Position,
        *,
        view_version: int,
        settler: NodeId,
        compute: ComputeQueue,
        rng: Random,
        previous: Search | None,
    ) -> Search:
        """Begin a search in a view.

        Args:
            position: This node's.
            view_version: Of the view.
            settler: The data node that has it settled.
            compute: Takes the settler's job of deciding.
            rng: Source of its draws.
            previous: The search of the view before.
        """

    @property
    @override
    def agreed_epoch(self) -> int:
        """At the leader: the settlement to use from the next opening on."""
        if self._search is None or not self._search.settling.knows(self._agreed_epoch):
            return self.epoch
        return self._agreed_epoch

    @override
    def renew(self, now_s: float) -> None:
        """Begin anew in the context's view, with what is left of the search in the last one."""
        context = self._context
        view = self._context.view
        if self._search is not None:
            self._search.end()
        self.epoch = 0
        self._agreed_epoch = 0
        self._seen_epoch = 0
        self._known = ()
        if not context.member.capacity or view.idle_stages:
            self._search = None
            self.deadline_s = None
            return
        before = self._search
        if before is not None and before.settling.stood:
            self._last = dict(before.settling.stood)
        self._search = self.make_search(
            self._position(),
            view_version=view.version,
            settler=view.leader,
            compute=context.compute,
            rng=self._rng,
            previous=before,
        )
        num_stages = view.num_stages - 1
        self._wait = _SEARCH_TICKS + (2 if before is not None else 3) * num_stages
        self.deadline_s = now_s + context.run.protocol.negotiation_interval_s

    def _position(self) -> Position:
        context = self._context
        view = self._context.view
        node_id = self._context.node_id
        data = context.member.stage_index == 0
        limit = context.run.protocol.max_peers_per_stage
        others = [m.node_id for m in view.workers[0] if m.node_id != node_id]
        return Position(
            node_id=node_id,
            out=context.out,
            data=data,
            capacity=flow_room(view, node_id),
            num_stages=view.num_stages - 1,
            previous=context.neighbours.previous,
            next=context.neighbours.next,
            data_peers=others if data else (),
            stage_peers=() if data else stage_peers(view, node_id, max_peers=limit),
            cost_to=self._steady_cost,
            cost_from=self._steady_cost,
            share=None if data else sum(flow_quota(view, node_id).values()),
            queue_cost=self._queue_cost,
            fair=True,
            work_max=_SETTLE_WORK_MAX,
            rooms=self._rooms if node_id == view.leader else None,
            heard=context.links.remote.heard,
        )

    def _rooms(self) -> list[dict[NodeId, int]]:
        """Return who works on each relay stage, and how many flows each may carry."""
        view = self._context.view
        return [
            {m.node_id: flow_room(view, m.node_id) for m in stage} for stage in view.workers[1:]
        ]

    def _steady_cost(self, peer: NodeId) -> float:
        """Return d(i, j), as it was when it last moved by more than noise."""
        cost_s = self._context.links.cost_s(peer)
        known = self._costs.get(peer)
        if known is None or abs(cost_s - known) > _NOISE * known:
            self._costs[peer] = known = cost_s
        return known

    def _queue_cost(self) -> float:
        """Return c_i, which is how long one more microbatch waits for each that is before it."""
        compute_s = self._context.links.compute_s
        if abs(compute_s - self._compute_s) > _NOISE * self._compute_s:
            self._compute_s = compute_s
        return self._compute_s

    @override
    def overdue(self, now_s: float, flows: RelayFlows | DataFlows | None) -> None:
        """Take part in the search, if it is time."""
        search = self._search
        if search is None or self.deadline_s is None or self.deadline_s > now_s:
            return
        self.deadline_s = now_s + self._context.run.protocol.negotiation_interval_s
        if flows is not None and not flows.final:
            search.begin_with(flows)
        search.tick()
        if self._context.node_id == self._context.view.leader:
            self._settle(search)

    def _settle(self, search: Search) -> None:
        """Have the draft settled, if it is time: some search after the last settlement stood."""
        settling = search.settling
        here = settling.here
        if here is not None and settling.agreed and settling.epoch > self._seen_epoch:
            self._seen_epoch = settling.epoch
            self._wait = _PAUSE_TICKS
            # There is room for a flow of each (`flow_room`): one that has none is cut off from the
            # draft for the moment, and has better ones now, or will have when the iteration opens.
            if here.serves_all:
                self._agreed_epoch = settling.epoch
        self._wait -= 1
        if self._wait <= 0:
            num_stages = self._context.view.num_stages
            self._wait = _SETTLE_TICKS_PER_STAGE * num_stages + 2 * _SEARCH_TICKS
            search.settle(settling.epoch + 1)

    @override
    def received(self, sender: NodeId, message: RoutingMessage) -> None:
        """Take in a peer's message of the context's view."""
        if self._search is not None and isinstance(message, self._search.MESSAGES):
            self._search.received(sender, message)

    @override
    def adopt(self, epoch: int, flows: RelayFlows | DataFlows) -> bool:
        """Use the flows of a settlement from now on. Returns whether that changes anything."""
        if self._search is None or epoch <= self.epoch:
            return False
        part = self._search.settling.of(epoch)
        node_id = self._context.node_id
        if isinstance(flows, DataFlows):
            flows.adopt({k: flow for k, flow in part.flows.items() if k.data_node == node_id})
        else:
            flows.adopt(part.hops)
        self.epoch = epoch
        self._known = tuple(
            KnownFlow(flow_id, (flow_id.data_node, *flow.path, flow_id.data_node), flow.costs)
            for flow_id, flow in sorted(part.flows.items())
        )
        # Nodes hear of an opening at different times; till then they must not lose what it names.
        self._wait = max(self._wait, _PAUSE_TICKS)
        return True

    @override
    def carried(self) -> dict[FlowId, Granted]:
        """Return a data node's flows of an earlier view, as long as none are settled in this one.

        Wherever a relay is gone, or loads its stage's state first, another takes its place.
        """
        context = self._context
        view = self._context.view
        if self.epoch or not self._last or self._search is None:
            return {}
        ids = [*self._last]
        flows = [*self._last.values()]
        if any(len(flow.path) != view.num_stages - 1 for flow in flows):
            return {}
        paths = replaced(context, [f.path for f in flows], newest=context.iteration.number - 1)
        return {
            k: Granted(k, path[0], math.fsum(flow.costs), path, view.version)
            for k, path, flow in zip(ids, paths, flows, strict=True)
        }

    @override
    def known_flows(self, flows: RelayFlows | DataFlows) -> tuple[KnownFlow, ...]:
        """Return the flows in use: the settled ones at data nodes (at the leader all), or hops."""
        return self._known or super().known_flows(flows)
