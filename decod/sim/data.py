"""I5: every position of the data is handed out once, and what is skipped is told.

A part of the checker in `decod.sim.invariants`, which raises what is found here.
"""

from collections.abc import Mapping

from decod.ids import MicrobatchId, Round
from decod.sim.compute import Step
from decod.sim.core import positions_of
from decod.sim.host import SimHost


class DataChecker:
    """Follows which microbatches committed batches hold.

    Args:
        batch: Microbatches of an iteration.
        bases: The iteration that each era of the run began with.

    Attributes:
        put_off: How many were put off in each round, by the leader's term and the round.
    """

    def __init__(self, batch: int, bases: Mapping[int, int]) -> None:
        self.put_off: dict[tuple[int, Round], int] = {}
        self._batch = batch
        self._bases = bases
        self._used: dict[MicrobatchId, int] = {}
        """In which iteration each microbatch was committed, as the newest era has it."""
        self._era = 0

    def committed(self, step: Step, era: int) -> str:
        """Take in the first commit of an iteration. Returns what is wrong, or nothing."""
        if era > self._era:
            base, self._era = self._bases.get(era, 0), era
            self._used = {m: used for m, used in self._used.items() if used <= base}
        elif era < self._era:
            return ""  # It is abandoned: what it has used is used again.
        for microbatch, _ in step.counts:
            used = self._used.setdefault(microbatch, step.iteration)
            if used != step.iteration:
                return f"microbatch {microbatch} is in iterations {used} and {step.iteration}"
        place = (era, step.iteration)
        rounds = [(t, r) for t, r in self.put_off if (r.era, r.iteration) == place]
        own = sum(microbatch.iteration == step.iteration for microbatch, _ in step.counts)
        if rounds and self.put_off[max(rounds)] == 0 and own != self._batch:
            text = f"iteration {step.iteration} has {own} of its own {self._batch} microbatches"
            return f"{text}, and nothing is put off"
        return ""

    def counted(self, host: SimHost, num_iterations: int) -> str:
        """Compare with what a node has counted that has seen all iterations; likewise."""
        positions = positions_of(host.machine)
        last = host.compute.iteration == num_iterations
        if positions is None or not positions.whole or not last:
            return ""
        missing = self._batch * num_iterations - len(self._used)
        told = positions.num_skipped + positions.num_deferred
        if missing == told:
            return ""
        return f"{missing} microbatches were not trained on, {told} are told of"
