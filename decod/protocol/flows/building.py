"""Flows, built from the sinks backwards (GWTF V-C, Request Flow).

A flow is one microbatch slot of a data node. It begins as an *unpaired outflow*: first at the data
node itself, as sink (cost 0). Whoever has unpaired outflows tells the previous stage what the
cheapest costs to the sink (`FlowCost`). A node with spare capacity asks for the one that is
cheapest for it, link included (`RequestFlow`); the owner pairs the outflow with the asker, or
refuses and says its current cost. The asker now has an unpaired outflow itself, and tells *its*
previous stage. When a data node gets one from the first relay stage, the flow is complete: it
returns to where it began, because a data node asks only for flows to itself.

Three rules make this end, and end the same on every replay:

- All of it belongs to one version of the view; a new view starts from nothing.
- A request carries an id and the cost that the asker believes. It is granted once, refused if the
  price has risen, and taken back by `Withdraw` if the asker stopped waiting for the answer.
- What a relay carries for each data node is bounded by `flow_quota`, so scarce capacity is shared.
  Where the nodes that know each other can't fill their quotas so, the bound on data nodes falls
  after one answer timeout, and that on the relay's share after two.

Lost messages: an unanswered request is withdrawn and made anew; an announcement that nobody took
up is repeated, less and less often.

These first flows are soon there and valid, not the cheapest. The search for better ones goes on
beside them (`searching`); between two iterations its result takes their place (`adopt`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from decod.ids import FlowId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.events import earliest
from decod.protocol.core.messages import FlowAnswer, FlowCost, RequestFlow, Withdraw
from decod.protocol.core.messages.routing_messages import SettledFlow
from decod.protocol.core.view import flow_quota, flow_room
from decod.protocol.flows.negotiation.settling import SettledHop

_REPEAT_MAX_S = 60.0
"""Longest pause between two repeats of an announcement that nobody took up."""

_ANNOUNCE_INTERVAL_S = 0.05
"""Least time between two announcements: a burst of changes is told once, at its end (I8)."""


class Outflows:
    """A node's outflows, offered to the previous stage: pairs each with at most one asker."""

    def __init__(self, now_s: float, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._repeat_interval_s = context.run.protocol.answer_timeout_s
        self._repeat_s = now_s + self._repeat_interval_s
        self.unpaired: dict[FlowId, float] = {}
        """Cost to sink of each outflow without inflow."""
        self.paired: dict[FlowId, NodeId] = {}
        """The previous-stage node that each paired outflow's microbatches come from."""
        self.paths: dict[FlowId, tuple[NodeId, ...]] = {}
        """At a relay: the relays that each outflow passes from here on, this one first."""
        self._answers: dict[tuple[NodeId, int], FlowAnswer] = {}
        self._withdrawn: set[tuple[NodeId, int]] = set()
        self._announced: dict[NodeId, tuple[float, int]] = {}
        self._announced_s = -math.inf
        self._announce_s: float | None = None

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._announce_s, self._repeat_s) if self.unpaired else self._announce_s

    def overdue(self, now_s: float) -> None:
        """Announce what has changed; repeat the announcement of what nobody took up."""
        if self._announce_s is not None and self._announce_s <= now_s:
            self._announce_now(now_s)
        if self.unpaired and self._repeat_s <= now_s:
            self._repeat_interval_s = min(2 * self._repeat_interval_s, _REPEAT_MAX_S)
            self._repeat_s = now_s + self._repeat_interval_s
            self._announced.clear()
            self._announce_now(now_s)

    def add(self, now_s: float, costs_s: Mapping[FlowId, float]) -> None:
        """Offer outflows; says so to the previous stage."""
        self.unpaired.update(costs_s)
        self._announce(now_s)

    def remove(self, now_s: float, flow_id: FlowId) -> None:
        self.paired.pop(flow_id, None)
        self.paths.pop(flow_id, None)
        if self.unpaired.pop(flow_id, None) is not None:
            self._announce(now_s)

    def requested(self, now_s: float, sender: NodeId, request: RequestFlow) -> None:
        """Answer a request: pair an outflow with the sender, or refuse."""
        key = (sender, request.request_id)
        if (answer := self._answers.get(key)) is not None:
            self._out.send(sender, answer)
            return
        flow_id = None
        if key not in self._withdrawn and sender in self._context.neighbours.previous:
            flow_id = self._cheapest(request.data_node, limit_s=request.cost_s)
        cost_s = math.inf
        if flow_id is not None:
            cost_s = self.unpaired.pop(flow_id)
            self.paired[flow_id] = sender
        else:
            cost_s = self._offer(request.data_node)[0]
        answer = FlowAnswer(
            view_version=request.view_version,
            request_id=request.request_id,
            flow_id=flow_id,
            cost_s=cost_s,
            num_unpaired=self._offer(request.data_node)[1],
            path=self.paths.get(flow_id, ()) if flow_id is not None else (),
        )
        if flow_id is not None:
            self._answers[key] = answer
        self._out.send(sender, answer)
        self._announce(now_s)

    def withdrawn(self, sender: NodeId, request_id: int) -> FlowId | None:
        """Take back what a request was granted; returns the flow, which the owner offers again."""
        key = (sender, request_id)
        self._withdrawn.add(key)
        answer = self._answers.pop(key, None)
        if answer is None or answer.flow_id is None:
            return None
        if self.paired.pop(answer.flow_id, None) is None:
            return None
        return answer.flow_id

    def _announce(self, now_s: float) -> None:
        """Tell the previous stage of a change, or soon if it has just been told of another."""
        if now_s - self._announced_s >= _ANNOUNCE_INTERVAL_S:
            self._announce_now(now_s)
        elif self._announce_s is None:
            self._announce_s = self._announced_s + _ANNOUNCE_INTERVAL_S

    def _announce_now(self, now_s: float) -> None:
        """Tell the previous stage the cheapest cost to each sink, where that has changed."""
        self._announce_s = None
        for data_node in sorted({f.data_node for f in self.unpaired} | self._announced.keys()):
            offer = self._offer(data_node)
            if self._announced.get(data_node, (math.inf, 0)) == offer:
                continue
            self._announced[data_node] = offer
            self._announced_s = now_s
            cost = FlowCost(
                view_version=self._context.view.version,
                data_node=data_node,
                cost_s=offer[0],
                num_unpaired=offer[1],
                compute_s=self._context.links.compute_s,
            )
            self._out.send_all(self._listeners(data_node), cost)

    def _listeners(self, data_node: NodeId) -> tuple[NodeId, ...]:
        """Return who may take up an outflow: before the first stage, its own data node alone."""
        first = self._context.member.stage_index == 1
        return (data_node,) if first else self._context.neighbours.previous

    def _offer(self, data_node: NodeId) -> tuple[float, int]:
        costs = [cost for f, cost in self.unpaired.items() if f.data_node == data_node]
        return min(costs, default=math.inf), len(costs)

    def _cheapest(self, data_node: NodeId, *, limit_s: float) -> FlowId | None:
        """Return the cheapest unpaired outflow, unless the price is above what was believed."""
        offers = [(cost, f) for f, cost in self.unpaired.items() if f.data_node == data_node]
        if not offers or min(offers)[0] > limit_s:
            return None
        return min(offers)[1]


@dataclass(slots=True)
class FlowOffer:
    """What a node of the next stage says of its unpaired outflows to one data node."""

    cost_s: float
    """Of the cheapest, from there to the sink."""
    num_unpaired: int
    compute_s: float


Price = Callable[[NodeId, FlowOffer, int], float]
"""What an offered flow costs from here; see `Routing.price_s`."""


@dataclass(slots=True)
class _Request:
    peer: NodeId
    data_node: NodeId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    """An outflow of the next stage that is now paired with this node."""

    flow_id: FlowId
    peer: NodeId
    cost_s: float
    """To the sink, this node's link included."""
    path: tuple[NodeId, ...]
    """The relays that it passes, `peer` first. Empty: the peer is the sink."""
    path_version: int = 0
    """Not 0: version of the view in which another took a lost relay's place."""


@dataclass(slots=True)
class Inflows:
    """What the next stage offers, and this node's requests for it."""

    context: Context
    price_s: Price
    _offers: dict[tuple[NodeId, NodeId], FlowOffer] = field(default_factory=dict)
    _requests: dict[int, _Request] = field(default_factory=dict)
    _next_id: int = 1
    _uses: Counter[NodeId] = field(default_factory=Counter)
    """Flows that come from each peer, or may still come."""

    @property
    def deadline_s(self) -> float | None:
        # All requests wait equally long, so the oldest is due first.
        return next(iter(self._requests.values())).deadline_s if self._requests else None

    def num_requested(self, data_node: NodeId | None = None) -> int:
        if data_node is None or not self._requests:
            return len(self._requests)
        return sum(data_node == r.data_node for r in self._requests.values())

    def announced(self, sender: NodeId, message: FlowCost) -> None:
        if sender in self.context.neighbours.next:
            self._offers[sender, message.data_node] = FlowOffer(
                message.cost_s, message.num_unpaired, message.compute_s
            )

    def request(self, now_s: float, room: Mapping[NodeId, int], *, limit: int) -> None:
        """Ask for the cheapest outflows: at most `room` for each data node, `limit` in all."""
        left = dict(room)
        for _ in range(limit):
            best = min(
                (
                    (self.price_s(peer, offer, self._uses[peer]), peer, data_node)
                    for (peer, data_node), offer in self._offers.items()
                    if offer.num_unpaired > 0 and left.get(data_node, 0) > 0
                ),
                default=None,
            )
            if best is None:
                break
            _, peer, data_node = best
            left[data_node] -= 1
            self._ask(now_s, peer, data_node)

    def _ask(self, now_s: float, peer: NodeId, data_node: NodeId) -> None:
        offer = self._offers[peer, data_node]
        offer.num_unpaired -= 1
        self._uses[peer] += 1
        request_id = self._next_id
        self._next_id += 1
        deadline_s = now_s + self.context.run.protocol.answer_timeout_s
        self._requests[request_id] = _Request(peer, data_node, deadline_s)
        self.context.out.send(
            peer,
            RequestFlow(
                view_version=self.context.view.version,
                request_id=request_id,
                data_node=data_node,
                cost_s=offer.cost_s,
            ),
        )

    def answered(self, sender: NodeId, answer: FlowAnswer) -> Granted | None:
        """Take in an answer; late ones (already withdrawn) change nothing."""
        request = self._requests.get(answer.request_id)
        if request is None or request.peer != sender:
            return None
        del self._requests[answer.request_id]
        offer = self._offers[sender, request.data_node]
        pending = sum(
            r.peer == sender and r.data_node == request.data_node for r in self._requests.values()
        )
        offer.num_unpaired = max(0, answer.num_unpaired - pending)
        flow_id = answer.flow_id
        if flow_id is None or not self._leads_home(sender, request.data_node, answer):
            offer.cost_s = answer.cost_s if flow_id is None else math.inf
            self._uses[sender] -= 1
            return None
        if offer.cost_s == math.inf:
            # What came before this said later that nothing was left, and named no price.
            offer.cost_s = answer.cost_s
        link_s = self.context.links.cost_s(sender, peer_compute_s=offer.compute_s)
        return Granted(flow_id, sender, answer.cost_s + link_s, answer.path)

    def _leads_home(self, sender: NodeId, home: NodeId, answer: FlowAnswer) -> bool:
        """Whether a granted path passes one relay of each stage from here on, its sender first."""
        assert answer.flow_id is not None
        view = self.context.view
        path = answer.path
        wanted = [*range(self.context.member.stage_index + 1, view.num_stages)]
        stages = [view.by_id[node].stage_index if node in view else None for node in path]
        return answer.flow_id.data_node == home and stages == wanted and sender == (*path, home)[0]

    def overdue(self, now_s: float) -> None:
        """Withdraw the requests that nobody answered."""
        for request_id, request in list(self._requests.items()):
            if request.deadline_s <= now_s:
                del self._requests[request_id]
                self._uses[request.peer] -= 1
                withdraw = Withdraw(self.context.view.version, request_id)
                self.context.out.send(request.peer, withdraw)


@dataclass(slots=True)
class RelayFlow:
    """One flow through a relay."""

    flow_id: FlowId
    downstream: NodeId
    cost_s: float
    """From this node to the sink."""


class _Flows:
    """Both halves of a node's flows: what it offers upstream and what it asks for downstream."""

    def __init__(self, now_s: float, context: Context, price_s: Price) -> None:
        self._context = context
        self._out = context.out
        self._price_s = price_s
        self.outflows = Outflows(now_s, context)
        self._inflows = Inflows(context, price_s)
        self._active = False
        self.final = False
        """There will be no more in this iteration."""

    def activate(self, now_s: float) -> None:
        """Begin to ask for flows. What was offered before has been remembered."""
        self._active = True
        self._seek(now_s)

    def settle(self, upstream: Mapping[FlowId, NodeId]) -> None:
        """Take settled flows in place of those that were built; ask and offer no more."""
        self._active = False
        self.final = True
        self._inflows = Inflows(self._context, self._price_s)
        self.outflows.unpaired.clear()
        self.outflows.paired.clear()
        self.outflows.paired.update(upstream)

    def freeze(self) -> None:
        """Keep what there is until the iteration is over; ask and offer no more."""
        self.settle(dict(self.outflows.paired))

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._inflows.deadline_s, self.outflows.deadline_s)

    @property
    def num_pending(self) -> int:
        """Requests that may still bring a flow; they count against the capacity (I1)."""
        return self._inflows.num_requested()

    def announced(self, now_s: float, sender: NodeId, message: FlowCost) -> None:
        self._inflows.announced(sender, message)
        self._seek(now_s)

    def requested(self, now_s: float, sender: NodeId, request: RequestFlow) -> None:
        """Answer a Request Flow."""
        self.outflows.requested(now_s, sender, request)

    def withdrawn(self, now_s: float, sender: NodeId, message: Withdraw) -> None:
        """Offer again what a request was granted that its sender has given up."""
        flow_id = self.outflows.withdrawn(sender, message.request_id)
        if flow_id is not None:
            self.outflows.add(now_s, {flow_id: self._cost_s(flow_id)})

    @property
    def next_nodes(self) -> set[NodeId]:
        """To whom microbatches go along these flows."""
        raise NotImplementedError

    def behind(self, flow_id: FlowId) -> NodeId | None:
        """Return to whom an outflow's microbatches go on. None: here they are at home."""
        raise NotImplementedError

    def carry(self, carried: Callable[[], dict[FlowId, Granted]]) -> None:
        """Go on with a data node's flows of an earlier view."""

    def overdue(self, now_s: float) -> None:
        self._inflows.overdue(now_s)
        self.outflows.overdue(now_s)
        self._seek(now_s)

    def _seek(self, now_s: float) -> None:
        """Ask for what there is room for."""
        raise NotImplementedError

    def _cost_s(self, flow_id: FlowId) -> float:
        """Return what an outflow of this node costs to the sink."""
        raise NotImplementedError


class RelayFlows(_Flows):
    """A relay's flows: every outflow that it got is offered on, and paired with an inflow."""

    def __init__(self, now_s: float, context: Context, price_s: Price) -> None:
        super().__init__(now_s, context, price_s)
        self.entries: dict[FlowId, RelayFlow] = {}
        self._quota = flow_quota(context.view, context.node_id)
        self.room = flow_room(context.view, context.node_id)
        wait_s = context.run.protocol.answer_timeout_s
        self._relax_s = [now_s + 2 * wait_s, now_s + wait_s]
        """When a bound falls, last first."""

    @property
    def growing(self) -> bool:
        """Whether a bound may still fall, and bring flows that it has kept away."""
        return self._active and bool(self._relax_s)

    @property
    @override
    def deadline_s(self) -> float | None:
        due_s = super().deadline_s
        return earliest(due_s, self._relax_s[-1]) if self._relax_s and self._active else due_s

    @override
    def overdue(self, now_s: float) -> None:
        while self._relax_s and self._relax_s[-1] <= now_s:
            self._relax_s.pop()
        super().overdue(now_s)

    @property
    def num_complete(self) -> int:
        return len(self.outflows.paired)

    @property
    @override
    def next_nodes(self) -> set[NodeId]:
        return {entry.downstream for entry in self.entries.values()}

    @override
    def behind(self, flow_id: FlowId) -> NodeId | None:
        entry = self.entries.get(flow_id)
        return entry.downstream if entry is not None else None

    def answered(self, now_s: float, sender: NodeId, answer: FlowAnswer) -> None:
        granted = self._inflows.answered(sender, answer)
        if granted is not None:
            entry = RelayFlow(granted.flow_id, granted.peer, granted.cost_s)
            self.entries[granted.flow_id] = entry
            self.outflows.paths[granted.flow_id] = (self._context.node_id, *granted.path)
            self.outflows.add(now_s, {granted.flow_id: granted.cost_s})
        self._seek(now_s)

    @override
    def freeze(self) -> None:
        super().freeze()
        paired = self.outflows.paired
        self.entries = {flow_id: e for flow_id, e in self.entries.items() if flow_id in paired}

    @override
    def _cost_s(self, flow_id: FlowId) -> float:
        return self.entries[flow_id].cost_s

    def adopt(self, hops: Mapping[FlowId, SettledHop]) -> None:
        """Use settled flows from now on."""
        self.room = flow_room(self._context.view, self._context.node_id)
        self.settle({flow_id: hop.upstream for flow_id, hop in hops.items()})
        self.entries.clear()
        for flow_id, hop in hops.items():
            cost_s = self._context.links.cost_s(hop.downstream)
            self.entries[flow_id] = RelayFlow(flow_id, hop.downstream, cost_s)

    def drop(self, now_s: float, flow_id: FlowId) -> None:
        """Forget a flow that proved broken; its slot becomes free."""
        if self.entries.pop(flow_id, None) is not None:
            self.outflows.remove(now_s, flow_id)
            self._seek(now_s)

    @override
    def _seek(self, now_s: float) -> None:
        taken = len(self.entries) + self.num_pending
        free = self.room - taken
        if free <= 0 or not self._active:
            return
        if len(self._relax_s) < 2:
            share = sum(self._quota.values()) if self._relax_s else self.room
            limit = min(free, share - taken)
            room = {data.node_id: limit for data in self._context.view.data_nodes}
        else:
            limit = free
            room = {
                data_node: quota
                - sum(f.data_node == data_node for f in self.entries)
                - self._inflows.num_requested(data_node)
                for data_node, quota in self._quota.items()
            }
        self._inflows.request(now_s, room, limit=limit)


class DataFlows(_Flows):
    """A data node's flows: sink of its slots towards the last stage, source towards the first."""

    def __init__(self, now_s: float, context: Context, price_s: Price) -> None:
        super().__init__(now_s, context, price_s)
        self.complete: dict[FlowId, Granted] = {}
        """Flows that lead from the first relay stage all the way home."""
        self.carried: dict[FlowId, Granted] = {}
        """Flows of an earlier view; relays know nothing of them, and take what comes along them as
        they take what comes along a changed path."""

    @property
    def forwarding(self) -> dict[FlowId, Granted]:
        """What microbatches go along."""
        return self.carried or self.complete

    @property
    def num_complete(self) -> int:
        return len(self.complete)

    @property
    @override
    def next_nodes(self) -> set[NodeId]:
        return {granted.peer for granted in self.forwarding.values()}

    @override
    def behind(self, flow_id: FlowId) -> NodeId | None:
        return None

    @override
    def carry(self, carried: Callable[[], dict[FlowId, Granted]]) -> None:
        self.carried = carried()

    @override
    def activate(self, now_s: float) -> None:
        """Offer all slots to the last relay stage, and begin to ask the first."""
        node_id = self._context.node_id
        num_slots = self._context.member.capacity
        slots = {FlowId(node_id, slot): 0.0 for slot in range(num_slots)}
        self.outflows.add(now_s, slots)
        super().activate(now_s)

    @override
    def announced(self, now_s: float, sender: NodeId, message: FlowCost) -> None:
        if message.data_node == self._context.node_id:
            super().announced(now_s, sender, message)

    def answered(self, now_s: float, sender: NodeId, answer: FlowAnswer) -> None:
        granted = self._inflows.answered(sender, answer)
        if granted is not None:
            self.complete[granted.flow_id] = granted
            self._out.note(
                "flow.completed",
                flow=str(granted.flow_id),
                first=granted.peer,
                cost_s=granted.cost_s,
            )
        self._seek(now_s)

    @override
    def _cost_s(self, flow_id: FlowId) -> float:
        return 0.0

    def adopt(self, flows: Mapping[FlowId, SettledFlow]) -> None:
        """Use settled flows from now on."""
        self.settle({flow_id: flow.path[-1] for flow_id, flow in flows.items()})
        self.carried = {}
        self.complete.clear()
        for flow_id, flow in flows.items():
            cost_s = math.fsum(flow.costs)
            self.complete[flow_id] = Granted(flow_id, flow.path[0], cost_s, flow.path)

    def drop(self, flow_id: FlowId) -> None:
        """Forget a flow that proved broken. Its slot stays taken until the next view."""
        self.forwarding.pop(flow_id, None)

    @override
    def _seek(self, now_s: float) -> None:
        free = self._context.member.capacity - len(self.complete) - self.num_pending
        if free > 0 and self._active:
            self._inflows.request(now_s, {self._context.node_id: free}, limit=free)
