"""A simulated host's compute process: a queue of jobs that each take time.

And its planning process, which works beside it.
"""

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decod.ids import JobId, TensorId
from decod.planner.deciding import decide
from decod.protocol.core.durations import Patience
from decod.protocol.core.effects import StartJob
from decod.protocol.core.events import JobFailed, JobFinished
from decod.protocol.core.jobs import DecideFlows, FlowsDecided, Job, Measure, Measured
from decod.run.protocol_config import ProtocolConfig
from decod.sim.averages import MisuseError
from decod.sim.kernel import Kernel
from decod.sim.profile import Activation, Gradient

if TYPE_CHECKING:
    from decod.sim.simulated_host import Observer, SimHost


@dataclass(slots=True)
class _QueuedJob:
    id: JobId
    job: Job
    inputs: tuple[TensorId, ...]


class SimDevice:
    """Runs the jobs of one host, one after the other.

    Args:
        host: Holds the tensors, runs the jobs (`simulated_compute`), and has a speed.
        kernel: The run's kernel.
        observer: Hears of all jobs and steps.
        protocol: Says how long a job may show no progress.
        rng: Source of the jitter.
    """

    def __init__(
        self,
        host: "SimHost",
        kernel: Kernel,
        observer: "Observer",
        protocol: ProtocolConfig,
        rng: random.Random,
    ) -> None:
        self._host = host
        self._kernel = kernel
        self._observer = observer
        self._protocol = protocol
        self._rng = rng
        self._jobs: deque[_QueuedJob] = deque()
        self._patience = Patience(protocol)
        self._hung = False
        self.sleeps = True
        """Whether the device stands still when its host's node does."""
        self._life = 0
        """Grows with every start and end of the process, which voids everything planned before."""
        self.num_microbatch_jobs = 0
        """Number of forward and backward passes so far."""

    def start(self, effect: StartJob) -> None:
        """Queue a job, or run it beside the others."""
        if isinstance(effect.job, DecideFlows):
            duration_s = self._host.profile.seconds(effect.job)
            self._kernel.after(
                duration_s, self._decided, effect.job_id, effect.job, self._host.life
            )
            return
        for tensor in effect.inputs:
            self._host.tensors.usable(tensor, effect).num_jobs += 1
        self._jobs.append(_QueuedJob(effect.job_id, effect.job, effect.inputs))
        if len(self._jobs) == 1:
            self._run_next()

    def _decided(self, job_id: JobId, job: DecideFlows, life: int) -> None:
        host = self._host
        if life != host.life:
            return
        if host.frozen:
            host.when_thawed(lambda: self._decided(job_id, job, life))
            return
        failure_ratio = host.profile.decide_failure_ratio
        if failure_ratio and self._rng.random() < failure_ratio:
            host.deliver(JobFailed(job_id, "planning process died", fatal=False))
            return
        result = FlowsDecided(decide(job.unsettled))
        host.deliver(JobFinished(job_id, result, (), host.profile.seconds(job)))

    @property
    def hopes(self) -> bool:
        """Whether the device hangs in a job that may take long, as loading may: its node waits for
        it."""
        return self._hung and bool(self._jobs) and math.isinf(self._patience.late_s)

    def hang(self) -> None:
        """Stop making progress, until the node loses patience and kills the process."""
        if not self._hung:
            self._hung = True
            self._life += 1
            self._host.trace("host.compute_hung")
            self._look(self._life)

    def stall(self, duration_s: float) -> None:
        """Stop making progress for a while. The job that was being done begins again then."""
        if not self._hung:
            self.hang()
            self._kernel.after(duration_s, self._go_on, self._life)

    def _go_on(self, life: int) -> None:
        if life == self._life:
            self._hung = False
            self._life += 1
            if self._jobs:
                self._run_next()

    def _look(self, life: int) -> None:
        if life != self._life:
            return
        patience = self._patience
        if not self._host.frozen and patience.look(self._host.clock.now_s) is not None:
            self.fail()
        else:
            self._kernel.after(patience.interval_s, self._look, life)

    def fail(self) -> None:
        """Die: the state and the jobs are lost, but the node lives on."""
        self._hung = False
        failed = list(self._jobs)
        self._jobs.clear()
        self._life += 1  # The job in progress never ends.
        self._host.trace("host.compute_killed")
        for entry in failed:
            self._host.tensors.end_job(entry.inputs)
        # The node notices the death of an idle process, too.
        for job_id in [entry.id for entry in failed] or [JobId(0)]:
            self._host.deliver(JobFailed(job_id, "compute process died", fatal=True))

    def down(self) -> None:
        """Forget all jobs, because the host went down."""
        self._life += 1
        self._jobs.clear()
        self._patience = Patience(self._protocol)
        self._hung = False

    def _run_next(self) -> None:
        job = self._jobs[0].job
        profile = self._host.profile
        self._patience.begin(self._host.clock.now_s, job.name.lower())
        if self._hung:
            return
        jitter_ratio = profile.jitter_ratio
        factor = self._rng.uniform(1 - jitter_ratio, 1 + jitter_ratio) if jitter_ratio else 1.0
        duration_s = profile.seconds(job) * factor / self._host.speed
        self._kernel.after(duration_s, self._done, duration_s, self._life)

    def _done(self, duration_s: float, life: int) -> None:
        if life != self._life:
            return
        host = self._host
        if host.frozen and self.sleeps:
            host.when_thawed(lambda: self._done(duration_s, life))
            return
        self._patience.end(host.clock.now_s)
        entry = self._jobs.popleft()
        contents = tuple(map(host.tensors.content, entry.inputs))
        host.tensors.end_job(entry.inputs)
        try:
            outcome = host.compute.run(entry.job, contents)
        except MisuseError as error:
            self._observer.misused(host, str(error), error)
            raise
        passed_on = [c for c in outcome.outputs if isinstance(c, (Activation, Gradient))]
        self.num_microbatch_jobs += len(passed_on)
        self._observer.computed(host, entry.job, duration_s)
        if outcome.committed is not None:
            self._observer.committed(host, outcome.committed)
        outputs = tuple(map(host.tensors.add, outcome.outputs))
        if self._jobs:
            self._run_next()
        result = outcome.result
        if isinstance(entry.job, Measure):
            forward_s = duration_s / (1 + host.profile.backward_ratio)
            result = Measured(forward_s, duration_s - forward_s)
        host.deliver(JobFinished(entry.id, result, outputs, duration_s))
