"""How the leader goes on with an iteration in another view: without members, or with more clients.

Relays and clients that are lost can be done without: others do their part again. Clients enter
while an iteration is under way, since a batch may take an hour. Only clients can. They hold nothing
that others rely on, so nobody needs to wait for them: all others go on with the iteration in a view
that has them too. They must know, as all others do, which servers the iteration was opened with
(`protocol.strategy.servers.placement`). So none enters until the next commit if a server has been
lost meanwhile.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send, noted
from decod.protocol.core.messages import Mend
from decod.protocol.core.view import Member, Role, View, orphans

if TYPE_CHECKING:
    from decod.protocol.leadership.leader import Leader

_AFTER_S = 5.0
"""How long a client waits for a commit first. Short iterations are not disturbed."""

_NAMES_MAX = 3


class LateEntry:
    """When the leader looks for clients that wait to enter."""

    def __init__(self) -> None:
        self.due_s: float | None = None

    def prepared(self, now_s: float, role: Role) -> None:
        """A candidate stands ready."""
        if role is Role.CLIENT and self.due_s is None:
            self.due_s = now_s + _AFTER_S

    def passed(self, now_s: float) -> bool:
        """Whether clients have waited for long enough."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.due_s = None
        return True


def serves(view: View, server: NodeId, client: NodeId) -> bool:
    """Whether a node is a client of another's stage."""
    one, other = view.by_id.get(client), view.by_id.get(server)
    if one is None or other is None or one.role is not Role.CLIENT:
        return False
    return other.role is Role.RELAY and one.stage_index == other.stage_index


def clients_that_wait(leader: "Leader") -> list[Member]:
    """Return the clients that may enter the iteration in hand."""
    opened, view = leader.decisions.opened, leader.view
    if opened is None or opened.opening.iteration != leader.iteration or opened.opening.paused:
        return []
    if opened.opening.view.keepers != view.keepers or leader.quorum.lacking:
        return []
    members = leader.admission.members(leader.committed, leader.sync.anchor, view.members)
    return [m for m in members if m.role is Role.CLIENT and view.roster(m.stage_index)]


def let_in(leader: "Leader", now_s: float, clients: Sequence[Member]) -> list[Effect]:
    """Go on with the iteration with these clients, too."""
    opened = leader.decisions.opened
    assert opened is not None
    new = {member.node_id for member in clients}
    # An earlier life of it may be in the view still.
    others = [member for member in leader.view.members if member.node_id not in new]
    view = leader.view.successor((*others, *clients), leader=leader.node_id)
    names = ", ".join(member.label for member in clients[:_NAMES_MAX])
    reason = f"{names} came in" if len(clients) <= _NAMES_MAX else f"{len(clients)} came in"
    electors = leader.quorum.told_with(view)
    word = replace(opened, opening=replace(opened.opening, view=view, electors=electors))
    mend = Mend(leader.iteration, view, reason)
    told = [Send(node, word) for node in sorted(new)]
    leader.decisions.opened = word
    leader.admission.entered(view)
    note = noted("clients.entered", iteration=str(leader.iteration), reason=reason)
    return [note, *leader.resume_in(now_s, view, mend), *told]


def go_on_without(
    leader: "Leader", now_s: float, view: View, reason: str, gone: Sequence[NodeId]
) -> list[Effect]:
    """Go on with the iteration without some relays or clients."""
    # What opened the iteration may have been lost with whom they were to have it from.
    left = orphans(leader.view, gone, fanout=leader.run.protocol.tree_fanout)
    words = [word for node in left for word in leader.decisions.send(node)]
    mend = Mend(leader.iteration, view, reason[:200])
    note = noted("iteration.mended", iteration=str(leader.iteration), reason=reason)
    told = [*leader.resume_in(now_s, view, mend), *(Send(node, mend) for node in gone)]
    return [note, *words, *told, *leader.capacities.opened(view)]


def replaceable(view: View, node: NodeId) -> bool:
    """Whether another member of a node's stage can do the same work."""
    member = view.by_id.get(node)
    if member is None:
        return False
    if member.role is Role.CLIENT:
        return True
    others = (m for m in view.workers[member.stage_index] if m.node_id != node)
    return any(other.duty is member.duty for other in others)
