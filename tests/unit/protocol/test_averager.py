"""One average among some members: whose contributions are in it, and who is told what is not."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from decod.ids import AveragingId, Iteration, NodeId, TensorId
from decod.planner.partition import owners_of
from decod.protocol.averaging.averager import (
    Averager,
    Averaging,
    AveragingState,
    TensorPort,
    Weight,
)
from decod.protocol.core import jobs
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import (
    Effect,
    EffectSink,
    FreeTensor,
    Note,
    Send,
    SendTensor,
    StartJob,
)
from decod.protocol.core.events import JobFailed, JobFinished, Tensor
from decod.protocol.core.messages.averaging_messages import ReducedPart, ReducePart
from tests.unit.protocol.cast import Heard

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
WEIGHTS = {A: 4, B: 3, C: 2}
SIZE = 8


@dataclass
class Member:
    """One member, with a device that answers at once, and a host that counts its tensors."""

    node_id: NodeId
    averaging: Averaging
    num_phases: int = 1
    fails: Callable[[jobs.Job], str] = lambda _job: ""
    refuses: tuple[int, ...] = ()
    """Inputs that its device refuses, by their position."""
    outcome: str = ""
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out = EffectSink[Effect]()
        self.tensors = TensorStore(self.out)
        self.queue = ComputeQueue(self.tensors, self.out)
        port = TensorPort(self.tensors, self.queue, self.out, self.num_phases)
        self.machine = Heard(Averager(self.node_id, self.averaging, port, self))
        self._next = 0
        self.outgoing = deque[tuple[NodeId, ReducePart | ReducedPart, bool]]()

    def fresh(self) -> Tensor:
        self._next += 1
        return Tensor(TensorId(self._next), SIZE)

    def take(self, effects: list[Effect]) -> None:
        """Carry out effects: jobs end at once, messages wait in `outgoing`."""
        queue = deque(effects)
        while queue:
            match queue.popleft():
                case StartJob(job=job) as start:
                    queue.extend(self._ended(start, job))
                case SendTensor(to, message, tensor):
                    assert isinstance(message, ReducePart | ReducedPart)
                    self.outgoing.append((to, message, True))
                    self.tensors.release(tensor)
                    queue.extend(self.out.taken())
                case Send(to, message):
                    assert isinstance(message, ReducePart | ReducedPart)
                    self.outgoing.append((to, message, False))
                case Note() as note:
                    self.notes.append(note)
                case FreeTensor():
                    pass
                case other:
                    raise AssertionError(other)

    def _ended(self, start: StartJob, job: jobs.Job) -> list[Effect]:
        if reason := self.fails(job):
            self.queue.failed(0.0, JobFailed(start.job_id, reason, fatal=False))
            return self.out.taken()
        result: jobs.JobResult = jobs.Nothing()
        num = 1
        if isinstance(job, jobs.Reduce):
            result = jobs.Squared(0.0, self.refuses, "odd" if self.refuses else "")
        elif isinstance(job, jobs.Gather):
            num = job.num_parts
        outputs = tuple(self.fresh() for _ in range(num))
        self.queue.finished(0.0, JobFinished(start.job_id, result, outputs, 1.0))
        return self.out.taken()

    def receive(
        self, sender: NodeId, message: ReducePart | ReducedPart, *, with_tensor: bool
    ) -> None:
        tensor = self.fresh() if with_tensor else None
        if isinstance(message, ReducePart):
            self.take(self.machine.part(sender, message, tensor))
        elif tensor is not None:
            self.take(self.machine.average(sender, message, tensor))
        else:
            self.take(self.machine.refused(sender, message))

    # --- the user of the average --------------------------------------------------------------

    def averaged(self) -> None:
        self.outcome = "averaged"

    def lacking(self, found: Weight) -> None:
        self.outcome = f"lacking {found.num}"

    def averaging_failed(self, reason: str) -> None:
        self.outcome = f"failed: {reason}"


class Circle:
    """Three members. Whatever `cut` members send does not arrive yet."""

    def __init__(self, *, quorum: int = 0, num_phases: int = 1, num_parts: int = 6) -> None:
        roster = (A, B, C)
        averaging = Averaging(
            AveragingId(Iteration(5, 1), 9),
            roster,
            owners_of([16] * 3, num_parts),
            overlapped=True,
            quorum=quorum,
        )
        self.members = {node: Member(node, averaging, num_phases) for node in roster}
        self.cut: set[NodeId] = set()

    def begin(self) -> None:
        for node, member in self.members.items():
            member.take(member.machine.begin(Weight(WEIGHTS[node], 1), None))
        self.flow()

    def flow(self) -> None:
        """Deliver messages until none is left but those of members that are cut off."""
        while ready := [
            m for m in self.members.values() if m.outgoing and m.node_id not in self.cut
        ]:
            member = ready[0]
            to, message, with_tensor = member.outgoing.popleft()
            self.members[to].receive(member.node_id, message, with_tensor=with_tensor)

    def close(self, num_phases: int = 1) -> None:
        for member in self.members.values():
            member.take(member.machine.grace_over(num_phases))
        self.flow()

    @property
    def outcomes(self) -> list[str]:
        return [member.outcome for member in self.members.values()]

    def end(self) -> None:
        """All tensors are freed when nobody needs the average any more."""
        for member in self.members.values():
            machine = member.machine
            if machine.state is AveragingState.AVERAGED:
                member.tensors.release(*machine.take())
                member.take(member.out.taken())
            machine.close()
            member.take(machine.abandon())
            assert not len(member.tensors)


def test_what_a_device_refuses_is_left_out_and_its_sender_named() -> None:
    circle = Circle()
    circle.members[A].refuses = (1,)
    circle.begin()
    assert circle.outcomes == ["averaged"] * 3
    owned = [k for k, owner in enumerate(circle.members[A].averaging.owner_of) if owner == A]
    assert circle.members[B].machine.missed == {*owned}
    (note, *_) = circle.members[A].notes
    assert (note.event, dict(note.fields)["peer"]) == ("contribution.refused", B)
    assert not circle.members[B].notes
    circle.end()


def test_whoever_can_not_contribute_says_so_and_the_others_average() -> None:
    circle = Circle()
    circle.members[B].fails = lambda job: "not finite" if isinstance(job, jobs.Gather) else ""
    circle.begin()
    assert circle.outcomes == ["averaged"] * 3
    assert {m.machine.found.num for m in circle.members.values()} == {6}
    circle.end()


def test_an_owner_that_can_not_reduce_drops_the_average_for_all() -> None:
    circle = Circle()
    circle.members[B].fails = lambda job: "no memory" if isinstance(job, jobs.Reduce) else ""
    circle.begin()
    assert all(outcome.startswith("failed") for outcome in circle.outcomes)
    circle.end()
