"""What the sums of a stage's members stand for when they average.

The leader says which iterations end with an average. `decod.train.update_rule` says what the device
does with a sum and with an average.
"""

from collections.abc import Sequence
from typing import Protocol

from decod.ids import MicrobatchId
from decod.protocol.averaging.averager import Weight
from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.messages import BeginAggregation


class StepPolicy(Protocol):
    """One member's policy. It sees every iteration of that member, in order."""

    def weigh(self, folded: Sequence[MicrobatchId], fragment: int) -> Weight:
        """Return what this node's contribution to the average stands for.

        Args:
            folded: Microbatches of this iteration whose gradients this node has added up.
            fragment: That is averaged, from 1. 0: all parameters.
        """
        ...

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return what all contributions must add up to. None: whatever the members still have."""
        ...

    def closed(self, folded: Sequence[MicrobatchId], averaged: int | None) -> None:
        """The step of an iteration is final here.

        Args:
            folded: As for `weigh`.
            averaged: The fragment of which it ends a local phase. None: of none.
        """
        ...

    def returned(self) -> None:
        """This node has given up its own steps: it holds what its stage has in common."""
        ...


class EveryIteration:
    """Average the gradients of each iteration. Every microbatch of the batch must be in it (I2)."""

    def weigh(self, folded: Sequence[MicrobatchId], fragment: int) -> Weight:  # noqa: ARG002
        """Return what this node's sum stands for: the iteration's microbatches."""
        return weight_of(folded)

    def total(self, begun: BeginAggregation) -> Weight | None:
        """Return the whole batch."""
        return Weight(begun.num_committed, begun.digest)

    def closed(self, folded: Sequence[MicrobatchId], averaged: int | None) -> None:
        """The step is final: nothing is left of the iteration."""

    def returned(self) -> None:
        """There are no steps of its own."""


class LocalSteps:
    """Average what each member has learnt in several iterations.

    A member that was lost has taken along what it learnt. So nobody knows beforehand what the
    contributions add up to.

    Args:
        num_fragments: Parts of the parameters that are averaged in turn.
    """

    def __init__(self, num_fragments: int = 1) -> None:
        self._kept = [Weight(0, 0)] * num_fragments
        """Of the iterations since the last average of each fragment."""

    def weigh(self, folded: Sequence[MicrobatchId], fragment: int) -> Weight:
        """Return what this node has trained on since the fragment's last average.

        All parameters together count from the average that is longest ago.
        """
        kept = self._kept[fragment - 1] if fragment else max(self._kept, key=lambda w: w.num)
        return _sum(kept, weight_of(folded))

    def total(self, begun: BeginAggregation) -> Weight | None:  # noqa: ARG002
        """Return nothing: members may have been lost."""
        return None

    def closed(self, folded: Sequence[MicrobatchId], averaged: int | None) -> None:
        """Keep account of what this node has learnt by itself."""
        own = weight_of(folded)
        self._kept = [
            Weight(0, 0) if averaged in (0, fragment) else _sum(kept, own)
            for fragment, kept in enumerate(self._kept, 1)
        ]

    def returned(self) -> None:
        """What this node had learnt by itself is lost."""
        self._kept = [Weight(0, 0)] * len(self._kept)


def _sum(one: Weight, other: Weight) -> Weight:
    return Weight(one.num + other.num, add_digests((one.digest, other.digest)))


def weight_of(folded: Sequence[MicrobatchId]) -> Weight:
    """Return how much the sum over some microbatches stands for."""
    return Weight(len(folded), digest_of(folded))
