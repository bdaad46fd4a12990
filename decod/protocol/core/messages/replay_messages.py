"""What a candidate and the member that it follows say to each other
(`decod.protocol.state.replay`).

These are of no iteration: the candidate is in none yet.
"""

from dataclasses import dataclass

from decod.ids import AveragingId, Iteration
from decod.limits import (
    Address,
    Count,
    Index,
    Magnitude,
    Number,
    ReasonText,
    SomeSha256,
    StageIndex,
    malformed,
)
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.messages.scopes import OfRun, WithTensor
from decod.protocol.core.view import Reach

DONORS_MAX = 8
"""Members that a candidate is told of: as many as it fetches a state from."""


@dataclass(frozen=True, slots=True)
class Follow(OfRun):
    """A candidate wants its stage's averages from a member, so that it can take the steps itself.

    Repeated while it follows; the receiver forgets who is silent.
    """

    request_id: Number
    """Another for each new beginning, and for each life, of the sender. A repeat gets the first
    answer again."""
    stage_index: StageIndex
    address: Address
    """Where the sender can be reached: it is no member."""
    reach: Reach = Reach.DIALLED
    """Whether it can be dialled there."""


@dataclass(frozen=True, slots=True)
class Followed(OfRun):
    """The answer to Follow."""

    request_id: Number
    """Of the Follow."""
    stage_index: StageIndex
    committed: Iteration
    """Attempt 0: the state after this iteration is the one to fetch. The averages of all iterations
    behind it are sent as they are made."""
    refusal: ReasonText = ""
    """Not empty: none are sent, or no more."""


@dataclass(frozen=True, slots=True)
class Average(OfRun, WithTensor):
    """With a tensor: one part of the mean gradient of an iteration, to a follower.

    Sent when the members take the step, so it may still be undone: then another of the same
    iteration follows.
    """

    averaging: AveragingId
    """The average that it belongs to."""
    part: Index
    """Less than `num_parts`; 0 if there is none."""
    num_parts: Count
    """0: the iteration's step is taken without an average, and no tensor comes."""
    num_microbatches: Count
    """In the mean."""
    base_hash: SomeSha256
    """SHA-256 of the parameters that the step starts from; empty if the sender does not know."""
    gradient_norm: Magnitude = 0.0
    """With which the members take the step, where the gradient is clipped."""
    num_local: Number = 0
    """Iterations without an average that lie between the state and the step."""
    num_ahead: Index = 0
    """So many parts, the first ones, are of an average that travelled during these iterations."""
    spec: AverageSpec = WHOLE
    """Of the iteration's average."""
    ahead_spec: AverageSpec = WHOLE
    """Of the average that travelled."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if there is no such part."""
        if self.part >= max(self.num_parts, 1):
            raise malformed("part", self.part, allowed="less than num_parts")


FollowMessage = Follow | Followed | Average
