"""A view as the difference from an earlier one.

An opening goes to every member in every iteration, and as a rule its view is the one before it, or
that with a few members more or less. So a member is told what changes, and the hash of the result.

The rules of safety: a change names its base by the base's hash, and its result by the result's
hash. Who does not know the base, or finds another result, has no view, and asks for the whole one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from decod.ids import NodeId, NodeIds
from decod.limits import MEMBERS_MAX, AtMost, Sha256, malformed, unique
from decod.protocol.core.view import Member, View, fault_of


@dataclass(frozen=True, slots=True)
class ElectorChange:
    """The electors of an opening, as the difference from the members of its view."""

    first: NodeId
    """The leader of the last committed view. It is an elector."""
    without_vote: NodeIds = ()
    """Members that are no electors."""
    former: NodeIds = ()
    """Electors that are no members."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if a node is an elector and none."""
        unique("former", (*self.without_vote, *self.former))
        if self.first in self.without_vote:
            raise malformed("first", self.first, allowed="an elector")


@dataclass(frozen=True, slots=True)
class ViewChange:
    """What turns one view into another. The other's version, term and leader stand beside it."""

    base: Sha256
    """Hash of the view that it changes."""
    result: Sha256
    """Hash of the view that it makes. As `base`, if nothing changes."""
    gone: NodeIds = ()
    """Members of the base that are no members any more."""
    changed: Annotated[tuple[Member, ...], AtMost(MEMBERS_MAX)] = ()
    """Members that are new, or differ from the base's. Each node once, and not among the gone."""
    electors: ElectorChange | None = None
    """None: the electors are the members."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if the change contradicts itself."""
        nodes = [*self.gone, *(member.node_id for member in self.changed)]
        if len(set(nodes)) != len(nodes):
            raise malformed("changed", "a node twice", allowed="each node once, gone or changed")
        if self.base == self.result and nodes:
            raise malformed("result", self.result, allowed="another hash than base's")


def verify_told(view: View, change: ViewChange | None) -> None:
    """Raise `MalformedMessageError` unless a view is told whole or as a change, and not both."""
    if view.members and change is not None:
        raise malformed("members", "given", allowed="none beside a change of the view")
    if not view.members and change is None:
        raise malformed("members", "0 entries", allowed="1 entry or a change of the view")


def change_between(base: View, view: View, electors: Sequence[NodeId] = ()) -> ViewChange:
    """Return what turns `base` into `view`, and the electors of an opening into its members."""
    told = _elector_change(view, electors) if electors else None
    if base is view:
        return ViewChange(view.hash, view.hash, electors=told)
    before, after = base.by_id, view.by_id
    gone = tuple(member.node_id for member in base.members if member.node_id not in after)
    changed = tuple(m for m in view.members if before.get(m.node_id) != m)
    return ViewChange(base.hash, view.hash, gone, changed, told)


def changed_view(base: View, outline: View, change: ViewChange) -> View | None:
    """Return the view that a change makes of its base, if it is the one that its sender has.

    Args:
        base: A view that this node knows.
        outline: The new view without its members.
        change: What the sender says.

    Returns:
        None if the hash of the base or of the result is another, or the result breaks a rule of
        views.
    """
    if base.hash != change.base:
        return None
    if change.base == change.result and not (change.gone or change.changed):
        return base if base.outline == outline else None
    dropped = {*change.gone, *(member.node_id for member in change.changed)}
    kept = (member for member in base.members if member.node_id not in dropped)
    view = View.of(
        (*kept, *change.changed),
        version=outline.version,
        leader=outline.leader,
        term=outline.term,
        num_stages=outline.num_stages,
    )
    return view if view.hash == change.result and fault_of(view) is None else None


def changed_electors(view: View, change: ElectorChange | None) -> tuple[NodeId, ...]:
    """Return the electors of an opening: none if they are its members."""
    if change is None:
        return ()
    lacking = {*change.without_vote, change.first}
    members = (m.node_id for m in view.members if m.node_id not in lacking)
    return _in_order(change.first, (*members, *change.former))


def _elector_change(view: View, electors: Sequence[NodeId]) -> ElectorChange:
    chosen = set(electors)
    return ElectorChange(
        electors[0],
        tuple(m.node_id for m in view.members if m.node_id not in chosen),
        tuple(node for node in electors if node not in view.by_id),
    )


def _in_order(first: NodeId, others: Iterable[NodeId]) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys((first, *others)))
