"""A simulated host carries effects out as a daemon would, and catches what a core may not do."""

from collections.abc import Callable

import pytest

from decod.driver.event_loop import LATE_MAX_S, WAIT_MAX_S
from decod.ids import FlowId, Iteration, JobId, MicrobatchId, NodeId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event
from decod.protocol.core.messages import ForwardActivation, Message, Ping
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.sim.kernel import _STALL_COUNTS_S, Kernel, seeded
from decod.sim.network import LinkFaults, Links, LinkSpec, Network
from decod.sim.profile import ComputeProfile
from decod.sim.simulated_compute import SimulatedStep, StageModel
from decod.sim.simulated_host import SimHost, World

A, B = NodeId("a"), NodeId("b")
M = MicrobatchId(1, 0, 0)
BUILD = fx.StartJob(JobId(1), jobs.Build(0))
EMBED = fx.StartJob(JobId(2), jobs.Embed(M))
FORWARD = ForwardActivation(Iteration(1, 1), M, FlowId(A, 0), (B,))


class Misused(Exception):  # noqa: N818 - The name says what the test expects.
    pass


class Silent:
    """An observer that minds only misuse."""

    def stepped(self, host: SimHost, event: Event | None) -> None: ...

    def sent(self, host: SimHost, to: NodeId, message: Message) -> None: ...

    def computed(self, host: SimHost, job: jobs.Job, duration_s: float) -> None: ...

    def committed(self, host: SimHost, step: SimulatedStep) -> None: ...

    def noted(self, host: SimHost, event: str, fields: tuple[tuple[str, object], ...]) -> None: ...

    def misused(self, host: SimHost, text: str, cause: BaseException | None) -> None:
        raise Misused(text)


class Scripted:
    """A machine that answers every event by a function of the test's, and remembers them."""

    def __init__(self) -> None:
        self.answer: Callable[[Event | None], list[Effect]] = lambda _event: []
        self.deadline_s: float | None = None
        self.seen: list[tuple[float, Event]] = []

    def start(self, now_s: float) -> list[Effect]:
        return self.answer(None)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        self.seen.append((round(now_s, 6), event))
        return self.answer(event)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for _, event in self.seen]


RUN = RunConfig(stages=StagesConfig(num_relay_stages=1))


class Pair:
    """Two hosts with scripted machines, on links of 1 s; jobs and tensors take 1 s or so."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        links = Links(LinkSpec(latency_s=1.0, bandwidth_bytes_per_s=1e6))
        network = Network(self.kernel, links, LinkFaults(), seed=1)
        profile = ComputeProfile(jitter_ratio=0.0, activation_bytes=1_000_000)
        self.world = World(self.kernel, network, profile, Silent())
        self.a, self.b = Scripted(), Scripted()
        self.hosts = {}
        for node_id in (A, B):
            compute = StageModel(RUN)
            host = SimHost(node_id, node_id, self.world, compute, rng=seeded(1, node_id))
            self.hosts[node_id] = self.world.hosts[node_id] = host

    def run(self, until_s: float = 100.0) -> None:
        """Start what has not started, and let time pass."""
        for node_id, machine in ((A, self.a), (B, self.b)):
            if self.hosts[node_id].life == 0:
                self.hosts[node_id].start(machine)
        self.kernel.run(until_s=until_s)

    def embed(self, then: Callable[[TensorId], list[Effect]]) -> None:
        """Let host A make a tensor, and do something with it."""

        def answer(event: Event | None) -> list[Effect]:
            if event is None:
                return [BUILD, EMBED]
            if isinstance(event, ev.JobFinished) and event.outputs:
                return then(event.outputs[0].id)
            return []

        self.a.answer = answer


def test_a_tensor_reaches_its_receiver_and_may_be_freed_while_it_travels() -> None:
    pair = Pair()
    pair.embed(lambda tensor: [fx.SendTensor(B, FORWARD, tensor), fx.FreeTensor(tensor)])
    pair.run()
    (_, received), *_ = pair.b.seen
    assert isinstance(received, ev.Received)
    assert (received.sender, received.message) == (A, FORWARD)
    assert received.tensor is not None
    assert received.tensor.size_bytes == 1_000_000
    assert pair.a.kinds == ["JobFinished", "JobFinished", "TensorSent"]
    assert pair.hosts[A].tensors.stored_bytes == 0
    assert pair.hosts[A].tensors.stored_peak_bytes == 1_000_000


@pytest.mark.parametrize(
    "then",
    [
        lambda t: [fx.FreeTensor(t), fx.FreeTensor(t)],
        lambda t: [fx.FreeTensor(t), fx.SendTensor(B, FORWARD, t)],
        lambda t: [fx.StartJob(JobId(3), jobs.Head(M), (t,)), fx.FreeTensor(t)],
        lambda t: [fx.FreeTensor(TensorId(99))],
        lambda t: [fx.ServeState((7,), 1, "", t)],
        lambda t: [fx.RefuseState(7, "")],
        lambda t: [fx.StartJob(JobId(3), jobs.CommitStep(1))],
    ],
    ids=["double free", "use after free", "free in use", "unknown", "serve", "refuse", "commit"],
)
def test_misuse_is_caught(then: Callable[[TensorId], list[Effect]]) -> None:
    pair = Pair()
    pair.embed(then)
    with pytest.raises(Misused):
        pair.run()


def test_a_deadline_passes_when_it_is_due_and_only_if_it_still_stands() -> None:
    pair = Pair()
    pair.a.deadline_s = 5.0

    def answer(event: Event | None) -> list[Effect]:
        if isinstance(event, ev.Received):
            pair.a.deadline_s = 9.0  # Put off: the timer planned for 5 s must not strike.
        elif isinstance(event, ev.DeadlinePassed):
            pair.a.deadline_s = None
        return []

    pair.a.answer = answer
    pair.b.answer = lambda event: [fx.Send(A, Ping(1))] if event is None else []
    pair.run()
    assert [(time_s, type(e).__name__) for time_s, e in pair.a.seen] == [
        (1.0002, "Received"),
        (9.0, "DeadlinePassed"),
    ]


def test_a_machine_whose_deadline_never_moves_is_stuck() -> None:
    pair = Pair()
    pair.a.deadline_s = 5.0
    with pytest.raises(Misused, match="stuck"):
        pair.run()


def test_an_exception_in_a_machine_is_told_with_its_event() -> None:
    pair = Pair()

    def answer(event: Event | None) -> list[Effect]:
        assert event is None, "no such luck"
        return [BUILD]

    pair.a.answer = answer
    with pytest.raises(Misused, match=r"AssertionError at JobFinished.*no such luck"):
        pair.run()


def test_a_killed_host_hears_nothing_and_its_peers_are_told() -> None:
    pair = Pair()
    pair.embed(lambda tensor: [fx.Send(B, Ping(1)), fx.SendTensor(B, FORWARD, tensor)])
    pair.kernel.at(0.05, pair.hosts[B].kill)
    pair.run()
    assert pair.b.seen == []
    failed = [event for _, event in pair.a.seen if isinstance(event, ev.SendFailed)]
    assert [event.message for event in failed] == [Ping(1), FORWARD]
    assert [event.tensor for event in failed] == [None, TensorId(1)]


def test_a_frozen_host_loses_nothing_and_keeps_the_order() -> None:
    pair = Pair()
    pair.b.answer = lambda event: [fx.Send(A, Ping(k)) for k in range(5)] if event is None else []
    pair.a.deadline_s = 3.0
    pair.kernel.at(0.5, lambda: pair.hosts[A].freeze(10.0))

    def answer(event: Event | None) -> list[Effect]:
        if isinstance(event, ev.DeadlinePassed):
            pair.a.deadline_s = None
        return [BUILD] if event is None else []

    pair.a.answer = answer
    pair.run()
    pings = [e.message for _, e in pair.a.seen if isinstance(e, ev.Received)]
    assert pings == [Ping(k) for k in range(5)]
    assert pair.kernel.now_s > 10.5
    arrived_s = {time_s for time_s, e in pair.a.seen if isinstance(e, ev.Received)}
    assert arrived_s == {0.5 + _STALL_COUNTS_S}, "its clock stood still, but for a moment"
    passed_s = [time_s for time_s, e in pair.a.seen if isinstance(e, ev.DeadlinePassed)]
    assert passed_s == [3.0]


def test_the_timers_of_a_frozen_host_come_first_every_other_time() -> None:
    """As in a daemon: what has arrived may have to wait for the loop's next turn."""
    kinds = []
    for num_freezes in (1, 2):
        pair = Pair()
        pair.b.answer = lambda event: [fx.Send(A, Ping(1))] if event is None else []

        def answer(event: Event | None, pair: Pair = pair) -> list[Effect]:
            if isinstance(event, ev.DeadlinePassed):
                pair.a.deadline_s = None
            return []

        pair.a.answer, pair.a.deadline_s = answer, 0.1
        for k in range(num_freezes):
            pair.kernel.at(0.001 * k, lambda p=pair, k=k: p.hosts[A].freeze(10.0 * k + 0.0005))
        pair.run()
        kinds.append(pair.a.kinds[-2:])
    assert sorted(kinds) == [["DeadlinePassed", "Received"], ["Received", "DeadlinePassed"]]


def test_a_host_whose_clock_stops_still_answers() -> None:
    pair = Pair()
    pair.b.answer = lambda event: [fx.Send(A, Ping(1))] if event is None else []
    pair.a.deadline_s = 1.0

    def answer(event: Event | None) -> list[Effect]:
        if isinstance(event, ev.DeadlinePassed):
            pair.a.deadline_s = None
        return []

    pair.a.answer = answer
    pair.hosts[A].clock.stop(7.0)
    pair.run()
    assert [type(e).__name__ for _, e in pair.a.seen] == ["Received", "DeadlinePassed"]
    assert [time_s for time_s, _ in pair.a.seen] == [0.0, 1.0]
    assert pair.kernel.now_s == 8.0


def test_a_stall_counts_as_it_does_in_a_daemon() -> None:
    assert _STALL_COUNTS_S == WAIT_MAX_S + LATE_MAX_S


def test_a_dead_compute_process_fails_all_its_jobs() -> None:
    pair = Pair()
    pair.a.answer = lambda event: [BUILD, EMBED] if event is None else []
    pair.kernel.at(0.05, pair.hosts[A].device.fail)
    pair.run()
    assert [e for _, e in pair.a.seen] == [
        ev.JobFailed(JobId(k), "compute process died", fatal=True) for k in (1, 2)
    ]


def donor(event: Event | None) -> list[Effect]:
    """A machine that gives its state to whoever asks."""
    match event:
        case None:
            return [BUILD]
        case ev.StateRequested():
            return [fx.StartJob(JobId(event.request_id + 10), jobs.Snapshot(with_optimizer=True))]
        case ev.JobFinished(job_id, jobs.SnapshotTaken() as taken, (blob,)):
            return [fx.ServeState((job_id - 10,), taken.iteration, taken.manifest, blob.id)]
    return []


def test_a_state_is_fetched_and_the_donor_is_rid_of_its_copy() -> None:
    pair = Pair()
    pair.a.answer = donor
    pair.b.answer = lambda event: [BUILD, fx.FetchState((A,), 0, 0)] if event is None else []
    pair.run()
    fetched = [event for _, event in pair.b.seen if isinstance(event, ev.StateFetched)]
    assert len(fetched) == 1
    assert fetched[0].iteration == 0
    assert pair.hosts[A].tensors.stored_bytes == 0


@pytest.mark.parametrize("when_s", [0.5, 1.05, 5.0], ids=["before", "while asked", "in transfer"])
def test_a_donor_that_dies_is_noticed(when_s: float) -> None:
    pair = Pair()
    pair.a.answer = donor
    pair.b.answer = lambda event: [fx.FetchState((A,), 0, 0)] if event is None else []
    pair.kernel.at(when_s, pair.hosts[A].kill)
    pair.run()
    assert pair.b.kinds == ["StateFetchFailed"]


def test_a_refusal_of_state_reaches_the_asker() -> None:
    pair = Pair()
    pair.a.answer = lambda event: (
        [fx.RefuseState(event.request_id, "busy")] if isinstance(event, ev.StateRequested) else []
    )
    pair.b.answer = lambda event: [fx.FetchState((A,), 0, 4)] if event is None else []
    pair.run()
    assert [event for _, event in pair.b.seen] == [ev.StateFetchFailed(0, 4, "busy")]


def test_a_message_to_nobody_fails() -> None:
    pair = Pair()
    pair.a.answer = lambda event: [fx.Send(NodeId("c"), Ping(1))] if event is None else []
    pair.run()
    assert pair.a.kinds == ["SendFailed"]
