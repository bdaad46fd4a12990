"""The time of a compute process is added up by what it is spent on."""

import asyncio
from typing import Any

import pytest

from decod.driver.compute import JobError, Reply
from decod.driver.timed_compute import DeviceTimes, TimedCompute


class Device:
    """Ends each job in the loop's next turn, with the reply or error that comes next."""

    def __init__(self, *outcomes: Reply | JobError) -> None:
        self._outcomes = list(outcomes)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def submit(self, kind: str, fields: Any = None, **_: Any) -> asyncio.Future[Reply]:
        loop, outcome = asyncio.get_running_loop(), self._outcomes.pop(0)
        future: asyncio.Future[Reply] = loop.create_future()
        if isinstance(outcome, Reply):
            loop.call_soon(future.set_result, outcome)
        else:
            loop.call_soon(future.set_exception, outcome)
        return future


def spent(*jobs: tuple[str, dict[str, Any], Reply | JobError]) -> DeviceTimes:
    async def run() -> DeviceTimes:
        compute = TimedCompute(Device(*(reply for _, _, reply in jobs)))
        for kind, fields, _ in jobs:
            await asyncio.gather(compute.submit(kind, fields), return_exceptions=True)
        assert not compute.ended.done()
        times = compute.take()
        assert compute.take() == DeviceTimes()
        return times

    return asyncio.run(run())


def test_jobs_count_for_what_they_do() -> None:
    failed = JobError({"code": "E-TRN-003", "what": "NaN", "why": "it is", "fix": "nothing"})
    times = spent(
        ("embed", {}, Reply({}, 3.0, data_s=1.0)),
        ("forward", {}, Reply({}, 4.0)),
        ("head", {}, Reply({}, 5.0, data_s=0.5, backward_s=3.0)),
        ("backward", {}, Reply({}, 8.0)),
        ("embed_backward", {}, Reply({}, 16.0)),
        ("forward", {}, failed),
        ("gather", {}, Reply({}, 32.0)),
        ("reduce_part", {}, Reply({}, 64.0)),
        ("propose", {}, Reply({}, 128.0)),
        ("commit", {}, Reply({}, 256.0)),
        ("snapshot", {}, Reply({}, 512.0)),
    )
    assert times.data_s == 1.5
    assert times.forward_s == 2.0 + 4.0 + 1.5
    assert times.backward_s == 3.0 + 8.0 + 16.0
    assert times.averaging_s == 32.0 + 64.0
    assert times.step_s == 128.0 + 256.0
    assert times.other_s == 512.0
    assert times.num_microbatches == 2


def test_the_average_begins_with_its_first_job() -> None:
    times = spent(("forward", {}, Reply({}, 0.0)), ("gather", {}, Reply({}, 5.0)))
    assert times.passes_begin_s is not None
    assert times.averaging_begin_s == pytest.approx(times.passes_begin_s - 5.0, abs=1.0)


@pytest.mark.parametrize(("kind", "fields"), [("gather", {"ahead": True}), ("commit", {})])
def test_work_beside_passes_begins_no_average(kind: str, fields: dict[str, Any]) -> None:
    assert spent((kind, fields, Reply({}, 1.0))).averaging_begin_s is None
