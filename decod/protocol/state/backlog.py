"""Averages that a candidate has received and not applied yet.

The parts of an average come in any order. A later averaging of the same iteration, in a new view
or a new attempt, replaces an earlier one.
"""

from dataclasses import dataclass, field

from decod.ids import AveragingId, Iteration, TensorId
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Tensor
from decod.protocol.core.messages.membership_messages import Average

_GAP_MAX = 3
"""Iterations whose averages may be here before an earlier one's."""


@dataclass(slots=True)
class ReceivedAverage:
    """The averages of one iteration, as far as they have come."""

    averaging: AveragingId
    num_parts: int
    num_microbatches: int
    base_hash: str
    gradient_norm: float
    num_local: int
    num_ahead: int
    spec: AverageSpec
    ahead_spec: AverageSpec
    parts: dict[int, TensorId] = field(default_factory=dict)

    @property
    def iteration(self) -> Iteration:
        return self.averaging.iteration

    @property
    def base(self) -> int:
        """The iteration from whose state the step is taken."""
        return self.iteration.number - 1 - self.num_local

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.num_parts


class Backlog:
    """The averages that wait for their steps, by iteration.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._tensors = context.tensors
        self._averages: dict[int, ReceivedAverage] = {}
        self.size_bytes = 0

    def get(self, iteration: int) -> ReceivedAverage | None:
        return self._averages.get(iteration)

    def after(self, base: int) -> ReceivedAverage | None:
        """Return the average whose step is taken from the state of an iteration."""
        return next((each for each in self._averages.values() if each.base == base), None)

    def has_gap(self, after: int) -> bool:
        """Whether the average of the iteration after `after` is too late to be on its way."""
        newest = self._averages[max(self._averages)] if self._averages else None
        if newest is None:
            return False
        ahead = (newest.iteration.number - after) // (1 + newest.num_local)
        return ahead > _GAP_MAX and any(each.complete for each in self._averages.values())

    def put(
        self, message: Average, tensor: Tensor | None, base: Iteration | None
    ) -> tuple[bool, list[Effect]]:
        """Keep one part of an average, if its step is taken from a state (None: not known yet).

        An average without parts has no tensor.

        Return whether it is kept, and the effects of letting go of an earlier averaging.
        """
        averaging, effects = message.averaging, list[Effect]()
        # Of what overtakes the answer to `Follow` nobody knows yet whether it is needed.
        if base is not None and not _is_behind(base, averaging.iteration):
            return False, effects
        iteration = averaging.iteration.number
        average = self._averages.get(iteration)
        if average is not None and average.averaging < averaging:
            effects += self.drop(iteration)
            average = None
        if average is None:
            average = self._averages[iteration] = ReceivedAverage(
                averaging,
                message.num_parts,
                message.num_microbatches,
                message.base_hash,
                message.gradient_norm,
                message.num_local,
                message.num_ahead,
                message.spec,
                message.ahead_spec,
            )
        alike = (average.averaging, average.num_parts) == (averaging, message.num_parts)
        if tensor is None or not alike or message.part in average.parts:
            return not message.num_parts, effects
        average.parts[message.part] = tensor.id
        self.size_bytes += tensor.size_bytes
        return True, effects

    def take(self, iteration: int) -> ReceivedAverage:
        """Hand over the average of an iteration, with the references to its parts."""
        average = self._averages.pop(iteration)
        self.size_bytes -= sum(map(self._tensors.size_of, average.parts.values()))
        return average

    def drop(self, iteration: int) -> list[Effect]:
        return self._tensors.release(*self.take(iteration).parts.values())

    def keep_behind(self, base: Iteration) -> list[Effect]:
        """Drop the averages whose steps are not taken from a state."""
        needless = [i for i, a in self._averages.items() if not _is_behind(base, a.iteration)]
        return [effect for iteration in needless for effect in self.drop(iteration)]

    def clear(self) -> list[Effect]:
        return [effect for iteration in [*self._averages] for effect in self.drop(iteration)]


def _is_behind(base: Iteration, iteration: Iteration) -> bool:
    """Whether an iteration's step is one of those that are taken from a state."""
    return iteration.era == base.era and iteration.number > base.number
