"""What simulated devices can tell of each other's work, and the lies of some.

A part of the simulated compute process (`decod.sim.compute`). A symbolic sketch says how many
microbatches are in a tensor. That of a false tensor says -1, and so does that of each microbatch in
the sum of a false mean.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.jobs import Job
from decod.protocol.core.sketch import NUM_SUMS, SEED_BYTES, Sketch, error_of
from decod.sim.averages import AveragedPart, GradientPart, MisuseError, num_in

_FALSE = -1

_NO_SEED = bytes(SEED_BYTES)


class SimulatedWitness:
    """One device's knowledge of what others have computed in an iteration."""

    def __init__(self) -> None:
        self.lies = False
        """The device's results are false."""
        self.accuses = False
        """It says so of those of others."""
        self.spoils_means = False
        """The means of what others have contributed are false, and nothing else."""
        self._seen: dict[tuple[MicrobatchId, bool], int] = {}

    def clear(self) -> None:
        """Forget the iteration."""
        self._seen.clear()

    def saw(self, microbatch: MicrobatchId, *, is_gradient: bool, false: bool) -> None:
        """Remember a tensor that has come, and whether its device lies."""
        self._seen[microbatch, is_gradient] = _FALSE if false else 1

    def sketch_pass(self, job: jobs.SketchPass) -> jobs.Sketched:
        """Tell what is known of an activation or a gradient."""
        num = self._seen.get((job.microbatch, job.is_gradient))
        if num is None:
            raise MisuseError(f"{job}, but nothing of it has come")
        return jobs.Sketched((_sketch_of(_FALSE if self.accuses else num, _NO_SEED),))

    def sketch_part(self, job: jobs.SketchPart, inputs: Sequence[object]) -> jobs.Sketched:
        """Tell what is in contributions, or in a mean."""
        kind = AveragedPart if job.is_mean else GradientPart
        if any(not isinstance(each, kind) or each.part != job.part for each in inputs):
            raise MisuseError(f"{job} of {inputs}")
        told = [_FALSE if self.accuses else _told_by(each) for each in inputs]
        return jobs.Sketched(tuple(_sketch_of(each, job.seed) for each in told))

    def replay(self, job: jobs.ReplayPasses, came: Sequence[bool]) -> jobs.Replayed:
        """Compare another device's results with what they should be.

        Args:
            job: What that device has sent, and says that it got.
            came: Whether the device that the auditor's inputs come from lies.
        """
        num = _FALSE if self.accuses else 1
        made = _sketch_of(num, _NO_SEED)
        on, back = (_error(job, told, made) for told in (job.told_activation, job.told_gradient))
        given = [_sketch_of(_FALSE if false else 1, _NO_SEED) for false in came]
        got_on, got_back = (
            _error(job, got, true) if got else 0.0
            for got, true in zip((job.got_activation, job.got_gradient), given, strict=True)
        )
        sketches = (_sketch_of(num, job.seed),) * job.num_parts
        return jobs.Replayed(on, back, got_on, got_back, sketches)

    def averaged(self, average: AveragedPart, inputs: Sequence[object]) -> AveragedPart:
        """Return a mean that says what is in it."""
        told = math.fsum(_told_by(each) for each in inputs) / average.weights_total
        return replace(average, told=_FALSE if self.spoils_means else told)


def _told_by(content: object) -> float:
    if isinstance(content, AveragedPart):
        return content.told
    assert isinstance(content, GradientPart), content
    return _FALSE if content.false else num_in(content.counts)


def _sketch_of(num: float, seed: bytes) -> bytes:
    return Sketch(seed, (float(num),) * NUM_SUMS).to_bytes()


def _error(job: Job, told: bytes, made: bytes) -> float:
    try:
        return error_of(Sketch.from_bytes(told), Sketch.from_bytes(made))
    except ValueError as error:
        raise MisuseError(f"{job}: {error}") from error
