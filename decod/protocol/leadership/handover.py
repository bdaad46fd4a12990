"""How a leader that wants to leave gives its leadership to another data node.

    LEADING --asked, and another data node could lead--> ENDING --the iteration in hand ends-->
    RESIGNED --a view without it--> (stops)
        '--nobody has taken over--> elected again: ENDING, or it stays

A leader that resigns decides nothing more and says so to the other data nodes, again and again.
They stand at once, in their order, without asking whether it lives; it votes like everybody else.
So its successor comes by the rules of every election (`protocol.leadership.election`), only sooner,
and the iteration that had just been opened is repeated without it. If nobody is elected within two
timeouts it stands itself. Then it leads until all have voted for a commit, which shows that its
heirs live: for only a leader can find out that they do not, and let them in when they come back.
Who can't give the leadership to anybody stays, and says so: its daemon ends the run.
"""

import math

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.deadline import earliest
from decod.protocol.core.effects import Effect, Note, Send, Stop, StopReason
from decod.protocol.core.messages import Leave
from decod.protocol.leadership.campaign import ElectionState
from decod.protocol.leadership.election import Election
from decod.protocol.leadership.leader import UNDER_WAY, Leader, LeaderState
from decod.protocol.leadership.leader_watch import BEATS_PER_TIMEOUT

_GRACE = 3
"""How many election timeouts a leader whose time is up stays for its successor's election."""

_LISTEN_S = 0.5
"""How long a leader that is to leave listens before it resigns. Whoever stops all nodes of a run
at once stops those too that would have to elect another."""

_ENDED = (StopReason.SUPERSEDED, StopReason.REMOVED, StopReason.LEADER_LOST)


class Handover:
    """One node's part: it leads and wants to leave, or it may take the leadership over.

    Args:
        context: The node's.
        election: The node's.
    """

    def __init__(self, context: Context, election: Election) -> None:
        self._context = context
        self._election = election
        self.wanted = False
        """This node led when its operator asked it to leave, and goes as soon as another leads."""
        self._leave_by_s: float | None = None
        self._listens_until_s: float | None = None
        self._asked_term = 0
        """In which it was asked. In a later one it was elected again, because nobody else was."""
        self._ended = False
        """What was in hand then, or when it was elected again, has ended."""
        self._say_s: float | None = None
        """This node has resigned: when it says so again."""
        self._resigned_term = 0
        """The leader of this term has resigned."""
        self._stand_s: float | None = None

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._leave_by_s, self._listens_until_s, self._say_s, self._stand_s)

    @property
    def resigned(self) -> bool:
        """Whether the leader of this node's term has given its leadership up."""
        return self._resigned_term == self._context.view.term

    # --- the leader ---------------------------------------------------------------------------

    def possible(self, leader: Leader) -> bool:
        """Whether there is somebody to whom the run could go, and anything to go on with."""
        runs = leader.state not in (LeaderState.PAUSED, LeaderState.FINISHED)
        begun = runs and leader.started and not leader.quorum.lacking
        stay = {n for n in leader.view.by_id if n not in leader.leaving}
        elected = leader.quorum.chosen_by(stay, leader.view)
        return begun and elected and bool(self._heirs(leader))

    def _heirs(self, leader: Leader) -> list[NodeId]:
        """Return the other data nodes that stay."""
        data_nodes = [member.node_id for member in leader.view.data_nodes]
        return [n for n in data_nodes if n != leader.node_id and n not in leader.leaving]

    def ask(self, now_s: float, timeout_s: float) -> None:
        """The operator wants the leader to leave; asking again may shorten the time."""
        if not self.wanted:
            self.wanted, self._ended = True, False
            self._asked_term = self._context.view.term
            self._listens_until_s = now_s + _LISTEN_S
        if timeout_s < math.inf:
            self._leave_by_s = earliest(self._leave_by_s, now_s + timeout_s)

    def resign(self, now_s: float, leader: Leader) -> tuple[bool, list[Effect]]:
        """Give the leadership up, if the time has come. Returns whether it has."""
        late = self._leave_by_s is not None and self._leave_by_s <= now_s
        listens = self._listens_until_s is not None and now_s < self._listens_until_s
        if not self.wanted or (listens and not late):
            return False, []
        self._listens_until_s = None
        leader.partings.ask(leader.node_id)
        # Who has voted for a commit holds its stage's state; the others would ask this node for it.
        committed, members = leader.committed.number, leader.view.by_id
        ready = any(members[node].since_iteration < committed for node in self._heirs(leader))
        if not self.possible(leader) or (late and not ready):
            self.wanted, self._leave_by_s = False, None
            leader.partings.stay(leader.node_id)
            return False, [Note("handover.failed", (("reason", "no other data node can lead"),))]
        idle = self._first and leader.state not in UNDER_WAY
        ended = self._ended and leader.partings.free(leader.node_id)
        if not ready or not (ended or late or idle):
            return False, []
        self._ended = False
        if late:
            self._leave_by_s = now_s + _GRACE * self._context.run.protocol.election_timeout_s
        self._election.resign(now_s)
        note = Note("leader.resigned", (("term", self._context.view.term),))
        return True, [note, *self._say(now_s)]

    @property
    def _first(self) -> bool:
        """Whether this node has not resigned before, or not in vain."""
        return self._asked_term == self._context.view.term

    def _say(self, now_s: float) -> list[Effect]:
        context = self._context
        self._resigned_term = context.view.term
        self._say_s = now_s + context.run.protocol.election_timeout_s / BEATS_PER_TIMEOUT
        others = [m.node_id for m in context.view.data_nodes if m.node_id != context.node_id]
        return [Send(node, Leave("it hands over")) for node in others]

    def ended(self, stop: Stop) -> Stop:
        """Return how this node's end is told: a leader that has handed over was not voted out."""
        if self.wanted and stop.reason in _ENDED:
            return Stop(StopReason.DRAINED, stop.detail)
        return stop

    # --- the others ---------------------------------------------------------------------------

    def left(self, now_s: float, sender: NodeId, term: int) -> list[Effect]:
        """A node says that it leaves, and this one does not lead: does the leader resign?"""
        view = self._context.view
        if sender != view.leader or term != view.term or self.resigned:
            return []
        self._resigned_term = term
        return self._line_up(now_s)

    def _line_up(self, now_s: float) -> list[Effect]:
        """Stand in turn, so that the votes are not shared."""
        view, me = self._context.view, self._context.node_id
        others = [m.node_id for m in view.data_nodes if m.node_id != view.leader]
        if me in others:
            rank = others.index(me)
            self._stand_s = now_s + rank * self._context.run.protocol.election_timeout_s / 4
        return self._stand_when_due(now_s)

    def opened(self, now_s: float) -> list[Effect]:
        """An iteration has begun, which this node may have missed when it stood."""
        self._say_s = self._stand_s = None
        last, term = self._election.decisions.opened, self._context.view.term
        by_all = last is not None and last.committed and last.view_term == term
        self._ended |= by_all or self._first
        me_leads = self._context.view.leader == self._context.node_id
        return self._line_up(now_s) if self.resigned and not me_leads else []

    # --- time ---------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> list[Effect]:
        """This node does not lead (any more): stand, say again that it has resigned, or go."""
        self._listens_until_s = None
        if self._leave_by_s is not None and self._leave_by_s <= now_s:
            return [Stop(StopReason.DRAINED, "time was up before another data node led")]
        said = self._say(now_s) if self._say_s is not None and self._say_s <= now_s else []
        return said + self._stand_when_due(now_s)

    def _stand_when_due(self, now_s: float) -> list[Effect]:
        election = self._election
        if self._stand_s is None or self._stand_s > now_s:
            return []
        self._stand_s = now_s + self._context.run.protocol.election_timeout_s
        voted = election.bound and election.voter.promise.candidate != self._context.node_id
        busy = voted or election.campaign.state is ElectionState.STANDING
        return election.campaign.stand(now_s) if election.may_stand and not busy else []
