"""A handful of nodes that elect leaders in virtual time, over a network that loses and delays.

Of an iteration there is only what elections are about: members become ready at some time and say
so; when all have, the leader commits; when somebody is gone it repeats the iteration without that
member, if the rest are enough. Everything else that `NodeMachine` does is left out, so a second
lasts microseconds, and any order of events can come up.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import messages as m
from decod.protocol.core.context import NO_PROMISE, Context, Promise
from decod.protocol.core.effects import EffectSink
from decod.protocol.core.messages import decision_messages as em
from decod.protocol.core.view import Opening, View
from decod.protocol.leadership.election import Election
from decod.protocol.leadership.quorum import Quorum, electors_of
from decod.sim.kernel import Kernel
from tests.unit.protocol.cast import CONFIG, context_of, member, repeated, view_of

HASHES = ((0, "a"), (1, "b"))
STEP_S = 0.1


@dataclass(slots=True)
class Lead:
    """What a leader keeps of its term."""

    quorum: Quorum
    ready: set[NodeId] = field(default_factory=set)
    gone: set[NodeId] = field(default_factory=set)


@dataclass(slots=True)
class Content:
    """What an iteration has trained on."""

    term: int
    iteration: Iteration
    unanimous: bool
    """All members of the view had voted for it; else those that took part in an election."""
    seen_by: list["Node"] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """One life of a node."""

    context: Context
    election: Election
    alive: bool = True
    ready: bool = False
    lead: Lead | None = None
    steps: dict[int, tuple[int, Iteration]] = field(default_factory=dict)
    """The term and iteration of each iteration's step that it has taken."""


class Faults:
    """How bad the network is."""

    def __init__(self, *, loss: float = 0.0, duplicate: float = 0.0, delay_s: float = 0.05) -> None:
        self.loss, self.duplicate, self.delay_s = loss, duplicate, delay_s
        self.sides: dict[NodeId, int] = {}
        """Messages reach nodes of the same side only."""


class Electing:
    """The nodes, the wires, and what may never happen.

    Attributes:
        leaders: Of every term, who has led it.
        committed: Of every iteration, what came of it last.
    """

    def __init__(self, *names: str, seed: int) -> None:
        self.kernel = Kernel()
        self.rng = Random(seed)
        self.faults = Faults()
        self.nodes: dict[NodeId, Node] = {}
        self.disks: dict[NodeId, Promise] = {}
        self.leaders: dict[int, NodeId] = {}
        self.committed: dict[int, Content] = {}
        self.never_ready: set[NodeId] = set()
        """Who is never ready by itself."""
        self.trace: list[str] = []
        view = view_of(*names)
        opening = Opening(Iteration(1, 1), Iteration(0, 0), view)
        for member_ in view.members:
            self.nodes[member_.node_id] = self._node(member_.node_id, view, NO_PROMISE)
        for node in self.nodes:
            self._open(node, repeated(Iteration(1, 0), opening, "begin"))
        first = self.nodes[view.leader]
        first.lead = Lead(Quorum(view.leader, first.context.out))
        first.lead.quorum.opened(view)
        self.leaders[1] = view.leader
        self._beat()

    def _node(self, node_id: NodeId, view: View, promise: Promise) -> Node:
        context = context_of(node_id, view, iteration=Iteration(0, 0))
        rng = Random(self.rng.random())
        node: Node
        election = Election(context, rng, promise, lambda: HASHES if node.ready else ())
        node = Node(context, election)
        return node

    # --- what a test does ---------------------------------------------------------------------

    def run(self, duration_s: float) -> None:
        self.kernel.run(until_s=self.kernel.now_s + duration_s)

    def run_until(self, done: Callable[[], bool]) -> None:
        assert self.kernel.run(until_s=self.kernel.now_s + 60.0, done=done)

    def kill(self, node_id: NodeId) -> None:
        self.nodes[node_id].alive = False

    def restart(self, node_id: NodeId) -> None:
        """Begin a new life: all that is left of the old one is what it had on its disk."""
        old = self.nodes[node_id]
        old.alive = False
        empty = dataclasses.replace(old.context.view, version=0, term=1, members=())
        opening = Opening(Iteration(0, 0), Iteration(0, 0), empty)
        context = dataclasses.replace(old.context, opening=opening, out=EffectSink())
        promise = self.disks.get(node_id, NO_PROMISE)
        node: Node
        rng = Random(self.rng.random())
        election = Election(context, rng, promise, lambda: HASHES if node.ready else ())
        node = self.nodes[node_id] = Node(context, election)

    @property
    def acting(self) -> NodeId | None:
        """The living leader of the highest term that all members of its view follow."""
        leading = [n for n in self.nodes.values() if n.alive and n.lead is not None]
        if not leading:
            return None
        best = max(leading, key=lambda n: n.context.view.term)
        return best.context.node_id

    @property
    def iteration(self) -> int:
        return max(self.committed, default=0)

    # --- the wires ----------------------------------------------------------------------------

    def _perform(self, node_id: NodeId) -> None:
        node = self.nodes[node_id]
        for effect in node.context.out.taken():
            match effect:
                case fx.Send(to, message):
                    self._send(node_id, to, message)
                case fx.PersistVote(term, candidate) if candidate is not None:
                    self.kernel.after(0.01, self._persisted, node, Promise(term, candidate))
                case fx.Note(event):
                    self.trace.append(f"{self.kernel.now_s:.3f} {node_id} {event}")
        self._take(node)

    def _persisted(self, node: Node, promise: Promise) -> None:
        node_id = node.context.node_id
        if node.alive and self.nodes[node_id] is node:
            self.disks[node_id] = promise
            node.election.persisted(self.kernel.now_s, promise)
            self._perform(node_id)

    def _send(self, sender: NodeId, to: NodeId, message: m.Message) -> None:
        faults = self.faults
        if faults.sides.get(sender) != faults.sides.get(to) or self.rng.random() < faults.loss:
            return
        num = 2 if self.rng.random() < faults.duplicate else 1
        term = self.nodes[sender].context.view.term
        for _ in range(num):
            delay_s = self.rng.uniform(0.001, faults.delay_s)
            self.kernel.after(delay_s, self._arrive, sender, to, term, message)

    def _arrive(  # noqa: C901 - a line each.
        self, sender: NodeId, to: NodeId, term: int, message: m.Message
    ) -> None:
        node = self.nodes.get(to)
        if node is None or not node.alive:
            return
        election, now_s = node.election, self.kernel.now_s
        ours = node.context.view.term
        if term == ours:
            election.heard(now_s, sender)
        elif term > ours and sender in node.context.view and election.superseded(now_s, term):
            node.lead = None
        match message:
            case em.Canvass():
                election.canvassed(now_s, sender, message)
            case em.CanvassAnswer():
                election.campaign.answered(now_s, sender, message)
            case em.Candidacy():
                election.stood(now_s, sender, message)
            case em.Vote():
                election.campaign.voted(now_s, sender, message)
            case em.Confirm():
                election.confirm(now_s, sender, message)
            case em.LeaderIs():
                if election.superseded(now_s, message.term):
                    node.lead = None
                election.led_by(message)
            case m.CatchUp(iteration):
                election.catch_up(sender, iteration, view_term=term)
            case m.Ping(nonce):
                node.context.out.send(sender, m.Pong(nonce))
            case m.Pong(nonce):
                election.check.answered(sender, nonce)
            case m.Open():
                self._open(to, message)
            case m.Ready() if term == ours and node.lead is not None:
                if message.averaging == node.context.averaging:
                    node.lead.ready.add(sender)
        if 0 < term < ours:
            election.tell(sender)
        self._perform(to)

    # --- iterations -------------------------------------------------------------------------------

    def _open(self, node_id: NodeId, decision: m.Open) -> None:
        node, opening = self.nodes[node_id], decision.opening
        context = node.context
        if (opening.view.term, opening.iteration) <= (context.view.term, context.iteration):
            return
        if node.election.voter.withstands(decision):
            return
        if node_id not in opening.view:
            if context.view.members:
                node.alive = False
            return
        committed = opening.committed
        if context.view.members and committed.number > max(node.steps, default=0):
            term = self.committed[committed.number].term
            voted_in = (term, committed) == (context.view.term, context.iteration)
            if not node.ready or not voted_in:
                node.alive = False  # It is not in step.
                return
            self._step(node)
        context.adopt(opening.view)
        context.opening = opening
        node.ready = False
        if opening.view.leader != node_id:
            node.lead = None
        node.election.adopt(self.kernel.now_s, decision)
        self._perform(node_id)

    def _take(self, node: Node) -> None:
        won = node.election.campaign.take()
        if won is None:
            return
        view, last, me = node.context.view, node.election.decisions.opened, node.context.node_id
        assert last is not None
        other = self.leaders.setdefault(won.term, me)
        assert other == me, f"term {won.term} is led by {me} and {other}\n" + self.told()
        node.lead = Lead(Quorum(me, node.context.out))
        old = {won.old} - {me}
        if won.hashes:
            node.lead.quorum.committed(view)
            self._commit(node, term=won.term, without=old)
        else:
            node.lead.quorum.committed(view, electors_of(won.last.opening))
            self._repeat(node, term=won.term, without=old)

    def _commit(self, node: Node, *, term: int, without: set[NodeId]) -> None:
        iteration, opened = node.context.iteration, node.context.view.term
        content = Content(opened, iteration, unanimous=not without)
        before = self.committed.get(iteration.number)
        if before is not None and (before.term, before.iteration) != (opened, iteration):
            raise AssertionError(f"{before} and {content}\n" + self.told())
        self.committed[iteration.number] = before or content
        self._announce(
            node, Iteration(iteration.number + 1, 1), iteration, term=term, without=without
        )

    def _step(self, node: Node) -> None:
        """A node takes the step of its iteration; nobody beside it may have taken another."""
        iteration, view = node.context.iteration, node.context.view
        content = self.committed[iteration.number]
        assert (content.term, content.iteration) == (view.term, iteration), self.told()
        node.steps[iteration.number] = (view.term, iteration)
        content.seen_by.append(node)

    def _repeat(self, node: Node, *, term: int, without: set[NodeId]) -> None:
        iteration, last = node.context.iteration, node.election.decisions.opened
        assert last is not None
        again = Iteration(iteration.number, iteration.attempt + 1)
        self._announce(node, again, last.opening.committed, term=term, without=without)

    def _announce(
        self,
        node: Node,
        iteration: Iteration,
        committed: Iteration,
        *,
        term: int,
        without: set[NodeId],
    ) -> None:
        lead, old, me = node.lead, node.context.view, node.context.node_id
        assert lead is not None
        members = [member(i) for i in old.by_id if i not in without]
        # Whoever has begun a new life is taken in again.
        fresh = [n for n, other in self.nodes.items() if not other.context.view.members]
        members += [member(n) for n in fresh if self.nodes[n].alive and n not in old]
        view = dataclasses.replace(
            view_of(*members, version=old.version + 1, leader=me, num_stages=old.num_stages),
            term=term,
        )
        if not lead.quorum.allows(view):
            return
        lead.ready, lead.gone = set(), set()
        lead.quorum.opened(view)
        electors = lead.quorum.told_with(view)
        opening = Opening(iteration, committed, view, electors=electors)
        decision = repeated(iteration, opening, "")
        self._open(me, decision)
        for other in sorted({*old.by_id, *view.by_id} - {me}):
            self._send(me, other, decision)

    # --- time ---------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Let every node look at its deadline, and do what it does by the clock."""
        now_s = self.kernel.now_s
        for node_id in sorted(self.nodes):
            node = self.nodes[node_id]
            if not node.alive or node_id not in node.context.view:
                continue
            deadline_s = node.election.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                node.election.overdue(now_s)
                self._perform(node_id)
            self._pipeline(node_id, node)
        self.kernel.after(STEP_S, self._beat)

    def _pipeline(self, node_id: NodeId, node: Node) -> None:
        view = node.context.view
        node.ready = node.ready or (node_id not in self.never_ready and self.rng.random() < 0.1)
        if node.ready and not node.election.voter.bound:
            self._send(
                node_id,
                view.leader,
                m.Ready(AveragingId(node.context.iteration, view.version), HASHES),
            )
        if node.lead is None:
            self._send(node_id, view.leader, m.Heartbeat(node.context.iteration))
            return
        for other in sorted(view.by_id.keys() - {node_id}):
            assert node.election.decisions.opened is not None
            self._send(node_id, other, node.election.decisions.opened)
        if node.ready and not view.by_id.keys() - node.lead.ready - {node_id}:
            node.lead.quorum.committed(view)
            self._commit(node, term=view.term, without=set())
        elif self.rng.random() < 0.05:
            # A real leader finds out by pings; one that is unlucky takes a live one for dead.
            reach = self.faults.sides
            gone = {
                n
                for n in view.by_id
                if not self.nodes[n].alive
                or not self.nodes[n].context.view.members
                or reach.get(n) != reach.get(node_id)
            }
            if gone - {node_id} or self.rng.random() < 0.2:
                self._repeat(node, term=view.term, without=gone - {node_id})

    def told(self) -> str:
        return "\n".join(self.trace[-40:])


assert CONFIG.election_timeout_s > 4 * STEP_S
