"""The order in which a host's device works."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import JobId
from decod.protocol.core import jobs
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import Effect, EffectSink, StartJob
from decod.protocol.core.events import JobFailed, JobFinished
from tests.unit.protocol.cast import freed, mb, tensor


def done(number: int, *outputs: int) -> JobFinished:
    tensors = tuple(tensor(k) for k in outputs)
    return JobFinished(JobId(number), jobs.Nothing(), tensors, duration_s=1.0)


@pytest.fixture
def out() -> EffectSink[Effect]:
    return EffectSink()


@pytest.fixture
def store(out: EffectSink[Effect]) -> TensorStore:
    return TensorStore(out)


class Owner:
    """Keeps which of its jobs have ended, and lets go of what they leave."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.done: list[jobs.Job] = []
        self.failed: list[jobs.Job] = []

    def job_done(self, now_s: float, job: jobs.Job, event: JobFinished) -> None:
        self.done.append(job)
        self._store.release(*(output.id for output in event.outputs))

    def job_failed(self, now_s: float, job: jobs.Job, reason: str) -> None:
        self.failed.append(job)


@pytest.fixture
def owner(store: TensorStore) -> Owner:
    return Owner(store)


@pytest.fixture
def queue(store: TensorStore, out: EffectSink[Effect]) -> ComputeQueue:
    return ComputeQueue(store, out)


STEPS = ["submit forward", "submit backward", "submit load", "end", "fail", "reset", "hasten"]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_tensor_is_freed_once_whatever_happens(steps: list[str]) -> None:
    """The oracle is a plain list of what was started and not ended."""
    out = EffectSink[Effect]()
    store = TensorStore(out)
    queue, owner = ComputeQueue(store, out), Owner(store)
    running: list[StartJob] = []
    next_tensor, freed_all = 1, []

    def note() -> None:
        effects = out.taken()
        running.extend(e for e in effects if isinstance(e, StartJob))
        freed_all.extend(freed(effects))
        assert len(running) <= 2

    for step in [*steps, *["end"] * 100]:
        if step.startswith("submit"):
            kind: dict[str, jobs.Job] = {
                "forward": jobs.Forward(mb(0)),
                "backward": jobs.Backward(mb(0)),
            }
            job = kind.get(step.split()[1], jobs.Load(1, ("",)))
            queue.submit(job, owner, [store.add(tensor(next_tensor))])
            note()
            next_tensor += 1
        elif step == "reset":
            queue.reset()
            note()
        elif step == "hasten":
            queue.hasten(jobs.Forward(mb(0)))
        elif running:
            start = running.pop(0)
            if step == "fail":
                queue.failed(0.0, JobFailed(start.job_id, "", fatal=False))
                note()
                continue
            event = done(start.job_id)
            if not isinstance(start.job, jobs.Reset):
                event = done(start.job_id, next_tensor)
                next_tensor += 1
            queue.finished(0.0, event)
            note()
    assert queue.idle
    assert len(store) == 0
    assert sorted(freed_all) == list(range(1, next_tensor))


def test_a_hastened_pass_goes_before_backward_and_that_before_forward(
    queue: ComputeQueue, out: EffectSink[Effect], owner: Owner, store: TensorStore
) -> None:
    first, second = jobs.Embed(mb(0)), jobs.Embed(mb(1))
    backward, late, hastened = jobs.EmbedBackward(mb(2)), jobs.Embed(mb(3)), jobs.Embed(mb(4))
    for job in (first, second, backward, late, hastened):
        queue.submit(job, owner)
    queue.hasten(hastened)
    queue.hasten(first)  # It has been given to the device already.
    started: list[jobs.Job] = []
    while starts := [effect for effect in out.taken() if isinstance(effect, StartJob)]:
        for start in starts:
            started.append(start.job)
            queue.finished(0.0, done(start.job_id))
    assert started == [first, second, hastened, backward, late]
