"""Whose consent a leader needs: quorums of members, over changes of the view.

A *quorum* of some members is more than half of them, or half with the first among them (a view's
first member is its leader). Any two quorums of the same members have a member in common.

Views change without a vote on them, by many members at a time, so a quorum of one view and one of
the next need not meet. Therefore a view counts as *committed* once an iteration has been committed
in it: all its members have voted in that iteration, so all of them know the view. Until then the
last committed view goes on to count beside it:

- to be elected takes a quorum of the committed view and one of the candidate's own view;
- a leader opens no view that holds less than a quorum of the committed one. (Who has asked to leave
  has no vote from then on, and is not counted.)

So whoever is elected has asked somebody who knows the newest view that can still commit. There is
one exception: a leader beside whom there has been no other data node since the last committed view
may lose as many members as it likes, for nobody else could stand.
"""

from collections.abc import Container, Sequence

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Note
from decod.protocol.core.view import Opening, View


def is_quorum(nodes: Container[NodeId], members: Sequence[NodeId]) -> bool:
    """Whether `nodes` hold more than half of `members`, or half of them with the first."""
    num = sum(member in nodes for member in members)
    if 2 * num == len(members):
        return not members or members[0] in nodes
    return 2 * num > len(members)


def ids_of(view: View) -> tuple[NodeId, ...]:
    """Return the members of a view that have a vote, in its order: its leader first.

    Clients have none. They come and go, and a run must not wait for them.
    """
    return view.keepers


def electors_of(opening: Opening) -> tuple[NodeId, ...]:
    """Return the members of the last committed view, as an opening tells them."""
    return opening.electors or ids_of(opening.view)


class Quorum:
    """Which views a leader may open. Kept by the leader of a term.

    Args:
        leader: The node that leads.
    """

    def __init__(self, leader: NodeId) -> None:
        self.electors: tuple[NodeId, ...] = ()
        """Members of the last committed view. The first view that is opened counts as committed."""
        self.lacking: tuple[NodeId, ...] = ()
        """Members that are gone, but without whom no quorum would be left."""
        self._leader = leader
        self._rivals: set[NodeId] = set()
        """Other data nodes of the committed view, and of those opened since."""
        self._left: set[NodeId] = set()
        """Members that have asked to leave."""

    def committed(self, view: View, electors: Sequence[NodeId] | None = None) -> None:
        """An iteration has been committed in `view`; or, at a new leader, this is what it begins
        with.

        Args:
            view: The newest.
            electors: The members of the last committed view, if that is an earlier one.
        """
        members = ids_of(view) if electors is None else electors
        self._left &= {*members}
        self.electors = tuple(node for node in members if node not in self._left)
        self._rivals.clear()
        self._compete(view)

    def opened(self, view: View) -> None:
        """The leader announces a view."""
        self.electors = self.electors or ids_of(view)
        self.lacking = ()
        self._compete(view)

    def wait_for(self, gone: Sequence[NodeId], view: View) -> list[Effect]:
        """Too many members of `view` are gone: by now somebody else could lead the others."""
        if {*gone} <= {*self.lacking}:
            return []
        self.lacking = tuple(gone)
        fields = (("num_gone", len(gone)), ("num_total", len(view.members)))
        return [Note("quorum.lost", fields)]

    def returned(self, node: NodeId) -> bool:
        """A member lives. Returns whether it was one of those that are gone."""
        if node not in self.lacking:
            return False
        self.lacking = tuple(other for other in self.lacking if other != node)
        return True

    def dismiss(self, node: NodeId) -> None:
        """A member leaves: it gives no vote any more, so nobody needs one of it."""
        self._left.add(node)
        self._rivals.discard(node)
        self.electors = tuple(member for member in self.electors if member != node)

    def readmit(self, node: NodeId) -> None:
        """A node that may have left wants to join."""
        self._left.discard(node)

    def allows(self, view: Container[NodeId]) -> bool:
        """Whether the leader may open `view`: nobody else can be elected without its members."""
        return not self._rivals or is_quorum(view, self.electors)

    def chosen_by(self, nodes: Container[NodeId], view: View) -> bool:
        """Whether these nodes could elect another leader in this node's view."""
        return is_quorum(nodes, self.electors) and is_quorum(nodes, ids_of(view))

    def told_with(self, view: View) -> tuple[NodeId, ...]:
        """Return what an opening with `view` tells of the electors: nothing if they are its own."""
        return () if self.electors in ((), ids_of(view)) else self.electors

    def _compete(self, view: View) -> None:
        data_nodes = {member.node_id for member in view.data_nodes}
        self._rivals |= data_nodes - {self._leader} - self._left
