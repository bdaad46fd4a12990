"""The norm of the gradient over all stages, which a clipped step needs before it is taken.

A member squares the part that it averages, and sends the sum of the squares along with the average.
The first member of the stage adds up the parts. It sends the stage's sum up the tree, with the sums
that have come from below. The root adds up all stages and sends the norm down to everybody:

    parts' sums -> stages' sums -> (up, first members only) -> norm -> (down) -> step

Each sum is computed once, by one node and in one order, so all members scale by the same number.
Followers get the norm with the averages. A run that does not clip says none of this: its norm
counts as known from the start.
"""

import math
from collections.abc import Mapping, Sequence

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import GradientNorm, GradientSquares
from decod.protocol.core.view import TreePlace

_SQUARES_MAX = 1e300
"""Sums end here, so that they are finite. A gradient that long is scaled to nothing anyway."""


class Clipping:
    """One node's part in finding the norm, for one iteration and view.

    Args:
        context: The node's.
        roster: Of its stage.
        place: Its place in the tree.
    """

    def __init__(self, context: Context, roster: Sequence[NodeId], place: TreePlace) -> None:
        self.norm: float | None = None if context.run.clips else 0.0
        """None: not known yet. 0 where nothing is clipped."""
        self._context = context
        self._num_parts = len(roster)
        self._place = place
        self._is_first = roster[0] == context.node_id
        self._below = {child for child in place.children if child not in roster}
        """First members of other stages whose sums come by this node."""
        self._parts: dict[int, float] = {}
        """Sums of squares of this stage's average, by part."""
        self._sums: dict[int, float] = {}
        """Those of whole stages, by stage index."""

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come before the step can be taken."""
        if self.norm is not None:
            return set()
        parent = self._place.parent
        return set(self._below) or ({parent} if parent is not None else set())

    def add_part(self, part: int, square_sum: float) -> list[Effect]:
        """A part of this stage's average is there."""
        if self.norm is not None or not self._is_first:
            return []
        self._parts[part] = square_sum
        if len(self._parts) < self._num_parts:
            return []
        self._sums[self._context.member.stage_index] = _sum(self._parts)
        return self._pass_on()

    def add_stages(self, sender: NodeId, message: GradientSquares) -> list[Effect]:
        """The sums of some stages have come up the tree."""
        if self.norm is not None or sender not in self._below:
            return []
        self._below.remove(sender)
        self._sums.update(message.square_sums)
        return self._pass_on()

    def _pass_on(self) -> list[Effect]:
        """Say what all stages below sum to, this one too, once that is known."""
        if self._below or self._context.member.stage_index not in self._sums:
            return []
        context, parent = self._context, self._place.parent
        if parent is not None:
            sums = tuple(sorted(self._sums.items()))
            return [Send(parent, GradientSquares(context.averaging, sums))]
        norm = math.sqrt(_sum(self._sums))
        return [Send(context.node_id, GradientNorm(context.averaging, norm))]

    def found(self, message: GradientNorm) -> list[Effect]:
        """The norm has come down the tree: pass it on, once."""
        if self.norm is not None:
            return []
        self.norm = message.gradient_norm
        return [Send(child, message) for child in self._place.children]


def _sum(numbers: Mapping[int, float]) -> float:
    # Not `sum`, which rounds otherwise in some releases of Python; and always in the same
    # order.
    total = 0.0
    for _, number in sorted(numbers.items()):
        total += number
    return min(total, _SQUARES_MAX)
