"""What a node knows of the flows through it, one hop each, and how hops are changed.

The hops begin as the first flows, which Request Flow has built (`building`), and are changed from
then on without a thought of these. A hop's name is its link's: the node before refers to the link
by it. A first flow has the same name at all nodes; a node that takes over a hop gives it a new one.
At a data node each flow has two hops: a source, which comes from itself, and a sink, which leads
to itself.

`HopChanges` are GWTF's Request Change and Request Redirect. `Annealing` says whether a change is
worth it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from decod.ids import FlowId, NodeId
from decod.planner.graph import Objective
from decod.protocol.core.messages.routing_messages import (
    ExchangeHops,
    HopsAnswer,
    HopsDecision,
    HopsRequest,
    LinkUse,
    NextHop,
    RequestRedirect,
)
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.position import Position

_NEW_NUMBERS = 1 << 20
"""Numbers from here on are of hops that were taken over: above the slots of all first flows."""

_SOURCES = 1 << 30
"""Numbers from here on are of sources. They are no links' names, so nobody is told of them."""


_BUILD_TICKS_PER_STAGE = 4
"""How long Request Flow takes to build the first flows, beyond two rounds."""


def build_ticks(position: Position) -> int:
    """Return how long the first flows are left alone."""
    return _BUILD_TICKS_PER_STAGE * position.num_stages + 2


@dataclass(slots=True)
class FlowHop:
    """One flow at one node."""

    data_node: NodeId
    number: int
    upstream: NodeId
    next: NextHop
    version: int = 0
    locked: bool = False
    """Promised to a change; no other may touch it."""

    @property
    def name(self) -> FlowId:
        return FlowId(self.data_node, self.number)


@dataclass(slots=True)
class FlowHops:
    """All hops of one node. At a relay at most `position.capacity`."""

    position: Position
    hops: dict[FlowId, FlowHop] = field(default_factory=dict)
    num_reserved: int = 0
    """Hops that a redirect under way may bring: room for them is kept."""
    frozen: bool = False
    """A claim has passed: the hops stand still."""
    num_building: int = 0
    """At a relay: first flows that may yet become whole: room for them is kept too."""
    _first: set[FlowId] = field(default_factory=set)
    """Names of first flows' hops that were taken up."""
    _open: set[FlowId] = field(default_factory=set)
    """At a relay: first flows that were not whole when it last looked."""
    _num_quiet_ticks: int = 0
    """Since when these are the same."""
    _last_number: int = _NEW_NUMBERS

    def __iter__(self) -> Iterator[FlowHop]:
        return iter(self.hops.values())

    def new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def add(self, name: FlowId, upstream: NodeId, next_hop: NextHop) -> FlowHop:
        hop = self.hops[name] = FlowHop(name.data_node, name.slot, upstream, next_hop)
        return hop

    def get(self, data_node: NodeId, number: int) -> FlowHop | None:
        return self.hops.get(FlowId(data_node, number))

    # --- first flows --------------------------------------------------------------------------

    def begin_with(self, flows: RelayFlows | DataFlows) -> None:
        """Take up first flows that have become whole at this node; let go of those that broke."""
        found = _first_hops(self.position.node_id, flows)
        for name in self._first - found.keys():
            hop = self.hops.get(name)
            if hop is not None and not hop.version and not hop.locked and not self.frozen:
                self._first.discard(name)
                del self.hops[name]
        for name in sorted(found.keys() - self._first):
            if not self.frozen and (self.position.data or len(self.hops) < self.position.capacity):
                self._first.add(name)
                self.add(name, *found[name])
        if isinstance(flows, RelayFlows):
            self._keep_room(flows)

    def _keep_room(self, flows: RelayFlows) -> None:
        """Count first flows that may yet become whole, as long as any of them still moves."""
        unfinished = flows.entries.keys() - self._first
        self._num_quiet_ticks = 0 if unfinished != self._open else self._num_quiet_ticks + 1
        self._open = unfinished
        quiet = self._num_quiet_ticks > build_ticks(self.position) and not flows.growing
        self.num_building = flows.num_pending + (0 if quiet else len(unfinished))

    # --- which there are ----------------------------------------------------------------------

    @property
    def room(self) -> int:
        """At a relay: flows more that it could carry."""
        return self.position.capacity - len(self.hops) - self.num_reserved - self.num_building

    def with_next(self, data_node: NodeId, peer: NodeId, number: int) -> FlowHop | None:
        """Return the hop that goes on along a link."""
        for hop in self:
            if hop.data_node == data_node and (hop.next.peer, hop.next.number) == (peer, number):
                return hop
        return None

    def num_to(self, peer: NodeId) -> int:
        """Return f(i, j) of the link to a neighbour."""
        return sum(hop.next.peer == peer for hop in self)

    def num_from(self, peer: NodeId) -> int:
        """Return f(i, j) of the link from a neighbour."""
        return sum(hop.upstream == peer for hop in self)

    # --- what settling asks -------------------------------------------------------------------

    @property
    def passable(self) -> bool:
        """Whether no change is under way here."""
        return not self.num_reserved and not any(hop.locked for hop in self)

    def beginning(self) -> list[NodeId]:
        """At a data node: where each flow that begins here goes on."""
        return [hop.next.peer for hop in self if hop.upstream == self.position.node_id]

    def onward(
        self, data_node: NodeId, upstream: NodeId, taken: Iterable[tuple[NodeId, NodeId, NodeId]]
    ) -> NodeId | None:
        """Return where a flow of a data node goes on that no other claim has taken.

        Flows of one data node that come along one link are as good as each other.
        """
        used = [onward for *link, onward in taken if link == [data_node, upstream]]
        for hop in self:
            if (hop.data_node, hop.upstream) != (data_node, upstream):
                continue
            if hop.next.peer not in used:
                return hop.next.peer
            used.remove(hop.next.peer)
        return None

    # --- changes ------------------------------------------------------------------------------

    def remove(self, hop: FlowHop) -> None:
        del self.hops[hop.name]

    def relink(self, hop: FlowHop, upstream: NodeId, next_hop: NextHop) -> None:
        hop.upstream = upstream
        hop.next = next_hop
        hop.version += 1


def _first_hops(
    node_id: NodeId, flows: RelayFlows | DataFlows
) -> dict[FlowId, tuple[NodeId, NextHop]]:
    """Return where each first flow at a node comes from and goes on to, by its hop's name."""
    paired = flows.outflows.paired
    if isinstance(flows, RelayFlows):
        return {
            flow_id: (paired[flow_id], NextHop(entry.downstream, flow_id.slot))
            for flow_id, entry in flows.entries.items()
            if flow_id in paired
        }
    found = {
        FlowId(node_id, _SOURCES + flow_id.slot): (node_id, NextHop(granted.peer, flow_id.slot))
        for flow_id, granted in flows.complete.items()
    }
    sinks = {flow_id: (peer, NextHop(node_id, 0)) for flow_id, peer in paired.items()}
    return found | sinks


TEMPERATURE = 1.7
COOLING = 0.95
_UNITS_PER_LINK = 10.0
"""What a link costs on average, normalised."""

_NO_DIFFERENCE = 1e-9


def difference(objective: Objective, *, less: Sequence[LinkUse], more: Sequence[LinkUse]) -> float:
    """Return what the objective grows by if links lose, and others get, one flow each.

    Only these links are looked at: with the objective MAX a change counts as good if the largest
    f(i, j) * d(i, j) among them falls, as in the paper's example, wherever the largest of all is.
    """
    if objective is Objective.SUM:
        return sum(link.cost for link in more) - sum(link.cost for link in less)
    before = [link.cost * link.num_flows for link in (*less, *more)]
    after = [link.cost * (link.num_flows - 1) for link in less]
    after += [link.cost * (link.num_flows + 1) for link in more]
    return max(after) - max(before)


def cost_unit(position: Position) -> float:
    """Return the cost that counts as 1 at a node. Above 0."""
    costs = [position.cost_to(peer) for peer in position.next]
    costs += [position.cost_from(peer) for peer in position.previous]
    mean = sum(costs) / len(costs) if costs else 0.0
    return mean / _UNITS_PER_LINK if mean > 0 else 1.0


@dataclass(slots=True)
class Annealing:
    """One node's temperature.

    A change that lowers the objective is accepted; one that raises it by `delta` is with
    probability exp(-delta / T). T begins at 1.7 and is multiplied by 0.95 with each accepted change
    (GWTF V-C). Costs are normalised: the paper does not say how; here by a tenth of the mean cost
    of the links that a node knows, so that the same T fits costs in seconds and costs from 1 to 20.
    A change that leaves the objective as it is, is refused: it could be made for ever.
    """

    rng: Random
    unit: float
    """See `cost_unit`."""
    temperature: float = TEMPERATURE
    cooling: float = COOLING
    """T is multiplied by this after each accepted change."""

    def accepts(self, delta: float) -> bool:
        """Decide on a change that makes the objective grow by `delta`; draws only if it does."""
        if delta < -_NO_DIFFERENCE:
            return True
        if delta <= _NO_DIFFERENCE or self.temperature <= 0:
            return False
        return math.exp(-delta / self.unit / self.temperature) > self.rng.random()

    def cool(self) -> None:
        self.temperature *= self.cooling


_PATIENCE_TICKS = 6
"""How long the asker waits for answers before it drops a change."""

_REPEAT_TICKS = 4
"""How long a participant waits for the decision before it repeats its answer."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """What a change does to one hop."""

    hop: FlowHop
    upstream: NodeId | None
    next: NextHop | None
    """None, for both: the flow leaves this node."""


@dataclass(slots=True)
class _Asked:
    request: HopsRequest
    waiting: set[NodeId]
    others: Sequence[NodeId]
    edits: list[_Edit]
    age: int = 0


@dataclass(slots=True)
class _Promised:
    """A change that this node has promised to take part in."""

    edits: list[_Edit]
    answer: HopsAnswer
    judged: bool
    """The change is about a flow of this node, which has judged it; else this node is a
    neighbour."""
    age: int = 0


@dataclass(slots=True)
class HopChanges:
    """One node's changes under way, as asker and as participant.

    The paper's two nodes agree, and then tell the next ones, who must simply follow. Here those are
    asked too: the asker sends its request to the node whose flow it is about, which judges the
    change as it sees it, and to the neighbours that would get another node before or after them,
    which only look whether they have the link. Each locks the hop and says so; a hop that is
    locked, or not as the request says (its version, its links), is refused. If all agree the asker
    decides to make the change, else, or after a while, not to; that decision is made once. A
    participant repeats its answer until it hears the decision, so that no loss of messages leaves
    it behind.
    """

    position: Position
    hops: FlowHops
    annealing: Annealing
    view_version: int
    _next_id: int = 1
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _made: set[int] = field(default_factory=set)
    _promised: dict[tuple[NodeId, int], _Promised] = field(default_factory=dict)
    _settled: set[tuple[NodeId, int]] = field(default_factory=set)

    @property
    def asking(self) -> bool:
        return bool(self._asked)

    @property
    def next_id(self) -> int:
        """The id that the next request must carry."""
        return self._next_id

    def tick(self) -> None:
        """Let time pass: drop what was not answered, ask again what was decided."""
        for change_id, asked in list(self._asked.items()):
            asked.age += 1
            if asked.age > _PATIENCE_TICKS:
                self._decide(change_id, made=False)
        for (asker, _), promised in self._promised.items():
            promised.age += 1
            if promised.age % _REPEAT_TICKS == 0:
                self.position.out.send(asker, promised.answer)

    # --- as asker -----------------------------------------------------------------------------

    def ask(self, request: HopsRequest) -> bool:
        """Ask all that it touches for a change. Returns whether this node can make its part."""
        assert request.change_id == self._next_id
        node_id = self.position.node_id
        edits: list[_Edit] = []
        if isinstance(request, ExchangeHops):
            own = self._edits(node_id, request)
            if own is None:
                return False
            edits = own
            others = {request.other, request.next.peer, request.other_next.peer}
        else:
            others = {request.other, request.upstream, request.next.peer}
            self.hops.num_reserved += 1
        self._lock(edits)
        self._next_id += 1
        self._asked[request.change_id] = _Asked(request, set(others), sorted(others), edits)
        self.position.out.send_all(sorted(others), request)
        return True

    def answered(self, sender: NodeId, answer: HopsAnswer) -> None:
        """Count a participant's answer; decide with the last one."""
        asked = self._asked.get(answer.change_id)
        if asked is None:
            if answer.agreed:
                made = answer.change_id in self._made
                decision = HopsDecision(self.view_version, answer.change_id, made)
                self.position.out.send(sender, decision)
        elif sender in asked.others:
            asked.waiting.discard(sender)
            if not (answer.agreed and asked.waiting):
                self._decide(answer.change_id, made=answer.agreed)

    def _decide(self, change_id: int, *, made: bool) -> None:
        """Decide on what this node asked for, once and for all."""
        asked = self._asked.pop(change_id)
        request = asked.request
        self._unlock(asked.edits)
        if isinstance(request, RequestRedirect):
            self.hops.num_reserved -= 1
        if made:
            self._made.add(change_id)
            self.annealing.cool()
            self._apply(asked.edits)
            if isinstance(request, RequestRedirect):
                name = FlowId(request.data_node, request.number)
                self.hops.add(name, request.upstream, request.next)
            self._note(request)
        decision = HopsDecision(self.view_version, change_id, made)
        self.position.out.send_all(asked.others, decision)

    def _note(self, request: HopsRequest) -> None:
        """Note that a change of a flow was made."""
        exchange = isinstance(request, ExchangeHops)
        event = "flow.exchanged" if exchange else "flow.redirected"
        self.position.out.note(event, data_node=request.data_node, other=request.other)

    # --- as participant -----------------------------------------------------------------------

    def requested(self, sender: NodeId, request: HopsRequest, *, refuse: bool = False) -> None:
        """Promise to take part, or refuse."""
        key = (sender, request.change_id)
        if key in self._settled:
            return
        if (known := self._promised.get(key)) is not None:
            self.position.out.send(sender, known.answer)
            return
        edits = None if refuse else self._edits(sender, request)
        judged = request.other == self.position.node_id
        agreed = edits is not None and (not judged or self._judge(request))
        answer = HopsAnswer(self.view_version, request.change_id, agreed)
        if edits is not None and agreed:
            self._lock(edits)
            self._promised[key] = _Promised(edits, answer, judged)
        self.position.out.send(sender, answer)

    def decided(self, sender: NodeId, decision: HopsDecision) -> None:
        """Make a promised change, or unlock what was locked for it."""
        key = (sender, decision.change_id)
        self._settled.add(key)
        promised = self._promised.pop(key, None)
        if promised is None:
            return
        self._unlock(promised.edits)
        if decision.made:
            self._apply(promised.edits)
            if promised.judged:
                self.annealing.cool()

    def _judge(self, request: HopsRequest) -> bool:
        """Return whether this node, too, thinks the change good, with what it sees by now."""
        position = self.position
        hops = self.hops

        def use(peer: NodeId) -> LinkUse:
            return LinkUse(position.cost_to(peer), hops.num_to(peer))

        if isinstance(request, ExchangeHops):
            if request.next.peer not in position.next:
                return False
            less = [request.less, use(request.other_next.peer)]
            more = [request.more, use(request.next.peer)]
        else:
            cost = position.cost_from(request.upstream)
            num = hops.num_from(request.upstream)
            less = [LinkUse(cost, num), use(request.next.peer)]
            more = [*request.more]
        return self.annealing.accepts(difference(position.objective, less=less, more=more))

    # --- what a change does here --------------------------------------------------------------

    def _edits(self, asker: NodeId, request: HopsRequest) -> list[_Edit] | None:
        """Return what a change does to this node's hops; None if they are not as it says."""
        node_id = self.position.node_id
        if node_id == request.other != asker and asker not in self.position.stage_peers:
            return None  # Flows are exchanged, and handed over, within a stage.
        if isinstance(request, ExchangeHops):
            edits = self._edits_of_exchange(asker, request)
        else:
            edits = self._edits_of_redirect(asker, request)
        found = [edit for edit in edits if edit is not None]
        if not found or len(found) < len(edits):
            return None
        ready = all(
            edit.hop.data_node == request.data_node and not edit.hop.locked for edit in found
        )
        return found if ready else None

    def _edits_of_exchange(self, asker: NodeId, request: ExchangeHops) -> list[_Edit | None]:
        node_id = self.position.node_id
        edits: list[_Edit | None] = []
        if node_id == asker:
            edits.append(self._onward(request, request.number, request.next, request.other_next))
        if node_id == request.other:
            hop = self.hops.get(request.data_node, request.other_number)
            fresh = hop is not None and hop.version == request.other_version
            edit = self._onward(request, request.other_number, request.other_next, request.next)
            edits.append(edit if fresh else None)
        if node_id == request.next.peer:
            edits.append(self._inward(request, request.next.number, asker, request.other))
        if node_id == request.other_next.peer:
            edits.append(self._inward(request, request.other_next.number, request.other, asker))
        return edits

    def _edits_of_redirect(self, asker: NodeId, request: RequestRedirect) -> list[_Edit | None]:
        node_id = self.position.node_id
        edits: list[_Edit | None] = []
        if node_id == request.other:
            hop = self.hops.get(request.data_node, request.other_number)
            same = (
                hop is not None
                and hop.version == request.other_version
                and hop.upstream == request.upstream
                and request.next == hop.next
            )
            edits.append(_Edit(hop, None, None) if same and hop is not None else None)
        if node_id == request.upstream:
            hop = self.hops.with_next(request.data_node, request.other, request.other_number)
            to_asker = NextHop(asker, request.number)
            reachable = asker in self.position.next
            edits.append(_Edit(hop, hop.upstream, to_asker) if hop and reachable else None)
        if node_id == request.next.peer:
            edits.append(self._inward(request, request.next.number, request.other, asker))
        return edits

    def _onward(
        self, request: HopsRequest, number: int, before: NextHop, after: NextHop
    ) -> _Edit | None:
        hop = self.hops.get(request.data_node, number)
        same = hop is not None and before == hop.next
        return _Edit(hop, hop.upstream, after) if same and hop is not None else None

    def _inward(
        self, request: HopsRequest, number: int, before: NodeId, after: NodeId
    ) -> _Edit | None:
        hop = self.hops.get(request.data_node, number)
        if hop is None or hop.upstream != before or after not in self.position.previous:
            return None
        return _Edit(hop, after, hop.next)

    def _lock(self, edits: list[_Edit]) -> None:
        for edit in edits:
            edit.hop.locked = True

    def _unlock(self, edits: list[_Edit]) -> None:
        for edit in edits:
            edit.hop.locked = False

    def _apply(self, edits: list[_Edit]) -> None:
        for edit in edits:
            if edit.upstream is None or edit.next is None:
                self.hops.remove(edit.hop)
            else:
                self.hops.relink(edit.hop, edit.upstream, edit.next)
