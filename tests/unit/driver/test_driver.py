"""The driver with a scripted machine, a fake transport and a fake compute process."""

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.driver.arena import ArenaAllocator, Sizes, TensorRegion
from decod.driver.compute import ComputeDiedError, ComputeProcess, JobError, PlanningProcess, Reply
from decod.driver.driver import DriverPorts, NodeDriver, ServedState, outlook
from decod.driver.machine_driver import NO_JOB
from decod.errors import OUT_OF_MEMORY
from decod.ids import Iteration, JobId, MicrobatchId, NodeId, TensorId
from decod.planner.deciding import Decided, Unsettled
from decod.planner.graph import Route
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import CanTake, Message
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.view import Member
from decod.protocol.node_machine import NodeMachine
from decod.train.checkpoint.description import (
    Chunk,
    StateSink,
    Transfer,
    describe_blob,
    description_text,
    entry_json,
)
from decod.train.checkpoint.entries import TensorEntry
from tests.waiting import wait_until

PEER = NodeId("b" * 52)
MESSAGE = CanTake(Iteration(1, 1))
M = MicrobatchId(1, 0, 0)
MANIFEST = '{"tensors":[],"chunks":""}'


class ScriptedMachine:
    """Answers each event with the next list of effects; what is beyond the script has none."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(
            view=SimpleNamespace(term=1),
            node_id=NodeId("a" * 52),
            member=SimpleNamespace(stage_index=1),
            compute=SimpleNamespace(num_passes=0),
        )
        self.strategy = SimpleNamespace(facts=None)
        self.leadership = SimpleNamespace(election=None)
        self.deadline_s: float | None = None
        self.first: list[Effect] = []
        self.script: deque[list[Effect] | Exception | Callable[[ev.Event], list[Effect]]] = deque()
        self.events: list[ev.Event] = []

    def start(self, now_s: float) -> list[Effect]:
        return self.first

    def step(self, now_s: float, event: ev.Event) -> list[Effect]:
        self.events.append(event)
        answer = self.script.popleft() if self.script else []
        if isinstance(answer, Exception):
            raise answer
        return answer(event) if callable(answer) else answer


@dataclass(frozen=True)
class Probed:
    latency_s: float
    bandwidth_bytes_per_s: float


class FakeTransport:
    """Writes down what it is told; `fetched` is what a donor gives, `probed` what a probe shows."""

    def __init__(self) -> None:
        self.probed: Probed | None = None
        self.told: list[tuple[Any, ...]] = []
        self.fetched: Callable[[StateSink], str]

    def send(self, to: NodeId, term: int, message: Message, way: Way | None = None) -> None:
        self.told.append(("send", to, term, message))

    def send_tensor(
        self,
        to: NodeId,
        term: int,
        message: Message,
        data: memoryview,
        tensor: TensorId,
        way: Way | None = None,
    ) -> None:
        self.told.append(("send_tensor", to, bytes(data), tensor))

    async def probe(self, to: NodeId, term: int, size_bytes: int) -> Probed | None:
        self.told.append(("probe", to, term, size_bytes))
        return self.probed

    def use_members(self, members: tuple[Member, ...]) -> None:
        self.told.append(("use_members", members))

    async def fetch_state(self, wanted: fx.FetchState, sink: StateSink) -> str:
        self.told.append(("fetch_state", wanted))
        return self.fetched(sink)


class FakeCompute:
    """Keeps jobs until the test ends them."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.jobs: list[tuple[jobs.BaseJob, asyncio.Future[Reply], tuple[TensorRegion, ...]]] = []
        self.inputs: list[tuple[TensorRegion, ...]] = []

    def submit(
        self,
        job: jobs.BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.jobs.append((job, future, outputs))
        self.inputs.append(inputs)
        return future


class Bench:
    """A driver and everything around it."""

    def __init__(self) -> None:
        self.machine = ScriptedMachine()
        self.transport = FakeTransport()
        self.compute, self.planning = FakeCompute(), FakeCompute()
        self.arena = ArenaAllocator(1 << 16)
        self.notes: list[fx.Note] = []
        self.completed: list[int] = []
        self.unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.unhandled.append(context)
        )
        self.driver = NodeDriver(
            cast("NodeMachine", self.machine),
            cast("ComputeProcess", self.compute),
            self.arena,
            Sizes(activation_bytes=64, wire_element_bytes=4, sum_element_bytes=8),
            DriverPorts(
                transport=self.transport,
                planning=cast("PlanningProcess", self.planning),
                on_note=self.notes.append,
                on_run_complete=self.completed.append,
            ),
        )

    def script(
        self, *answers: list[Effect] | Exception | Callable[[ev.Event], list[Effect]]
    ) -> None:
        self.machine.script.extend(answers)

    def arrive(self, data: bytes) -> TensorId:
        """A tensor arrives from the peer; returns its id."""
        region = self.driver.allocate(len(data))
        assert region is not None
        region.view[:] = data
        self.driver.tensor_arrived(ev.Received(PEER, MESSAGE, term=1), region)
        event = self.machine.events[-1]
        assert isinstance(event, ev.Received)
        assert event.tensor is not None
        return event.tensor.id


@asynccontextmanager
async def driving() -> AsyncIterator[Bench]:
    """A driver that runs. Nothing may be left behind when it has ended."""
    bench = Bench()
    bench.driver.start()
    yield bench
    await bench.driver.close()
    gc.collect()
    await asyncio.sleep(0)
    assert not bench.unhandled
    bench.arena.close()


@pytest.fixture(name="bench")
def _bench() -> AbstractAsyncContextManager[Bench]:
    return driving()


def start_job(job: jobs.Job, *inputs: TensorId, job_id: int = 1) -> Effect:
    return fx.StartJob(JobId(job_id), job, inputs)


NUDGE = ev.DrainRequested()


async def test_effects_are_carried_out_in_order_and_nested_events_wait_their_turn(
    bench: Bench,
) -> None:
    note = fx.Note("x.y")
    # A job without room fails at once: that event must wait for the effects behind it.
    bench.driver.allocate(1 << 16)
    bench.script(
        [start_job(jobs.Forward(M)), fx.Send(PEER, MESSAGE), note, fx.UseMembers(())],
        [fx.CompleteRun(7)],
    )
    bench.driver.post(NUDGE)
    assert bench.transport.told == [("send", PEER, 1, MESSAGE), ("use_members", ())]
    assert bench.notes == [note]
    assert bench.completed == [7]
    assert bench.machine.events == [
        NUDGE,
        ev.JobFailed(JobId(1), "no room for its result", fatal=False),
    ]


async def test_the_timer_follows_the_machines_deadline(bench: Bench) -> None:
    now_s = asyncio.get_running_loop().time()

    def expect(deadline_s: float | None) -> Callable[[ev.Event], list[Effect]]:
        def answer(event: ev.Event) -> list[Effect]:
            bench.machine.deadline_s = deadline_s
            return []

        return answer

    bench.script(expect(now_s + 3600), expect(now_s + 0.01), expect(None), expect(None))
    bench.driver.post(NUDGE)
    bench.driver.post(NUDGE)  # Sooner than before: the timer must not wait for an hour.
    await wait_until(lambda: len(bench.machine.events) == 3)
    assert bench.machine.events[2] == ev.DeadlinePassed()
    bench.driver.post(NUDGE)
    assert len(bench.machine.events) == 4


async def test_a_bug_in_the_machine_ends_the_node_with_that_error(bench: Bench) -> None:
    bench.script(ZeroDivisionError("a bug"))
    bench.driver.post(NUDGE)
    with pytest.raises(ZeroDivisionError):
        await bench.driver.stopped
    bench.driver.post(NUDGE)
    assert len(bench.machine.events) == 1, "a broken machine is never stepped again"
    assert await bench.driver.request_state(1, 1, with_optimizer=True) == "this node has stopped"


async def test_a_reply_that_makes_no_sense_ends_the_node_too(bench: Bench) -> None:
    bench.script([start_job(jobs.Build(1))])
    bench.driver.post(NUDGE)
    bench.compute.jobs[0][1].set_result(Reply(jobs.Nothing(), 0.0))
    with pytest.raises(AttributeError):
        await bench.driver.stopped


async def test_a_tensor_goes_from_the_network_to_a_job_to_the_network_and_is_freed(
    bench: Bench,
) -> None:
    tensor = bench.arrive(b"in")
    bench.script([start_job(jobs.Forward(M), tensor), fx.FreeTensor(tensor)])
    bench.driver.post(NUDGE)
    (_, future, outputs), output = bench.compute.jobs[0], TensorId(tensor + 1)
    outputs[0].view[:3] = b"out"
    bench.script([fx.SendTensor(PEER, MESSAGE, output)])
    future.set_result(Reply(jobs.Nothing(), 0.25, copy_s=0.0625))
    await wait_until(lambda: bench.transport.told)
    assert bench.transport.told[0][2][:3] == b"out"
    timing = bench.driver.timing()
    assert (timing["compute_s"], timing["copy_s"]) == (0.1875, 0.0625)
    bench.script([fx.FreeTensor(output)])
    sent = ev.TensorSent(PEER, output, 64, 1.0)
    bench.driver.tensor_sent(sent)
    assert bench.machine.events[-1] == sent
    assert bench.arena.used_bytes == 0


@pytest.mark.parametrize("found", [Probed(0.1, 2e6), None])
async def test_a_probe_ends_in_a_measurement(found: Probed | None, bench: Bench) -> None:
    bench.transport.probed = found
    bench.script([fx.ProbeLink(PEER, 1 << 16)])
    bench.driver.post(NUDGE)
    await wait_until(lambda: len(bench.machine.events) == 2)
    assert bench.transport.told == [("probe", PEER, 1, 1 << 16)]
    measured = ev.LinkMeasured(PEER, 0.1, 2e6) if found else ev.LinkMeasured(PEER)
    assert bench.machine.events[-1] == measured


@pytest.mark.parametrize(
    ("error", "fatal", "short"),
    [
        (JobError({"code": "E-X-001", "what": "w", "why": "y", "fix": "f"}), False, False),
        (JobError({"code": OUT_OF_MEMORY, "what": "w", "why": "y", "fix": "f"}), False, True),
        (ComputeDiedError("killed"), True, False),
    ],
)
async def test_a_failed_job_frees_its_output(
    error: Exception, fatal: bool, short: bool, bench: Bench
) -> None:
    bench.script([start_job(jobs.Forward(M))])
    bench.driver.post(NUDGE)
    assert bench.arena.used_bytes == 64
    bench.compute.jobs[0][1].set_exception(error)
    await wait_until(lambda: len(bench.machine.events) == 2)
    assert bench.machine.events[1] == ev.JobFailed(JobId(1), str(error), fatal, short)
    assert bench.arena.used_bytes == 0


async def test_the_death_of_an_idle_compute_process_is_told(bench: Bench) -> None:
    bench.compute.ended.set_result("killed")
    await wait_until(lambda: bench.machine.events)
    assert bench.machine.events == [ev.JobFailed(NO_JOB, "killed", fatal=True)]


async def test_jobs_that_fail_after_the_end_make_no_noise(bench: Bench) -> None:
    """Their errors are looked at, or asyncio would print `never retrieved` on the terminal."""
    bench.script([start_job(jobs.Forward(M)), fx.Stop(fx.StopReason.DRAINED, "done")])
    bench.driver.post(NUDGE)
    bench.compute.jobs.pop()[1].set_exception(ComputeDiedError("closed"))
    assert (await bench.driver.stopped).reason is fx.StopReason.DRAINED


async def test_a_state_is_copied_once_its_size_is_known_and_served_to_all_then_freed_once(
    bench: Bench,
) -> None:
    askers = [
        asyncio.create_task(bench.driver.request_state(1, 4, with_optimizer=True)) for _ in range(3)
    ]
    await wait_until(lambda: len(bench.machine.events) == 3)
    bench.script([start_job(jobs.Snapshot(with_optimizer=True))])
    bench.driver.post(NUDGE)
    described = jobs.SnapshotTaken(4, MANIFEST, 100)
    bench.compute.jobs[0][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: len(bench.compute.jobs) == 2)

    def serve(event: ev.Event) -> list[Effect]:
        assert isinstance(event, ev.JobFinished)
        assert event.result == described
        return [fx.ServeState((1, 2, 3), 4, MANIFEST, event.outputs[0].id)]

    bench.script(serve)
    askers[2].cancel()  # Its release comes by itself.
    bench.compute.jobs[1][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: askers[0].done() and askers[1].done() and askers[2].done())
    first, second = askers[0].result(), askers[1].result()
    assert isinstance(first, ServedState)
    assert isinstance(second, ServedState)
    assert first.data is second.data
    assert len(first.data) == 100
    first.release()
    assert bench.arena.used_bytes > 0
    second.release()
    assert bench.arena.used_bytes == 0


async def test_the_size_of_the_parameters_is_asked_for_once(bench: Bench) -> None:
    described = jobs.SnapshotTaken(4, MANIFEST, 100)
    snapshot = start_job(jobs.Snapshot(with_optimizer=False))

    def free(event: ev.Event) -> list[Effect]:
        assert isinstance(event, ev.JobFinished)
        return [fx.FreeTensor(event.outputs[0].id)]

    for first, last in ((0, 1), (2, 2)):  # The second copy is made at once.
        bench.script([snapshot])
        bench.script(free)
        bench.driver.post(NUDGE)
        for number in range(first, last + 1):
            await wait_until(lambda: len(bench.compute.jobs) > number)  # noqa: B023
            bench.compute.jobs[number][1].set_result(Reply(described, 0.0))
        await wait_until(lambda: not bench.machine.script)
        assert bench.arena.used_bytes == 0
    assert [len(outputs) for _, _, outputs in bench.compute.jobs] == [0, 1, 1]


async def test_a_refused_state_says_why(bench: Bench) -> None:
    bench.script([fx.RefuseState(1, "not here")])
    assert await bench.driver.request_state(1, 4, with_optimizer=False) == "not here"


async def test_who_waits_for_a_state_at_the_end_is_told(bench: Bench) -> None:
    asker = asyncio.create_task(bench.driver.request_state(1, 4, with_optimizer=False))
    await wait_until(lambda: bench.machine.events)
    await bench.driver.close()
    assert await asker == "this node has stopped"


async def test_a_fetched_state_reaches_the_machine(bench: Bench) -> None:
    """Only the last buffer: what was given before was of a state that came to nothing."""

    def give(sink: StateSink) -> str:
        assert sink.allocate(500) is not None
        sink.began(Transfer(1, 4, num_bytes=8, num_arrived=8))
        assert bench.driver.transfer is not None
        sink.donor_failed(PEER, "it lies")
        assert sink.allocate(8) is not None
        return MANIFEST

    bench.transport.fetched = give
    bench.script([fx.FetchState((PEER,), 1, 4)])
    bench.driver.post(NUDGE)
    await wait_until(lambda: len(bench.machine.events) == 2)
    event = bench.machine.events[1]
    assert event == ev.StateFetched(1, 4, MANIFEST, ev.Tensor(TensorId(1), 8))
    assert bench.arena.used_bytes == 64
    assert bench.driver.transfer is None
    failed = fx.Note("state.failed", (("peer", PEER), ("reason", "it lies")))
    assert bench.notes[0] == failed
    assert bench.notes[1].event == "state.fetched"
    bench.script([fx.FetchState((PEER,), 1, 4, with_optimizer=False)])
    bench.driver.post(NUDGE)
    await wait_until(lambda: len(bench.machine.events) == 4)
    assert bench.notes[3].event == "parameters.fetched"


async def test_a_fetch_that_fails_gives_its_memory_back(bench: Bench) -> None:
    def give(sink: StateSink) -> str:
        assert sink.allocate(8) is not None
        raise OSError("broken off")

    bench.transport.fetched = give
    bench.script([fx.FetchState((PEER,), 1, 4)])
    bench.driver.post(NUDGE)
    await wait_until(lambda: len(bench.machine.events) == 2)
    assert bench.machine.events[1] == ev.StateFetchFailed(1, 4, "broken off")
    assert bench.arena.used_bytes == 0


async def test_a_copy_whose_asker_has_gone_is_given_back(bench: Bench) -> None:
    """The device may still be writing into it when the asker goes."""
    asker = asyncio.create_task(bench.driver.run_copy(jobs.Snapshot(with_optimizer=True)))
    await wait_until(lambda: bench.compute.jobs)
    described = jobs.SnapshotTaken(0, MANIFEST, 100)
    bench.compute.jobs[0][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: len(bench.compute.jobs) == 2)
    asker.cancel()
    await asyncio.gather(asker, return_exceptions=True)
    assert bench.arena.used_bytes > 0
    bench.compute.jobs[1][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: bench.arena.used_bytes == 0)


async def test_a_copy_is_given_with_its_manifest_or_its_error(bench: Bench) -> None:
    asker = asyncio.create_task(bench.driver.run_copy(jobs.Snapshot(with_optimizer=True)))
    await wait_until(lambda: bench.compute.jobs)
    described = jobs.SnapshotTaken(0, MANIFEST, 100)
    bench.compute.jobs[0][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: len(bench.compute.jobs) == 2)
    bench.compute.jobs[1][1].set_result(Reply(described, 0.0))
    served = await asker
    assert isinstance(served, ServedState)
    assert served.manifest == MANIFEST
    served.release()
    asker = asyncio.create_task(bench.driver.run_copy(jobs.Snapshot(with_optimizer=True)))
    await wait_until(lambda: len(bench.compute.jobs) == 3)
    bench.compute.jobs[2][1].set_exception(ComputeDiedError("gone"))
    assert await asker == "gone"
    assert bench.arena.used_bytes == 0


def test_how_long_a_state_takes_is_reckoned_from_what_donors_gave() -> None:
    transfer = SimpleNamespace(num_bytes=200, num_arrived=120, num_local=20, begun_s=5.0)
    found = outlook(cast("Transfer", transfer), 15.0)
    assert (found.percent, found.bytes_per_s) == (60.0, 10.0)
    assert found.left_s == pytest.approx(8.0, abs=0.01)
    transfer.num_arrived = 20
    assert outlook(cast("Transfer", transfer), 15.0).left_s is None


async def test_what_is_alike_in_the_nodes_own_state_is_not_fetched(bench: Bench) -> None:
    blob = bytes(range(64)) * 2
    entries = [TensorEntry(f"t{k}", "float32", (16,), 64 * k, 64, "") for k in range(2)]
    found, chunks = describe_blob(entries, memoryview(blob))
    manifest = description_text([entry_json(entry) for entry in found], "".join(chunks))
    described = jobs.SnapshotTaken(4, manifest, 128)
    seen: list[bytes | None] = []

    def give(sink: StateSink) -> str:
        seen.extend(
            None if piece is None else bytes(piece)
            for piece in (sink.local(Chunk(0, 64, sha)) for sha in (chunks[0], "0" * 64))
        )
        raise OSError("enough")

    bench.transport.fetched = give
    bench.script([fx.FetchState((PEER,), 1, 4, alike=True)])
    bench.driver.post(NUDGE)
    await wait_until(lambda: len(bench.compute.jobs) == 1)
    assert bench.compute.jobs[0][0] == jobs.Snapshot(with_optimizer=True)
    bench.compute.jobs[0][1].set_result(Reply(jobs.SnapshotTaken(4, "", 128), 0.0))
    await wait_until(lambda: len(bench.compute.jobs) == 2)
    bench.compute.jobs[1][2][0].view[:] = blob
    bench.compute.jobs[1][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: len(bench.machine.events) == 2)
    assert seen == [blob[:64], None]
    assert bench.arena.used_bytes == 0


async def test_the_end_of_the_planning_process_is_not_the_node_s(bench: Bench) -> None:
    """The device's jobs go elsewhere, and its timing does not count what is decided beside it."""
    job = jobs.DecideFlows(Unsettled(paths=(), capacities=(), outward=(), work_max=0))
    bench.script([start_job(job, job_id=2), start_job(job, job_id=3)])
    bench.driver.post(NUDGE)
    assert not bench.compute.jobs
    (_, lost, _), (_, found, _) = bench.planning.jobs
    lost.set_exception(ComputeDiedError("the planning process ended"))
    flows = (Decided(Route((NodeId("d"), NodeId("r"), NodeId("d"))), (0.5, 1.0)),)
    found.set_result(Reply(jobs.FlowsDecided(flows), duration_s=0.2))
    await asyncio.sleep(0)
    assert bench.machine.events[-2:] == [
        ev.JobFailed(JobId(2), "the planning process ended", fatal=False),
        ev.JobFinished(JobId(3), jobs.FlowsDecided(flows), (), 0.2),
    ]
    assert bench.driver.timing()["compute_s"] == 0.0
