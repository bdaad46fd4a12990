"""What comes by way of a data node: who has computed it, and for whom it is.

An activation or gradient may take a detour (`detours`): its sender gives it to a data node, which
sends it on. Both messages say the microbatch's path, so every node sees from its own place there
who comes before it and who behind; the data node on the way need not have heard of the microbatch.
"""

from decod.ids import NodeId
from decod.protocol.core.messages import BackwardGradient
from decod.protocol.core.messages.microbatch_messages import Travelling
from decod.protocol.core.view import View


def origin_of(message: Travelling, sender: NodeId, receiver: NodeId, view: View) -> NodeId:
    """Return who has computed what came: its sender, or who had it sent by way of that.

    Args:
        message: What came.
        sender: Who sent it.
        receiver: Who got it.
        view: Of the receiver.
    """
    places, member = _places(message), view.by_id.get(sender)
    passed_on = member is not None and not member.stage_index and receiver in places
    return places[receiver][0] if passed_on else sender


def goal_of(message: Travelling, sender: NodeId) -> NodeId | None:
    """Return for whom is what its sender has computed; None if the path does not say so."""
    around = _places(message).get(sender)
    return around[1] if around is not None else None


def _places(message: Travelling) -> dict[NodeId, tuple[NodeId, NodeId]]:
    """Return who is before each node and behind it, on the way that a tensor takes."""
    home = message.flow_id.data_node
    way = (home, *message.path)
    if isinstance(message, BackwardGradient):
        way = way[::-1]
    return {node: (way[i - 1], way[(i + 1) % len(way)]) for i, node in enumerate(way)}
