"""The leader's record of capacities that members want, until an opening's view has them.

A request is agreed or refused when it comes, and looked at again when a view is made of it:
if the others of a stage have gone meanwhile, a pause is taken back, and its node is told. So no
pause ever stops a stage. (The loss of its last worker can; then the run waits for one.)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import Capacity, CapacityAnswer
from decod.protocol.core.view import Member, Role, View


@dataclass(slots=True)
class _Request:
    request: Capacity
    refusal: str = ""


class Capacities:
    """The newest request of each member."""

    def __init__(self) -> None:
        self._requests: dict[NodeId, _Request] = {}
        self._taken_back: list[Effect] = []

    def ask(
        self,
        members: Sequence[Member],
        sender: Member,
        request: Capacity,
        leaving: Collection[NodeId],
    ) -> list[Effect]:
        """Answer a member; the same request gets the same answer, an earlier one none.

        Args:
            members: Of the run.
            sender: One of them.
            request: What it wants.
            leaving: Members that do not count.
        """
        known = self._requests.get(sender.node_id)
        if known is not None and request.request_id < known.request.request_id:
            return []
        if known is None or request.request_id > known.request.request_id:
            others = [self._with_request(m) for m in members if m.node_id != sender.node_id]
            refusal = _refusal(others, sender, request.capacity, leaving)
            known = self._requests[sender.node_id] = _Request(request, refusal)
        return [_answer(sender.node_id, known)]

    def pending(self, view: View) -> bool:
        """Whether a view has a member that is to have another capacity."""
        return any(self._with_request(member) is not member for member in view.members)

    def apply(self, members: Sequence[Member], leaving: Collection[NodeId]) -> list[Member]:
        """Return the members with the capacities that they want, as far as no stage stops."""
        result = {member.node_id: member for member in members}
        # Who takes part again comes first: others may pause for that.
        for member in sorted(members, key=lambda m: not self._with_request(m).capacity):
            changed = self._with_request(member)
            if changed is member:
                continue
            others = [m for m in result.values() if m is not member]
            if refusal := _refusal(others, member, changed.capacity, leaving):
                known = self._requests[member.node_id]
                known.refusal = refusal
                self._taken_back.append(_answer(member.node_id, known))
            else:
                result[member.node_id] = changed
        return list(result.values())

    def opened(self, view: View) -> list[Effect]:
        """Forget who is not in a view; return what members must be told of what was taken back."""
        self._requests = {node: known for node, known in self._requests.items() if node in view}
        taken_back, self._taken_back = self._taken_back, []
        return taken_back

    def forget(self, node: NodeId) -> None:
        """A member is gone. A later life of it wants nothing yet, and counts its requests anew."""
        self._requests.pop(node, None)

    def _with_request(self, member: Member) -> Member:
        known = self._requests.get(member.node_id)
        if known is None or known.refusal or known.request.capacity == member.capacity:
            return member
        return replace(member, capacity=known.request.capacity)


def _refusal(
    others: Sequence[Member], member: Member, capacity: int, leaving: Collection[NodeId]
) -> str:
    """Return why a member can't have a capacity, or nothing."""
    if capacity:
        return ""
    if member.role is Role.DATA:
        return "it is a data node: every iteration waits for its share of the batch"
    stage = member.stage_index
    if any(m.stage_index == stage and m.capacity and m.node_id not in leaving for m in others):
        return ""
    return f"stage {stage} would stop: nobody else takes its microbatches"


def _answer(node: NodeId, known: _Request) -> Effect:
    return Send(node, CapacityAnswer(known.request.request_id, known.refusal))
