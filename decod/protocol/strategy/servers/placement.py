"""Which server deals with which microbatch: the same on every node, without a word.

The microbatches of a share are cut evenly among a stage's frontal servers, and among its backward
servers, by index. So the n-th of two backward servers and the three frontal servers behind it share
a border wherever they can: the first sends two thirds of its microbatches to the first frontal
server, and one third to the second.

If a server is lost in the middle of an iteration, its microbatches are dealt out among the others
of its kind. If it was the last of its kind, servers of the other kind do its work as well. Nothing
else moves.

Source: reliable and unreliable parameter servers, section 3.2.1, "Forward and Backward". Deviation:
there tokens are cut, here microbatches.
"""

from collections.abc import Sequence

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.view import Duty, Member, View
from decod.protocol.strategy.data_positions import shares_of


class Placement:
    """The servers of all stages in one iteration.

    Args:
        opening: The view with which the iteration was opened.
        num_microbatches: Of each share.
        num_shares: Of a batch.
    """

    def __init__(self, opening: View, *, num_microbatches: int, num_shares: int) -> None:
        self._opening, self._num = opening, num_microbatches
        self._servers: dict[tuple[int, Duty], tuple[NodeId, ...]] = {}
        self._homes = {
            share: member.node_id
            for member in opening.data_nodes
            for share in shares_of(opening, member.node_id, num_shares=num_shares)
        }

    def home(self, microbatch: MicrobatchId) -> NodeId | None:
        """Return the data node that reads a microbatch."""
        return self._homes.get(microbatch.data_node_index)

    def frontal(self, view: View, stage_index: int, microbatch: MicrobatchId) -> NodeId | None:
        """Return the frontal server of a microbatch at a stage, or its data node at stage 0.

        None: the stage has no server left.
        """
        return self._at(view, stage_index, Duty.FRONTAL, microbatch)

    def backward(self, view: View, stage_index: int, microbatch: MicrobatchId) -> NodeId | None:
        """Return the backward server of a microbatch. As `frontal`."""
        return self._at(view, stage_index, Duty.BACKWARD, microbatch)

    def bereft(self, view: View, stage_index: int, duty: Duty) -> bool:
        """Whether a stage has lost servers with a duty. Others deal with what was theirs."""
        return not all(node in view for node in self._of(stage_index, duty))

    def all_backward(self, view: View, stage_index: int) -> tuple[NodeId, ...]:
        """Return all servers that deal with the backward passes of a stage in a view."""
        kind = [node for node in self._of(stage_index, Duty.BACKWARD) if node in view]
        return tuple(kind or (m.node_id for m in view.roster(stage_index)))

    def _at(
        self, view: View, stage_index: int, duty: Duty, microbatch: MicrobatchId
    ) -> NodeId | None:
        if stage_index % view.num_stages == 0:
            return self.home(microbatch)
        kind = self._of(stage_index, duty)
        if not kind:
            return None
        index = min(microbatch.index, self._num - 1)
        first = kind[index * len(kind) // self._num]
        if first in view:
            return first
        others = [m.node_id for m in self._opening.roster(stage_index) if m.node_id not in kind]
        rest = [node for node in kind if node != first]
        ranked = (*_turned(rest, index), *_turned(others, index))
        return next((node for node in ranked if node in view), None)

    def _of(self, stage_index: int, duty: Duty) -> tuple[NodeId, ...]:
        """Return the servers with a duty. If none has it, all of the stage do."""
        place = stage_index, duty
        if place not in self._servers:
            self._servers[place] = servers_of(self._opening.roster(stage_index), duty)
        return self._servers[place]


def servers_of(roster: Sequence[Member], duty: Duty) -> tuple[NodeId, ...]:
    """Return the servers of a stage with a duty, in the view's order. If none has it, all do."""
    able = [member for member in roster if member.duty is duty] or roster
    return tuple(member.node_id for member in able)


def _turned(nodes: Sequence[NodeId], by: int) -> list[NodeId]:
    start = by % len(nodes) if nodes else 0
    return [*nodes[start:], *nodes[:start]]
