"""The time of a compute process is added up by what it is spent on."""

import asyncio
from typing import Any

import pytest

from decod.driver.compute import DeviceTimes, JobError, Reply, TimedCompute
from decod.ids import MicrobatchId
from decod.protocol.core import jobs

M = MicrobatchId(1, 0, 0)


class Device:
    """Ends each job in the loop's next turn, with the reply or error that comes next."""

    def __init__(self, *outcomes: Reply | JobError) -> None:
        self._outcomes = list(outcomes)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def submit(self, *_: Any, **__: Any) -> asyncio.Future[Reply]:
        loop, outcome = asyncio.get_running_loop(), self._outcomes.pop(0)
        future: asyncio.Future[Reply] = loop.create_future()
        if isinstance(outcome, Reply):
            loop.call_soon(future.set_result, outcome)
        else:
            loop.call_soon(future.set_exception, outcome)
        return future


def spent(*done: tuple[jobs.Job, Reply | JobError]) -> DeviceTimes:
    async def run() -> DeviceTimes:
        compute = TimedCompute(Device(*(reply for _, reply in done)))
        for job, _ in done:
            await asyncio.gather(compute.submit(job), return_exceptions=True)
        assert not compute.ended.done()
        times = compute.take()
        assert compute.take() == DeviceTimes()
        return times

    return asyncio.run(run())


def test_jobs_count_for_what_they_do() -> None:
    failed = JobError({"code": "E-TRN-003", "what": "NaN", "why": "it is", "fix": "nothing"})
    times = spent(
        (jobs.Embed(M), Reply(None, 3.0, data_s=1.0)),
        (jobs.Forward(M), Reply(None, 4.0)),
        (jobs.Head(M), Reply(None, 5.0, data_s=0.5, backward_s=3.0)),
        (jobs.Backward(M), Reply(None, 8.0)),
        (jobs.EmbedBackward(M), Reply(None, 16.0)),
        (jobs.Forward(M), failed),
        (jobs.Gather(1, 2), Reply(None, 32.0)),
        (jobs.Reduce(0, 2, (1,)), Reply(None, 64.0)),
        (jobs.Propose(1, 2, 3), Reply(None, 128.0)),
        (jobs.CommitStep(1), Reply(None, 256.0)),
        (jobs.Snapshot(with_optimizer=True), Reply(None, 512.0)),
    )
    assert times.data_s == 1.5
    assert times.forward_s == 2.0 + 4.0 + 1.5
    assert times.backward_s == 3.0 + 8.0 + 16.0
    assert times.averaging_s == 32.0 + 64.0
    assert times.step_s == 128.0 + 256.0
    assert times.other_s == 512.0
    assert times.num_microbatches == 2


def test_the_average_begins_with_its_first_job() -> None:
    times = spent((jobs.Forward(M), Reply(None, 0.0)), (jobs.Gather(1, 2), Reply(None, 5.0)))
    assert times.passes_begin_s is not None
    assert times.averaging_begin_s == pytest.approx(times.passes_begin_s - 5.0, abs=1.0)


@pytest.mark.parametrize(
    "job", [jobs.Gather(1, 2, kind=jobs.AverageKind.AHEAD), jobs.CommitStep(1)]
)
def test_work_beside_passes_begins_no_average(job: jobs.Job) -> None:
    assert spent((job, Reply(None, 1.0))).averaging_begin_s is None
