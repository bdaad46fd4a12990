"""The order in which a host's device works."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.ids import JobId, TensorId
from decod.planner.deciding import Unsettled
from decod.protocol.core import jobs
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import Effect, StartJob
from decod.protocol.core.events import JobFailed, JobFinished
from tests.unit.protocol.cast import freed, jobs_of, mb, notes_of, tensor


def done(number: int, *outputs: int) -> JobFinished:
    tensors = tuple(tensor(k) for k in outputs)
    return JobFinished(JobId(number), jobs.Nothing(), tensors, duration_s=1.0)


DECIDE = jobs.DecideFlows(Unsettled(paths=(), capacities=(), outward=(), work_max=0))


@pytest.fixture
def store() -> TensorStore:
    return TensorStore()


class Owner:
    """Keeps which of its jobs have ended, and lets go of what they leave."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.done: list[jobs.Job] = []
        self.failed: list[jobs.Job] = []

    def job_done(self, now_s: float, job: jobs.Job, event: JobFinished) -> list[Effect]:
        self.done.append(job)
        return self._store.release(*(output.id for output in event.outputs))

    def job_failed(self, now_s: float, job: jobs.Job, reason: str) -> list[Effect]:
        self.failed.append(job)
        return []


@pytest.fixture
def owner(store: TensorStore) -> Owner:
    return Owner(store)


@pytest.fixture
def queue(store: TensorStore) -> ComputeQueue:
    return ComputeQueue(store)


def fill(queue: ComputeQueue) -> list[Effect]:
    """Give the device the two jobs that it holds at a time."""
    return queue.submit(jobs.Embed(mb(90))) + queue.submit(jobs.Embed(mb(91)))


def test_the_device_holds_two_jobs_and_gets_the_next_when_one_ends(
    queue: ComputeQueue, owner: Owner
) -> None:
    assert queue.idle
    assert fill(queue) == [
        StartJob(JobId(1), jobs.Embed(mb(90))),
        StartJob(JobId(2), jobs.Embed(mb(91))),
    ]
    assert queue.submit(jobs.Embed(mb(1)), owner) == []
    assert queue.finished(0.0, done(1)) == [StartJob(JobId(3), jobs.Embed(mb(1)))]
    queue.finished(0.0, done(2))
    assert not queue.idle
    assert owner.done == [], "these were others'"
    queue.finished(0.0, done(3))
    assert owner.done == [jobs.Embed(mb(1))]
    assert queue.idle


@pytest.mark.parametrize("backward", [jobs.Backward, jobs.Head, jobs.EmbedBackward])
@pytest.mark.parametrize("forward", [jobs.Forward, jobs.Embed])
def test_what_frees_memory_goes_before_what_fills_it(
    queue: ComputeQueue,
    backward: type[jobs.Backward],
    forward: type[jobs.Forward],
) -> None:
    fill(queue)
    for job in (forward(mb(1)), backward(mb(2)), jobs.Drop(mb(3)), jobs.Gather(1, 2)):
        queue.submit(job)
    order = [job for k in range(1, 5) for job in jobs_of(queue.finished(0.0, done(k)))]
    assert order == [jobs.Drop(mb(3)), jobs.Gather(1, 2), backward(mb(2)), forward(mb(1))]


def test_jobs_of_one_kind_keep_their_order(queue: ComputeQueue) -> None:
    fill(queue)
    for k in range(3):
        queue.submit(jobs.Forward(mb(k)))
    order = [job for k in range(1, 4) for job in jobs_of(queue.finished(0.0, done(k)))]
    assert order == [jobs.Forward(mb(k)) for k in range(3)]


def test_inputs_are_released_and_outputs_belong_to_the_owner(
    queue: ComputeQueue, store: TensorStore, owner: Owner
) -> None:
    queue.submit(jobs.Forward(mb(0)), owner, [store.add(tensor(1))])
    assert freed(queue.finished(0.0, done(1, 7))) == [1, 7]
    assert owner.done == [jobs.Forward(mb(0))]
    assert len(store) == 0


def test_a_failed_job_gives_its_inputs_back(
    queue: ComputeQueue, store: TensorStore, owner: Owner
) -> None:
    queue.submit(jobs.Forward(mb(0)), owner, [store.add(tensor(1))])
    goes_on, effects = queue.failed(0.0, JobFailed(JobId(1), "not finite", fatal=False))
    assert goes_on
    assert owner.failed == [jobs.Forward(mb(0))]
    assert freed(effects) == [1]
    assert notes_of(effects) == ["job.failed"]
    assert queue.idle


def test_a_lack_of_memory_is_told_as_such(
    queue: ComputeQueue, store: TensorStore, owner: Owner
) -> None:
    queue.submit(jobs.Forward(mb(0)), owner, [store.add(tensor(1))])
    failed = JobFailed(JobId(1), "out of memory", fatal=False, out_of_memory=True)
    goes_on, effects = queue.failed(0.0, failed)
    assert goes_on
    assert owner.failed == [jobs.Forward(mb(0))]
    assert notes_of(effects) == ["memory.exhausted"]


def test_a_node_can_not_go_on_if_what_nobody_answers_for_fails(queue: ComputeQueue) -> None:
    queue.submit(jobs.CommitStep(1))
    goes_on, effects = queue.failed(0.0, JobFailed(JobId(1), "no memory", fatal=False))
    assert not goes_on
    assert notes_of(effects) == ["job.failed"]


def test_a_job_that_dies_with_its_process_is_not_its_owners_concern(
    queue: ComputeQueue, owner: Owner
) -> None:
    queue.submit(jobs.Forward(mb(0)), owner)
    assert not queue.failed(0.0, JobFailed(JobId(1), "signal 9", fatal=True))[0]
    assert owner.failed == []


def test_a_job_that_waits_can_be_taken_back(queue: ComputeQueue, store: TensorStore) -> None:
    fill(queue)
    store.add(tensor(1))
    waits = jobs.Backward(mb(1))
    queue.submit(waits, inputs=[TensorId(1)])
    assert queue.withdraw(jobs.Backward(mb(1))) is None, "an equal job is another one"
    effects = queue.withdraw(waits)
    assert effects is not None
    assert len(freed(effects)) == 1
    assert queue.withdraw(waits) is None
    assert jobs_of(queue.finished(0.0, done(1))) == []


def test_a_job_that_runs_is_not_taken_back(queue: ComputeQueue) -> None:
    runs = jobs.Backward(mb(1))
    queue.submit(runs)
    assert queue.withdraw(runs) is None


def test_a_reset_drops_what_waits_and_what_runs(
    queue: ComputeQueue, store: TensorStore, owner: Owner
) -> None:
    queue.submit(jobs.Forward(mb(0)), owner, [store.add(tensor(1))])
    queue.submit(jobs.Forward(mb(1)), owner, [store.add(tensor(2))])
    queue.submit(jobs.Forward(mb(2)), owner, [store.add(tensor(3))])
    queue.submit(jobs.Backward(mb(3)), owner, [store.add(tensor(4))])
    queue.submit(jobs.Reduce(0, 2, 8), owner, [store.add(tensor(5))])
    effects = queue.reset()
    assert sorted(freed(effects)) == [3, 4, 5]
    assert jobs_of(effects) == []

    effects = queue.finished(0.0, done(1, 11))
    assert freed(effects) == [1, 11]
    assert jobs_of(effects) == [jobs.Reset()]
    assert queue.failed(0.0, JobFailed(JobId(2), "reset", fatal=False))[0]
    queue.finished(0.0, done(3))
    assert (len(store), queue.idle) == (0, True)
    assert (owner.done, owner.failed) == ([], [])


@pytest.mark.parametrize(
    "job", [jobs.Build(1), jobs.Load(3, "{}"), jobs.Snapshot(True), jobs.CommitStep(3)]
)
def test_a_reset_keeps_what_belongs_to_no_iteration(
    queue: ComputeQueue, owner: Owner, job: jobs.Job
) -> None:
    """The commit is of the iteration before: an abort that follows at once must not undo it."""
    for each in (job, jobs.Embed(mb(0)), job):
        queue.submit(each, owner)
    queue.reset()
    for number in range(1, 5):
        queue.finished(0.0, done(number))
    assert owner.done == [job, job]
    assert queue.idle


STEPS = ["submit forward", "submit backward", "submit load", "end", "fail", "reset"]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_tensor_is_freed_once_whatever_happens(steps: list[str]) -> None:
    """The oracle is a plain list of what was started and not ended."""
    store = TensorStore()
    queue, owner = ComputeQueue(store), Owner(store)
    running: list[StartJob] = []
    next_tensor, freed_all = 1, []

    def note(effects: list[Effect]) -> None:
        running.extend(e for e in effects if isinstance(e, StartJob))
        freed_all.extend(freed(effects))
        assert len(running) <= 2

    for step in [*steps, *["end"] * 100]:
        if step.startswith("submit"):
            kind: dict[str, jobs.Job] = {
                "forward": jobs.Forward(mb(0)),
                "backward": jobs.Backward(mb(0)),
            }
            job = kind.get(step.split()[1], jobs.Load(1, ""))
            note(queue.submit(job, owner, [store.add(tensor(next_tensor))]))
            next_tensor += 1
        elif step == "reset":
            note(queue.reset())
        elif running:
            start = running.pop(0)
            if step == "fail":
                note(queue.failed(0.0, JobFailed(start.job_id, "", fatal=False))[1])
                continue
            event = done(start.job_id)
            if not isinstance(start.job, jobs.Reset):
                event = done(start.job_id, next_tensor)
                next_tensor += 1
            note(queue.finished(0.0, event))
    assert queue.idle
    assert len(store) == 0
    assert sorted(freed_all) == list(range(1, next_tensor))


def test_a_compute_process_that_ends_idle_fails_no_job(queue: ComputeQueue) -> None:
    ended = JobFailed(JobId(99), "exit code 1", fatal=True)
    assert queue.failed(0.0, ended) == (False, [])
    with pytest.raises(AssertionError):
        queue.finished(0.0, done(99))


def test_a_job_beside_the_device_neither_waits_for_it_nor_keeps_it_busy(
    queue: ComputeQueue, owner: Owner
) -> None:
    assert queue.submit(DECIDE, owner) == [StartJob(JobId(1), DECIDE)]
    assert queue.idle
    fill(queue)
    assert not queue.idle
    assert jobs_of(queue.submit(DECIDE, owner)) == [DECIDE]
    assert queue.submit(jobs.Embed(mb(92))) == []
    queue.finished(0.0, done(1))
    assert owner.done == [DECIDE]


def test_a_job_beside_the_device_outlives_its_iteration_and_its_failure_ends_nothing(
    queue: ComputeQueue, owner: Owner
) -> None:
    queue.submit(DECIDE, owner)
    queue.reset()
    goes_on, effects = queue.failed(0.0, JobFailed(JobId(1), "it died", fatal=False))
    assert goes_on
    assert owner.failed == [DECIDE]
    assert notes_of(effects) == ["job.failed"]


def test_the_device_is_late_with_what_it_works_on_and_not_with_what_waits(
    queue: ComputeQueue,
) -> None:
    fill(queue)
    queue.finished(0.0, done(1))  # It took 1 s.
    assert not any(queue.is_late(float(now_s)) for now_s in range(5))
    queue.finished(4.0, done(2))
    assert not any(queue.is_late(float(now_s)) for now_s in range(4, 60)), "it has nothing to do"
    queue.submit(jobs.Embed(mb(1)))
    found = [now_s for now_s in range(60, 70) if queue.is_late(float(now_s))]
    assert found[0] == 65
