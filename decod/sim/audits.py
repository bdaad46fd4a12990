"""What simulated devices can tell of each other's work, and the lies of some.

A part of the simulated compute process (`decod.sim.compute`). A symbolic sketch says how many
microbatches are in a tensor. That of a false tensor says -1.
"""

from decod.protocol.core import jobs
from decod.protocol.core.jobs import Job
from decod.protocol.core.sketch import NUM_SUMS, SEED_BYTES, Sketch, error_of
from decod.sim.averages import MisuseError

_FALSE = -1


class SimulatedWitness:
    """One device's knowledge of what others have computed in an iteration."""

    def __init__(self) -> None:
        self.lies = False
        """The device's results are false."""
        self.accuses = False
        """It says so of those of others."""
        self._seen: dict[object, int] = {}

    def clear(self) -> None:
        """Forget the iteration."""
        self._seen.clear()

    def saw(self, what: object, *, false: bool, num: int = 1) -> None:
        """Remember a tensor that has come.

        Args:
            what: The microbatch and direction, or the part and position.
            false: Whether its device lies.
            num: Microbatches in it.
        """
        self._seen[what] = _FALSE if false else num

    def sketch(self, job: jobs.SketchPass | jobs.SketchPart) -> jobs.Sketched:
        """Tell what is known of a tensor."""
        if isinstance(job, jobs.SketchPass):
            num = self._seen.get((job.microbatch, job.is_gradient))
        else:
            num = self._seen.get((job.part, job.position))
        if num is None:
            raise MisuseError(f"{job}, but nothing of it has come")
        return jobs.Sketched(_sketch_of(_FALSE if self.accuses else num))

    def replay(self, job: jobs.ReplayPasses) -> jobs.Replayed:
        """Compare another device's results with what they should be."""
        made = _sketch_of(_FALSE if self.accuses else 1)
        on, back = (_error(job, told, made) for told in (job.told_activation, job.told_gradient))
        return jobs.Replayed(on, back, tuple(made if part else b"" for part in job.parts))


def _sketch_of(num: int) -> bytes:
    return Sketch(bytes(SEED_BYTES), (float(num),) * NUM_SUMS).to_bytes()


def _error(job: Job, told: bytes, made: bytes) -> float:
    try:
        return error_of(Sketch.from_bytes(told), Sketch.from_bytes(made))
    except ValueError as error:
        raise MisuseError(f"{job}: {error}") from error
