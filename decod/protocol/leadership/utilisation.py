"""One node's part in the leader's flooding query: pass it down, gather the answers, pass them up.

If what hosts keep is asked for, each reads that first, as its children do meanwhile.

Source: GWTF, section V-B. Deviation: the query goes down the announcement tree and comes back up
it, so that a node handles a bounded number of messages instead of one from each peer it knows.
"""

from typing import Protocol

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.events import KeptRead, Received, StateForgotten, StateKept
from decod.protocol.core.messages import NodeLoad, UtilisationAnswer, UtilisationQuery
from decod.protocol.core.view import tree_place
from decod.protocol.state.mirrors import Mirrors


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
        self._mirrors = keeping
        self._load = load
        self._query: UtilisationQuery | None = None
        self._missing: set[NodeId] = set()
        self._loads: list[NodeLoad] = []
        self._parent: NodeId | None = None

    def received(self, received: Received) -> list[Effect]:
        """Take in a question or an answer."""
        if isinstance(received.message, UtilisationQuery):
            return self.queried(received.message)
        assert isinstance(received.message, UtilisationAnswer)
        return self.answered(received.sender, received.message)

    def queried(self, query: UtilisationQuery) -> list[Effect]:
        """Ask the children; a leaf answers at once. A newer query replaces an older one."""
        if self._query is not None and query.query_id <= self._query.query_id:
            return []
        context = self._context
        place = tree_place(context.view, context.node_id, fanout=context.run.protocol.tree_fanout)
        self._query, self._parent = query, place.parent
        self._missing, self._loads = {context.node_id, *place.children}, []
        asked: list[Effect] = [Send(child, query) for child in place.children]
        if query.with_kept:
            asked += self._mirrors.examine()
        return asked + self._answer()

    def told(self, event: StateKept | StateForgotten | KeptRead) -> list[Effect]:
        """Something has changed on this host's disk, or has been read."""
        self._mirrors.told(event)
        return self._answer()

    def _answer(self) -> list[Effect]:
        """Give this node's own answer, once what it rests on has been read."""
        query, own = self._query, self._context.node_id
        if query is None or own not in self._missing:
            return []
        if query.with_kept and not self._mirrors.examined:
            return []
        self._missing.discard(own)
        self._loads.insert(0, self._load(with_kept=query.with_kept))
        return self._pass_up()

    def answered(self, sender: NodeId, answer: UtilisationAnswer) -> list[Effect]:
        """A child's subtree has answered."""
        if self._query is None or answer.query_id != self._query.query_id:
            return []
        if sender not in self._missing:
            return []
        self._missing.discard(sender)
        self._loads.extend(answer.loads)
        return self._pass_up()

    def complete(self) -> tuple[NodeLoad, ...] | None:
        """At the leader: everybody's answer, once, when all have come."""
        if self._query is None or self._missing or self._parent is not None or not self._loads:
            return None
        loads, self._loads = tuple(self._loads), []
        return loads

    def _pass_up(self) -> list[Effect]:
        if self._missing or self._parent is None:
            return []
        assert self._query is not None
        answer = UtilisationAnswer(self._query.query_id, self._query.iteration, tuple(self._loads))
        return [Send(self._parent, answer)]
