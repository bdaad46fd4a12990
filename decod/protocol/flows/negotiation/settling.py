"""Settling: the units that a search has found become flows, with paths that data nodes know.

Every data node sends a claim along each unit that begins at it. A claim holds still what it
passes, and gathers what the links there cost; it ends at some data node, which tells the first.
One data node (the leader) gets all claims and decides whose flows they become
(`decod.protocol.flows.negotiation.settling`). Each data node installs its own along their paths. A
flow stands when its install message has come home. The leader is told when all of a data node's do.
Where units go is asked of the `Units` of either search.

Whatever is not answered is repeated, and every step may be: a claim goes the same way again, an
install is noted once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decod.ids import FlowId, NodeId
from decod.planner.deciding import Decided, LinkCosts, Unsettled
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.core.events import JobFinished
from decod.protocol.core.jobs import DecideFlows, FlowsDecided, Job
from decod.protocol.core.messages.routing_messages import (
    HOPS_MAX,
    Claim,
    Claimed,
    Claims,
    Hop,
    Install,
    Installed,
    Routes,
    Settle,
    SettledFlow,
)
from decod.protocol.flows.position import Position


def unsettled(gathered: Mapping[NodeId, Claims], position: Position) -> Unsettled:
    """Return the problem of whose flows the claimed units become, and along which paths.

    Args:
        gathered: What each data node claims.
        position: Of the settling one.
    """
    outward = _Told()
    inward = _Told()
    paths: list[tuple[NodeId, ...]] = []
    compute_s: dict[NodeId, float] = {}
    for data_node, claims in sorted(gathered.items()):
        outward.add(data_node, claims.costs)
        inward.add(data_node, claims.inward)
        compute_s[data_node] = claims.compute_s
        for hops in claims.claims:
            paths.append((data_node, *(hop.node_id for hop in hops)))
            for hop in hops:
                outward.add(hop.node_id, hop.costs)
                inward.add(hop.node_id, hop.inward)
                compute_s[hop.node_id] = hop.compute_s
    rooms = None if position.rooms is None else position.rooms()
    return Unsettled(
        paths=tuple(paths),
        capacities=tuple(
            (data_node, claims.capacity) for data_node, claims in sorted(gathered.items())
        ),
        outward=tuple(outward.entries),
        inward=tuple(inward.entries),
        compute_s=tuple(compute_s.items()),
        rooms=None if rooms is None else tuple(tuple(room.items()) for room in rooms),
        fair=position.fair,
        crowding=position.crowding,
        work_max=position.work_max,
    )


def flows_of(
    decided: Iterable[Decided], data_nodes: Iterable[NodeId]
) -> dict[NodeId, tuple[SettledFlow, ...]]:
    """Return the flows of each data node, which may be none."""
    flows: dict[NodeId, list[SettledFlow]] = {data_node: [] for data_node in data_nodes}
    for chosen in decided:
        path = chosen.route.path
        flows[path[0]].append(SettledFlow(path[1:-1], chosen.costs))
    return {data_node: tuple(own) for data_node, own in flows.items()}


def as_claimed(gathered: Mapping[NodeId, Claims]) -> dict[NodeId, tuple[SettledFlow, ...]]:
    """Return each data node's claims as its flows: they came home to it (GWTF)."""
    decided: dict[NodeId, tuple[SettledFlow, ...]] = {}
    for data_node, claims in sorted(gathered.items()):
        first = dict(claims.costs)
        flows = list[SettledFlow]()
        for hops in claims.claims:
            ends = [hop.node_id for hop in hops[1:]] + [data_node]
            costs = [dict(hop.costs).get(end) for hop, end in zip(hops, ends, strict=True)]
            known = [first[hops[0].node_id], *(cost for cost in costs if cost is not None)]
            if len(known) == len(hops) + 1:
                flows.append(SettledFlow(tuple(hop.node_id for hop in hops), tuple(known)))
        decided[data_node] = tuple(flows)
    return decided


class _Told:
    """Costs of links as nodes have told them: once for all claims that passed a node."""

    def __init__(self) -> None:
        self.entries: list[tuple[NodeId, LinkCosts]] = []
        self._last: dict[NodeId, LinkCosts] = {}

    def add(self, node_id: NodeId, costs: LinkCosts) -> None:
        if self._last.get(node_id) != costs:
            self._last[node_id] = costs
            self.entries.append((node_id, costs))


@dataclass(slots=True)
class Settler:
    """Gathers all claims of one settlement, and tells every data node its flows.

    For decod's search that is a job (`planner.deciding`). GWTF's flows are those that were claimed.
    A decision that fails is asked for again with the next repeated report. One that comes when its
    settlement has been given up is dropped.
    """

    position: Position
    view_version: int
    tell: Callable[[NodeId, Routes], None]
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

    def tell_again(self) -> None:
        """Tell other data nodes that have not said that they installed their flows."""
        for peer in sorted(self._settled.keys() - self._installed - {self.position.node_id}):
            self.tell(peer, self._settled[peer])

    def received(self, sender: NodeId, message: Claims | Installed) -> None:
        """Take in what a data node reports."""
        if isinstance(message, Claims):
            self._gather(sender, message)
        else:
            self._installed.add(sender)

    def _gather(self, sender: NodeId, message: Claims) -> None:
        """Take in the claims of a data node, and decide when those of all are here."""
        position = self.position
        everybody = {position.node_id, *position.data_peers}
        if sender not in everybody:
            return
        if sender in self._settled:
            self.tell(sender, self._settled[sender])
            return
        if self._deciding is not None or not self._acceptable(message):
            return
        self._gathered[sender] = message
        for hops in message.claims:
            position.heard(hops)
        if self._gathered.keys() != everybody:
            return
        if self.compute is None:
            self._tell_all(as_claimed(self._gathered))
        else:
            self._deciding = DecideFlows(unsettled(self._gathered, position))
            self.compute.submit(self._deciding, self)

    def _acceptable(self, message: Claims) -> bool:
        """Whether a data node may claim this: no more than it can carry, and whole paths only."""
        if not 0 <= len(message.claims) <= message.capacity:
            return False
        heads = {peer for peer, _ in message.costs}
        complete = self.position.complete_path
        return all(complete(hops) and hops[0].node_id in heads for hops in message.claims)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """Tell the data nodes what has been decided."""
        if job is self._deciding:
            assert isinstance(event.result, FlowsDecided)
            self._deciding = None
            self._tell_all(flows_of(event.result.flows, self._gathered))

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """Let the next repeated report try again; till then the flows of before are used."""
        if job is self._deciding:
            self._deciding = None

    def _tell_all(self, decided: Mapping[NodeId, tuple[SettledFlow, ...]]) -> None:
        for data_node, flows in decided.items():
            self._settled[data_node] = Routes(self.view_version, self.epoch, flows)
        for data_node in sorted(self._settled):
            self.tell(data_node, self._settled[data_node])


_REPEAT_TICKS = 16
"""What was not answered for so long is said again. Longer than a message's way along a path."""

_HOLD_TICKS_PER_STAGE = 2
"""How long the draft stands still, beyond 16 rounds: all claims have passed by then. What has been
settled does not depend on it any more."""

_PARTS_KEPT = 2
"""Settlements before the present one of which a node still knows its part: while a round is opened
with one, the next may already be made."""

_INWARD_MAX = 16
"""Links from the stage before of which a claim says the cost. They show ways through relays that no
claim has passed; more of them would make claims too large where stages are."""

SettlingMessage = Settle | Claim | Claimed | Claims | Routes | Install | Installed


@dataclass(frozen=True, slots=True)
class SettledHop:
    """One settled flow at one relay."""

    upstream: NodeId
    downstream: NodeId


Way = tuple[NodeId, NodeId, NodeId]
"""Of a claim: the data node where it begins, where it came from, and where it went on."""

Hops = dict[FlowId, SettledHop]
Flows = dict[FlowId, SettledFlow]


@dataclass(frozen=True, slots=True)
class SettlementPart:
    """What one node knows of one settlement."""

    hops: Hops = field(default_factory=dict)
    """At a relay: the flows that it carries."""
    flows: Flows = field(default_factory=dict)
    """At a data node: its own; at the settling node those of all."""


class Units(Protocol):
    """What one node knows of the units that a search has found so far."""

    frozen: bool
    """A claim has passed: nothing changes here meanwhile."""

    @property
    def passable(self) -> bool:
        """Whether every unit that comes in goes on, and nothing is under way."""

    def beginning(self) -> Sequence[NodeId]:
        """At a data node: where each unit that begins here goes on."""

    def onward(self, data_node: NodeId, upstream: NodeId, taken: Iterable[Way]) -> NodeId | None:
        """Return where a unit goes on that no other claim has taken; None: it has been let go.

        Args:
            data_node: Where it begins.
            upstream: Where it comes from.
            taken: Of the claims that have gone on from here.
        """


@dataclass(slots=True)
class Settling:
    """One node's part in settling the units of one search."""

    position: Position
    units: Units
    view_version: int
    settler: NodeId
    """The data node that decides whose flows the claims become."""
    compute: ComputeQueue | None = None
    """At the settling node: takes the job of deciding. None: flows are what was claimed."""
    hops: Hops = field(default_factory=dict)
    """At a relay: the flows that have been installed."""
    flows: Flows = field(default_factory=dict)
    """At a data node: its flows that have been installed."""
    epoch: int = 0
    _before: dict[int, SettlementPart] = field(default_factory=dict)
    """The last settlements, by epoch."""
    _stood: Flows = field(default_factory=dict)
    """The newest of these of which all flows stood."""
    _age: int = 0
    _waiting: dict[FlowId, Claim] = field(default_factory=dict)
    """Claims that can't go on yet, because the units still change here."""
    _forwarding: dict[FlowId, Way] = field(default_factory=dict)
    """The way of each claim past here."""
    _claimed: dict[FlowId, tuple[Hop, ...]] = field(default_factory=dict)
    _begun: bool = False
    _routes: Flows | None = None
    here: Settler | None = field(init=False, default=None)
    """At the settling node: what it decides."""

    def __post_init__(self) -> None:
        if self.settler == self.position.node_id:
            self.here = Settler(self.position, self.view_version, self._to, self.compute)

    def begin(self, epoch: int) -> None:
        """At a data node: claim the draft's units that begin here."""
        if epoch != self.epoch:
            self._enter(epoch)
        self.units.frozen = True
        self._begun = True
        self._tell_others()
        self.go_on()

    def _tell_others(self) -> None:
        """At the settling node: have all data nodes claim."""
        if self.here is not None:
            settle = Settle(self.view_version, self.epoch)
            self.position.out.send_all(self.here.silent, settle)

    @property
    def decided(self) -> Mapping[FlowId, SettledFlow]:
        """At a data node: flows that are its own by the settlement. They stand when they are in
        `flows`."""
        return self._routes or {}

    @property
    def complete(self) -> bool:
        """At a data node: whether all its flows of the settlement stand."""
        return self._routes is not None and self.flows.keys() == self._routes.keys()

    @property
    def stood(self) -> Flows:
        """At a data node: its flows of the newest settlement of which all stand."""
        return self.flows if self.complete else self._stood

    @property
    def agreed(self) -> bool:
        """At the settling node: whether all flows of all data nodes stand."""
        return self.here is not None and self.complete and self.here.all_installed

    def knows(self, epoch: int) -> bool:
        """Whether every node that has come as far as this one still knows a settlement."""
        return self.epoch - epoch <= _PARTS_KEPT

    def of(self, epoch: int) -> SettlementPart:
        """Return what this node knows of the present settlement or one of the last before it.

        Nothing, if it has not heard of it: then no flow of it comes by.
        """
        return self._present() if epoch == self.epoch else self._before.get(epoch, SettlementPart())

    def _present(self) -> SettlementPart:
        others = self.here.flows if self.here is not None else {}
        return SettlementPart(dict(self.hops), {**others, **self.flows})

    def tick(self) -> None:
        self.go_on()
        self._age += 1
        if self.units.frozen and self._age > _HOLD_TICKS_PER_STAGE * self.position.num_stages + 16:
            self.units.frozen = False
        if self._age % _REPEAT_TICKS == 0:
            self._repeat()

    def received(self, sender: NodeId, message: SettlingMessage) -> None:
        if message.epoch < self.epoch:
            return
        if message.epoch > self.epoch:
            self._enter(message.epoch)
        match message:
            case Settle() if sender == self.settler and self.position.data and not self._begun:
                self.begin(message.epoch)
            case Claim():
                self._claim(sender, message)
            case Claimed():
                self._claim_ended(sender, message)
            case Claims() | Installed() if self.here is not None:
                self.here.received(sender, message)
            case Routes():
                self._install(sender, message)
            case Install():
                self._note(sender, message)

    def _claim_ended(self, sender: NodeId, message: Claimed) -> None:
        if self._expected(sender, message):
            self._claimed[message.flow_id] = message.hops
            self.position.heard(message.hops)
            self._report()

    def _expected(self, sender: NodeId, message: Claimed) -> bool:
        """Whether an open claim of this node's can have ended as the sender says.

        A claim ends at a data node, or, with nothing, at a relay where its unit had been let go.
        """
        flow_id = message.flow_id
        hops = message.hops
        way = self._forwarding.get(flow_id)
        if way is None or flow_id in self._claimed or not self._begun:
            return False
        if flow_id.data_node != self.position.node_id:
            return False
        if not hops:
            return True
        data_nodes = {self.position.node_id, *self.position.data_peers}
        return (
            sender in data_nodes
            and hops[0].node_id == way[-1]
            and self.position.complete_path(hops)
        )

    # --- claims -------------------------------------------------------------------------------

    def _enter(self, epoch: int) -> None:
        if self.complete:
            self._stood = dict(self.flows)
        self._before[self.epoch] = self._present()
        self.epoch = epoch
        self._before = {k: v for k, v in self._before.items() if self.knows(k)}
        self._age = 0
        self._begun = False
        self._routes = None
        for kept in (self.hops, self.flows, self._forwarding, self._claimed, self._waiting):
            kept.clear()
        if self.here is not None:
            self.here.enter(epoch)

    def go_on(self) -> None:
        """Send claims on, as soon as the draft stands still here."""
        if not self.units.frozen or not self.units.passable:
            return
        if self._begun and not self._forwarding:
            self._claim_own()
        waiting = self._waiting
        self._waiting = {}
        for claim in waiting.values():
            self._pass_on(claim)

    def _claim_own(self) -> None:
        node_id = self.position.node_id
        for slot, peer in enumerate(self.units.beginning()):
            flow_id = FlowId(node_id, slot)
            self._forwarding[flow_id] = (node_id, node_id, peer)
            self._send_claim(peer, flow_id)
        if not self._forwarding:
            self._report()

    def _send_claim(self, peer: NodeId, flow_id: FlowId, hops: tuple[Hop, ...] = ()) -> None:
        claim = Claim(self.view_version, self.epoch, flow_id, hops)
        self.position.out.send(peer, claim)

    def _claim(self, sender: NodeId, claim: Claim) -> None:
        if sender not in self.position.previous or not self._can_go_on(claim):
            return
        self.units.frozen = True
        if self.position.data:
            self._end(claim, claim.hops)
        else:
            self._waiting[claim.flow_id] = claim
            self.go_on()

    def _end(self, claim: Claim, hops: tuple[Hop, ...]) -> None:
        """Tell the data node that sent a claim what has become of it."""
        claimed = Claimed(self.view_version, self.epoch, claim.flow_id, hops)
        self.position.out.send(claim.flow_id.data_node, claimed)

    def _can_go_on(self, claim: Claim) -> bool:
        """Whether the claim, with this node's hop, is still one that a path can have."""
        if self.position.data:
            return bool(claim.hops)
        passed = [hop.node_id for hop in claim.hops]
        return len(passed) < HOPS_MAX and self.position.node_id not in passed

    def _pass_on(self, claim: Claim) -> None:
        way = self._forwarding.get(claim.flow_id)
        if way is None:
            data_node = claim.flow_id.data_node
            upstream = claim.hops[-1].node_id if claim.hops else data_node
            onward = self.units.onward(data_node, upstream, self._forwarding.values())
            if onward is None:  # Its unit has been let go before it came.
                self._end(claim, ())
                return
            way = self._forwarding[claim.flow_id] = (data_node, upstream, onward)
        position = self.position
        hop = Hop(position.node_id, self._costs(), self._inward(), position.queue_cost())
        self._send_claim(way[-1], claim.flow_id, (*claim.hops, hop))

    def _report(self) -> None:
        """Tell the settler of all claims that began here, once they have all ended."""
        if not self._begun or self._claimed.keys() != self._forwarding.keys():
            return
        position = self.position
        claims = tuple(hops for _, hops in sorted(self._claimed.items()) if hops)
        message = Claims(
            view_version=self.view_version,
            epoch=self.epoch,
            capacity=position.capacity,
            costs=self._costs(),
            claims=claims,
            inward=self._inward(),
            compute_s=position.queue_cost(),
        )
        self._to(self.settler, message)

    def _costs(self) -> tuple[tuple[NodeId, float], ...]:
        """Return what this node's links to the next stage cost."""
        return tuple((peer, self.position.cost_to(peer)) for peer in self.position.next)

    def _inward(self) -> tuple[tuple[NodeId, float], ...]:
        """Return what this node's links from the stage before cost, or the cheapest of them."""
        costs = [(self.position.cost_from(peer), peer) for peer in self.position.previous]
        return tuple((peer, cost) for cost, peer in sorted(costs)[:_INWARD_MAX])

    def _to(self, receiver: NodeId, message: Claims | Routes | Installed) -> None:
        if receiver == self.position.node_id:
            self.received(receiver, message)
        else:
            self.position.out.send(receiver, message)

    # --- installing ---------------------------------------------------------------------------

    def _install(self, sender: NodeId, message: Routes) -> None:
        if sender != self.settler or not self._begun:
            return
        if self._routes is None:
            self.units.frozen = False
            node_id = self.position.node_id
            flows = enumerate(message.routes[: self.position.capacity])
            self._routes = {
                FlowId(node_id, i): flow for i, flow in flows if self._passable(flow.path)
            }
            self._send_installs()
        self._tell_installed()

    def _tell_installed(self) -> None:
        """Tell the settling node, once all flows are installed."""
        if self.complete:
            self._to(self.settler, Installed(self.view_version, self.epoch))

    def _passable(self, path: tuple[NodeId, ...]) -> bool:
        """Whether a path is one of this data node's, as far as it knows."""
        position = self.position
        if len(path) != position.num_stages or len(set(path)) != len(path):
            return False
        return path[0] in position.next and path[-1] in position.previous

    def _send_installs(self) -> None:
        for flow_id, flow in self.decided.items():
            if flow_id not in self.flows:
                install = Install(self.view_version, self.epoch, flow_id, flow.path)
                self.position.out.send(flow.path[0], install)

    def _note(self, sender: NodeId, message: Install) -> None:
        """Note this node's hop of a flow, and pass it on; at home, the flow is installed."""
        node_id = self.position.node_id
        path = message.path
        home = message.flow_id.data_node
        if node_id == home:
            settled = (self._routes or {}).get(message.flow_id)
            if settled is None or settled.path != path or sender != path[-1]:
                return
            self.flows[message.flow_id] = settled
            self._tell_installed()
            return
        if node_id not in path or len(path) != self.position.num_stages:
            return
        index = path.index(node_id)
        upstream = path[index - 1] if index else home
        downstream = path[index + 1] if index + 1 < len(path) else home
        if sender != upstream or upstream not in self.position.previous:
            return
        if downstream not in self.position.next:
            return
        self.units.frozen = False  # All claims have ended, wherever they went.
        known = message.flow_id in self.hops
        if not known and len(self.hops) >= self.position.capacity:
            return
        self.hops[message.flow_id] = SettledHop(upstream, downstream)
        assert len(self.hops) <= self.position.capacity, "a relay carries more than it has room for"
        self.position.out.send(downstream, message)

    def _repeat(self) -> None:
        """Say again what was not answered."""
        if not self._begun:
            return
        if self._routes is not None:
            if self.here is not None:
                self.here.tell_again()
            self._send_installs()
        else:
            self._tell_others()
            for flow_id, (_, _, peer) in self._forwarding.items():
                if flow_id not in self._claimed:
                    self._send_claim(peer, flow_id)
            self._report()
