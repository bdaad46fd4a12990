"""Microbatches of a data node that wait for a later iteration.

Either no flow took them, or they are to be trained on again (`learners`). The latter are never
given up. An iteration takes some of them beside its own batch, and so becomes little longer.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from decod.ids import MicrobatchId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note
from decod.protocol.core.era import MARKS_MAX

_DEFERRALS_MAX = 3
"""Iterations that a microbatch may be put off to before it is given up, and counted as lost."""

WAITING_MAX = 1 << 16
"""Microbatches that may wait to be trained on again. They take some 20 MB."""


@dataclass(slots=True)
class _Deferral:
    """A microbatch that was put off."""

    times: int = 0
    not_before: int = 0
    """First iteration that may take it again."""
    again: bool = False
    """It has been trained on before."""


class Deferrals:
    """What one data node has put off.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[MicrobatchId, _Deferral] = {}
        self._marked: dict[int, dict[MicrobatchId, _Deferral]] = {}
        """What was put off at the newest iterations whose states are kept."""

    def __contains__(self, microbatch: object) -> bool:
        return microbatch in self._known

    @property
    def microbatches(self) -> set[MicrobatchId]:
        """Those that have not been trained on."""
        return {m for m, each in self._known.items() if not each.again}

    @property
    def again(self) -> set[MicrobatchId]:
        """Those that are to be trained on again."""
        return {m for m, each in self._known.items() if each.again}

    def read_again(self, microbatches: Collection[MicrobatchId]) -> list[Effect]:
        """Have microbatches trained on again, from the context's iteration on."""
        new = [m for m in sorted(microbatches) if m not in self._known]
        new = new[: max(0, WAITING_MAX - len(self._known))]
        self._known.update((microbatch, _Deferral(again=True)) for microbatch in new)
        if not new:
            return []
        fields = (("num_microbatches", len(new)), ("num_waiting", len(self.again)))
        return [Note("learning.repeated", fields)]

    def put_off(self, microbatch: MicrobatchId) -> None:
        """A microbatch waits for the next iteration."""
        deferral = self._known.setdefault(microbatch, _Deferral())
        deferral.times += 1
        deferral.not_before = self._context.iteration.number + 1

    def committed(
        self, folded: Iterable[MicrobatchId], put_off: Iterable[MicrobatchId], *, marked: bool
    ) -> None:
        """The iteration is final: what was folded needs no second chance.

        Args:
            folded: Microbatches of the iteration.
            put_off: Those that are put off now.
            marked: States of the iteration are kept: the run may go back to it.
        """
        for microbatch in folded:
            self._known.pop(microbatch, None)
        for microbatch in put_off:
            self.put_off(microbatch)
        iteration = self._context.iteration.number
        if marked:
            self._marked[iteration] = {m: replace(each) for m, each in self._known.items()}
            for earlier in sorted(self._marked)[:-MARKS_MAX]:
                del self._marked[earlier]

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier state: so does what was put off."""
        # A later iteration draws its microbatches again.
        then = self._marked.get(iteration, self._known)
        self._known = {m: replace(each) for m, each in then.items() if m.iteration <= iteration}

    def due(
        self, shares: Sequence[int], *, num_again: int
    ) -> tuple[list[MicrobatchId], list[Effect]]:
        """Return what the context's iteration takes up again, and notes of what is given up.

        Args:
            shares: Of the iteration's batch that are this data node's.
            num_again: At most so many that have been trained on before.
        """
        iteration = self._context.iteration.number
        due, effects = list[MicrobatchId](), list[Effect]()
        for microbatch, deferral in sorted(self._known.items()):
            if microbatch.iteration == iteration and microbatch.data_node_index not in shares:
                # It was put off in an iteration that is repeated now, and another has its share.
                del self._known[microbatch]
            elif deferral.again:
                if num_again and deferral.not_before <= iteration:
                    due.append(microbatch)
                    num_again -= 1
            elif deferral.not_before <= iteration and deferral.times > _DEFERRALS_MAX:
                del self._known[microbatch]
                effects.append(Note("microbatch.lost", (("microbatch", str(microbatch)),)))
            elif deferral.not_before <= iteration:
                due.append(microbatch)
        return due, effects
