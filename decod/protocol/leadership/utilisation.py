"""The leader's flooding query: how busy members are, and what their hosts keep.

The leader asks by the clock, and places candidates by the answers. Each member passes a question
down the tree, gathers the answers, and passes them up. If what hosts keep is asked for, each reads
that first, as its children do meanwhile.

Source: GWTF, section V-B. Deviation: the query goes down the announcement tree and comes back up
it, so that a node handles a bounded number of messages instead of one from each peer it knows.
"""

from itertools import count
from typing import Protocol

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.events import KeptRead, Received, StateForgotten, StateKept
from decod.protocol.core.messages import NodeLoad, UtilisationAnswer, UtilisationQuery
from decod.protocol.core.view import View, tree_place
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.seats import Seats
from decod.protocol.state.rollback import Mirrors
from decod.run.protocol_config import ProtocolConfig


class Polling:
    """Asks by the clock, and places candidates by the answers.

    Args:
        config: The run's.
        admission: Holds the candidates.
        seats: Keep the newest answers.
        out: The node's.
    """

    def __init__(
        self, config: ProtocolConfig, admission: Admission, seats: Seats, out: EffectSink[Effect]
    ) -> None:
        self.due_s: float | None = None
        self._out = out
        self._config = config
        self._admission = admission
        self._seats = seats
        self._ids = count(1)

    def start(self, now_s: float) -> None:
        self.due_s = now_s + self._config.admission_interval_s

    def renumber(self, term: int) -> None:
        """Another term begins: its questions are newer than all of an earlier one."""
        self._ids = count(term << 32)

    def ask(self, now_s: float, iteration: Iteration, view: View, *, with_kept: bool) -> None:
        """Ask the members of a view; where nobody can answer, place who waits for that."""
        config = self._config
        self.due_s = now_s + max(config.admission_interval_s, config.utilisation_interval_s)
        if view.version == 0 or view.idle_stages:
            self._admission.assign_waiting(view)
        if view.version > 0:
            # Where a stage has nobody, it also tells the others that the leader lives.
            query = UtilisationQuery(next(self._ids), iteration, with_kept)
            self._out.send(view.leader, query)

    def told(self, loads: tuple[NodeLoad, ...], view: View) -> None:
        """The answers of all members have come up the tree."""
        self._seats.told(loads)
        self._admission.assign_waiting(view)


class LoadReader(Protocol):
    """Returns how busy this node is and, if asked, what its host keeps."""

    def __call__(self, *, with_kept: bool) -> NodeLoad: ...


class Utilisation:
    """The newest query that has reached this node, and the answers to it so far.

    Args:
        context: The node's.
        keeping: What its host keeps.
        load: This node's own answer.
    """

    def __init__(self, context: Context, keeping: Mirrors, load: LoadReader) -> None:
        self._context = context
        self._out = context.out
        self._mirrors = keeping
        self._load = load
        self._query: UtilisationQuery | None = None
        self._missing: set[NodeId] = set()
        self._loads: list[NodeLoad] = []
        self._parent: NodeId | None = None

    def received(self, received: Received) -> None:
        """Take in a question or an answer."""
        if isinstance(received.message, UtilisationQuery):
            self.queried(received.message)
        else:
            assert isinstance(received.message, UtilisationAnswer)
            self.answered(received.sender, received.message)

    def queried(self, query: UtilisationQuery) -> None:
        """Ask the children; a leaf answers at once. A newer query replaces an older one."""
        if self._query is not None and query.query_id <= self._query.query_id:
            return
        context = self._context
        place = tree_place(context.view, context.node_id, fanout=context.run.protocol.tree_fanout)
        self._query = query
        self._parent = place.parent
        self._missing = {context.node_id, *place.children}
        self._loads = []
        self._out.send_all(place.children, query)
        if query.with_kept:
            self._mirrors.examine()
        self._answer()

    def told(self, event: StateKept | StateForgotten | KeptRead) -> None:
        """Something has changed on this host's disk, or has been read."""
        self._mirrors.told(event)
        self._answer()

    def _answer(self) -> None:
        """Give this node's own answer, once what it rests on has been read."""
        query = self._query
        own = self._context.node_id
        if query is None or own not in self._missing:
            return
        if query.with_kept and not self._mirrors.examined:
            return
        self._missing.discard(own)
        self._loads.insert(0, self._load(with_kept=query.with_kept))
        self._pass_up()

    def answered(self, sender: NodeId, answer: UtilisationAnswer) -> None:
        """A child's subtree has answered."""
        current = self._query is not None and answer.query_id == self._query.query_id
        if current and sender in self._missing:
            self._missing.discard(sender)
            self._loads.extend(answer.loads)
            self._pass_up()

    def complete(self) -> tuple[NodeLoad, ...] | None:
        """At the leader: everybody's answer, once, when all have come."""
        if self._query is None or self._missing or self._parent is not None or not self._loads:
            return None
        loads = tuple(self._loads)
        self._loads = []
        return loads

    def _pass_up(self) -> None:
        if self._missing or self._parent is None:
            return
        assert self._query is not None
        answer = UtilisationAnswer(self._query.query_id, self._query.iteration, tuple(self._loads))
        self._out.send(self._parent, answer)
