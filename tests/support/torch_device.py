"""A device for tests of whole cores: it does every job with a real `StageExecutor`, at once."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.train.exchange import Place, reduce_leniently
from decod.train.executor import Sources, StageExecutor
from decod.train.passes import mean_loss

_Outcome = tuple[jobs.JobResult, Sequence[object]]


class TorchDevice:
    """Runs the jobs of one node.

    Args:
        executor: Not built yet.
    """

    def __init__(self, executor: StageExecutor) -> None:
        self.executor = executor
        self.folded: list[MicrobatchId] = []
        """Microbatches whose gradients were added up here, in order."""

    def run(self, job: jobs.Job, inputs: Sequence[Any]) -> _Outcome:
        """Return what a job ends with, and its tensors."""
        outcome = self._pass(job, inputs) or self._step(job, inputs)
        assert outcome is not None, f"{job} is none of a run without newcomers"
        return outcome

    def _pass(self, job: jobs.Job, inputs: Sequence[Tensor]) -> _Outcome | None:
        executor = self.executor
        match job:
            case jobs.Build(stage_index):
                return jobs.Built(executor.build(stage_index).hash), ()
            case jobs.Embed(mb):
                return jobs.Nothing(), (executor.passes.embed(mb).clone(),)
            case jobs.Forward(mb):
                return jobs.Nothing(), (executor.passes.forward(mb, inputs[0]).clone(),)
            case jobs.Head(mb):
                gradient, loss = executor.passes.head(mb, inputs[0])
                part = jobs.Loss(loss, executor.passes.num_targets(mb))
                num_positions = executor.config.run.batch.tokens_per_microbatch
                return mean_loss([part], num_positions), (gradient.clone(),)
            case jobs.Backward(mb):
                self.folded.append(mb)
                return jobs.Nothing(), (executor.passes.backward(mb, inputs[0]).clone(),)
            case jobs.EmbedBackward(mb):
                self.folded.append(mb)
                executor.passes.embed_backward(mb, inputs[0])
                return jobs.Nothing(), ()
            case jobs.Drop(mb):
                executor.passes.drop(mb)
                return jobs.Nothing(), ()
        return None

    def _exchange(self, job: jobs.Gather | jobs.Reduce, inputs: Sequence[Tensor]) -> _Outcome:
        ahead = job.kind is jobs.AverageKind.AHEAD
        executor, exchange = self.executor, self.executor.exchange(job.spec, ahead=ahead)
        if isinstance(job, jobs.Reduce):
            place, refused = Place(job.part, job.num_parts, job.phase), dict[int, str]()
            if job.lenient:
                mean, refused = reduce_leniently(exchange, inputs, place, job.weights)
            else:
                mean = exchange.reduce(inputs, place, job.weights)
            reason = next(iter(refused.values()), "")
            squared = jobs.Squared(executor.square_sum(mean), tuple(refused), reason)
            return squared, (mean.clone(),)
        if job.phase and job.num_parts:
            parts = exchange.parts(job.phase, job.num_parts, inputs)
        else:
            parts = executor.gather(job.num_parts, job.iteration, spec=job.spec, ahead=ahead)
        return jobs.Nothing(), [part.clone() for part in parts]

    def _step(self, job: jobs.Job, inputs: Sequence[Tensor]) -> _Outcome | None:
        executor = self.executor
        match job:
            case jobs.Gather() | jobs.Reduce():
                return self._exchange(job, inputs)
            case jobs.Square(iteration, total):
                mean = executor.own_mean(total, iteration)
                return jobs.Squared(executor.square_sum(mean)), ()
            case jobs.Propose():
                digest = executor.propose(
                    job.iteration,
                    inputs,
                    weights_total=None if job.num_parts else job.weights_total,
                    gradient_norm=job.gradient_norm,
                    share=job.share(executor.config.run.batch.tokens_per_microbatch),
                    how=Sources(
                        job.num_ahead,
                        job.spec,
                        job.ahead_spec,
                        job.missed,
                        job.missed_now,
                        ends_phase=job.ends_phase,
                    ),
                )
                return jobs.Proposed(
                    digest, executor.effective_rank, metrics=tuple(executor.metrics.items())
                ), ()
            case jobs.StepLocally(iteration):
                return jobs.Proposed(
                    executor.step_locally(iteration), metrics=tuple(executor.metrics.items())
                ), ()
            case jobs.CommitStep(iteration):
                executor.commit(iteration)
            case jobs.Reset():
                executor.reset()
            case jobs.Retract():
                executor.retract()
            case jobs.Snapshot():
                # A mark is kept on disk. Nobody reads it in these runs.
                return jobs.SnapshotTaken(executor.anchor, "manifest"), (None,)
            case _:
                return None
        return jobs.Nothing(), ()
