"""Request Change and Request Redirect (GWTF V-C): all nodes that a change touches make it, or none.

The paper's two nodes agree, and then tell the next ones, who must simply follow. Here those are
asked too: the asker sends its request to the node whose flow it is about, which judges the change
as it sees it, and to the neighbours that would get another node before or after them, which only
look whether they have the link. Each locks the hop and says so; a hop that is locked, or not as
the request says (its version, its links), is refused. If all agree the asker decides to make the
change, else, or after a while, not to; that decision is made once. A participant repeats its
answer until it hears the decision, so that no loss of messages leaves it behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decod.ids import FlowId, NodeId
from decod.protocol.core.effects import Effect, Note, Send
from decod.protocol.core.messages.routing_messages import (
    ExchangeHops,
    HopsAnswer,
    HopsDecision,
    HopsRequest,
    LinkUse,
    NextHop,
    RequestRedirect,
)
from decod.protocol.flows.gwtf.annealing import Annealing, difference
from decod.protocol.flows.gwtf.hops import FlowHop, FlowHops
from decod.protocol.flows.position import Position

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
    """It is about a flow of this node, which has judged it; else it is a neighbour."""
    age: int = 0


@dataclass(slots=True)
class HopChanges:
    """One node's changes under way, as asker and as participant."""

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

    def tick(self) -> list[Effect]:
        """Let time pass: drop what was not answered, ask again what was decided."""
        effects: list[Effect] = []
        for change_id, asked in list(self._asked.items()):
            asked.age += 1
            if asked.age > _PATIENCE_TICKS:
                effects += self._decide(change_id, made=False)
        for (asker, _), promised in self._promised.items():
            promised.age += 1
            if promised.age % _REPEAT_TICKS == 0:
                effects.append(Send(asker, promised.answer))
        return effects

    # --- as asker -----------------------------------------------------------------------------

    def ask(self, request: HopsRequest) -> list[Effect]:
        """Ask all that it touches for a change."""
        assert request.change_id == self._next_id
        node_id = self.position.node_id
        edits: list[_Edit] = []
        if isinstance(request, ExchangeHops):
            own = self._edits(node_id, request)
            if own is None:
                return []
            edits = own
            others = {request.other, request.next.peer, request.other_next.peer}
        else:
            others = {request.other, request.upstream, request.next.peer}
            self.hops.num_reserved += 1
        self._lock(edits)
        self._next_id += 1
        self._asked[request.change_id] = _Asked(request, set(others), sorted(others), edits)
        return [Send(other, request) for other in sorted(others)]

    def answered(self, sender: NodeId, answer: HopsAnswer) -> list[Effect]:
        """Count a participant's answer; decide with the last one."""
        asked = self._asked.get(answer.change_id)
        if asked is None:
            made = answer.change_id in self._made
            decision = HopsDecision(self.view_version, answer.change_id, made)
            return [Send(sender, decision)] if answer.agreed else []
        if sender not in asked.others:
            return []
        if not answer.agreed:
            return self._decide(answer.change_id, made=False)
        asked.waiting.discard(sender)
        return [] if asked.waiting else self._decide(answer.change_id, made=True)

    def _decide(self, change_id: int, *, made: bool) -> list[Effect]:
        """Decide on what this node asked for, once and for all."""
        asked = self._asked.pop(change_id)
        request, effects = asked.request, list[Effect]()
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
            effects.append(_note(request))
        decision = HopsDecision(self.view_version, change_id, made)
        return effects + [Send(other, decision) for other in asked.others]

    # --- as participant -----------------------------------------------------------------------

    def requested(
        self, sender: NodeId, request: HopsRequest, *, refuse: bool = False
    ) -> list[Effect]:
        """Promise to take part, or refuse."""
        key = (sender, request.change_id)
        if key in self._settled:
            return []
        if (known := self._promised.get(key)) is not None:
            return [Send(sender, known.answer)]
        edits = None if refuse else self._edits(sender, request)
        judged = request.other == self.position.node_id
        agreed = edits is not None and (not judged or self._judge(request))
        answer = HopsAnswer(self.view_version, request.change_id, agreed)
        if edits is not None and agreed:
            self._lock(edits)
            self._promised[key] = _Promised(edits, answer, judged)
        return [Send(sender, answer)]

    def decided(self, sender: NodeId, decision: HopsDecision) -> list[Effect]:
        """Make a promised change, or unlock what was locked for it."""
        key = (sender, decision.change_id)
        self._settled.add(key)
        promised = self._promised.pop(key, None)
        if promised is None:
            return []
        self._unlock(promised.edits)
        if decision.made:
            self._apply(promised.edits)
            if promised.judged:
                self.annealing.cool()
        return []

    def _judge(self, request: HopsRequest) -> bool:
        """Return whether this node, too, thinks the change good, with what it sees by now."""
        position, hops = self.position, self.hops

        def use(peer: NodeId) -> LinkUse:
            return LinkUse(position.cost_to(peer), hops.num_to(peer))

        if isinstance(request, ExchangeHops):
            if request.next.peer not in position.next:
                return False
            less = [request.less, use(request.other_next.peer)]
            more = [request.more, use(request.next.peer)]
        else:
            cost, num = position.cost_from(request.upstream), hops.num_from(request.upstream)
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


def _note(request: HopsRequest) -> Effect:
    """Return the note that a change of a flow was made."""
    fields = (("data_node", request.data_node), ("other", request.other))
    exchange = isinstance(request, ExchangeHops)
    return Note("flow.exchanged" if exchange else "flow.redirected", fields)
