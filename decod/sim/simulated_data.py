"""I5: every position of the data is handed out once, and every skipped one is reported.

A part of the checker in `decod.sim.invariants`, which raises the violations found here.
"""

from collections.abc import Mapping

from decod.ids import Iteration, MicrobatchId
from decod.sim.core import positions_of
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import SimHost


class DataChecker:
    """Follows which microbatches the committed batches hold.

    Args:
        batch: Number of microbatches in an iteration.
        bases: The iteration that each era of the run began with.

    Attributes:
        put_off: Number of microbatches deferred in each iteration, by the leader's term and the
        iteration.
        reread: Number of those in each batch that had been trained on before, likewise.
    """

    def __init__(self, batch: int, bases: Mapping[int, int]) -> None:
        self.put_off: dict[tuple[int, Iteration], int] = {}
        self.reread: dict[tuple[int, Iteration], int] = {}
        self._batch = batch
        self._bases = bases
        self._used: dict[MicrobatchId, int] = {}
        """The iteration that committed each microbatch, according to the newest era."""
        self._unknown: dict[int, int] = {}
        """Microbatches of each iteration that only lost nodes knew of."""
        self._era = 0

    def committed(self, step: SimulatedStep, era: int, *, num_unknown: int = 0) -> str:
        """Take in the first commit of an iteration. Return what is wrong, or an empty text.

        Args:
            step: With the batch.
            era: Of the step.
            num_unknown: Microbatches of the batch that only lost nodes knew of.
        """
        if era > self._era:
            base = self._bases.get(era, 0)
            self._era = era
            self._used = {m: used for m, used in self._used.items() if used <= base}
            self._unknown = {at: num for at, num in self._unknown.items() if at <= base}
        elif era < self._era:
            return ""  # The era was abandoned: its microbatches are used again.
        place = (era, step.iteration)
        iterations = [(t, r) for t, r in self.put_off if (r.era, r.number) == place]
        told = self.reread[max(iterations)] if iterations else 0
        again = [
            f"{microbatch}, of {used}"
            for microbatch, _ in step.counts
            if (used := self._used.setdefault(microbatch, step.iteration)) != step.iteration
        ]
        num_unknown_again = told - len(again)
        self._unknown[step.iteration] = num_unknown - num_unknown_again
        if not 0 <= num_unknown_again <= num_unknown:
            text = f"{len(again)} microbatches of iteration {step.iteration} are of earlier ones"
            return f"{text} ({'; '.join(again[:8])}), {told} are told of"
        own = sum(microbatch.iteration == step.iteration for microbatch, _ in step.counts)
        if (
            not num_unknown
            and iterations
            and self.put_off[max(iterations)] == 0
            and own != self._batch
        ):
            text = f"iteration {step.iteration} has {own} of its own {self._batch} microbatches"
            return f"{text}, and nothing is put off"
        return ""

    def counted(self, host: SimHost, num_iterations: int) -> str:
        """Compare the count of a node that has seen all iterations. Return as `committed` does."""
        positions = positions_of(host.machine)
        last = host.compute.iteration == num_iterations
        if positions is None or not positions.whole or not last:
            return ""
        known = len(self._used) + sum(self._unknown.values())
        missing = self._batch * num_iterations - known
        told = positions.num_skipped + positions.num_deferred
        if missing == told:
            return ""
        return f"{missing} microbatches were not trained on, {told} are told of"
