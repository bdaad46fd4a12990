"""A candidate that follows a member, and the member that is followed."""

import dataclasses
from dataclasses import replace

import pytest

from decod.ids import AveragingId, Iteration, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note, Send, SendTensor, StartJob
from decod.protocol.core.events import (
    JobFinished,
    SendFailed,
    StateFetched,
    StateFetchFailed,
    TensorSent,
)
from decod.protocol.core.jobs import (
    Built,
    CommitStep,
    Job,
    JobResult,
    Nothing,
    Propose,
    Proposed,
    Retract,
)
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.membership_messages import Average, Follow, Followed
from decod.protocol.core.view import Opening, View
from decod.protocol.state.replay import Entry, Replay
from decod.protocol.state.replay_sources import FOLLOWERS_MAX, LAG_MAX, ReplaySource
from decod.protocol.state.stage_state import StageState
from tests.unit.protocol.cast import (
    D0,
    FACTS,
    R1A,
    R1B,
    R1C,
    RUN,
    STRANGER,
    Heard,
    configured,
    context_of,
    freed,
    jobs_of,
    member,
    not_called,
    notes_of,
    reopen,
    sent,
    tensor,
    told_end,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", version=3)
DONORS = (member("r1a"), member("r1b"))
BASE = Iteration(4, 0)


class Candidate:
    """r1c, which follows r1a; its device does what it is given when `work` is called."""

    def __init__(self, keep_max_bytes: int = 1000) -> None:
        nobody = View(version=0, leader=D0, term=1, num_stages=2, members=())
        self.context = Context(
            node_id=R1C,
            run=replace(RUN, protocol=configured(keep_max_bytes=keep_max_bytes)),
            links=LinkTable(activation_size_bytes=0, compute_s=1.0),
            facts=FACTS,
            opening=Opening(Iteration(0, 0), Iteration(0, 0), nobody),
        )
        self.machine = Heard(Replay(self.context, "r1c:7700", self, incarnation=0))
        self.given: list[StartJob] = []
        self.tensors = iter(range(1, 1000))

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.given += [effect for effect in effects if isinstance(effect, StartJob)]
        return effects

    def begin(self) -> list[Effect]:
        self.take(self.machine.aim(1, DONORS))
        self.take(self.machine.knock(0.0))
        return self.take(self.machine.answered(0.0, R1A, Followed(1, 1, BASE)))

    def load(self) -> None:
        """Have the state of iteration 4."""
        self.begin()
        fetched = StateFetched(1, 4, "{}", tensor(next(self.tensors)))
        assert self.machine.takes(fetched)
        self.take(self.machine.fetched(fetched))
        self.pipeline(Built("h4"))

    def average(
        self, iteration: Iteration, base_hash: str, *, part: int = 0, view: int = 3
    ) -> list[Effect]:
        """Let one of two parts of an average come."""
        message = Average(
            AveragingId(iteration, view), part, 2, 8, base_hash, _norm_of(iteration.number)
        )
        arrived = tensor(next(self.tensors), 10)
        return self.take(self.machine.average(1.0, R1A, message, arrived))

    def both(self, iteration: Iteration, base_hash: str, *, view: int = 3) -> list[Effect]:
        effects = self.average(iteration, base_hash, view=view)
        return effects + self.average(iteration, base_hash, part=1, view=view)

    def pipeline(self, result: JobResult) -> tuple[Job, list[Effect]]:
        """End the oldest job."""
        start = self.given.pop(0)
        finished = JobFinished(start.job_id, result, (), 1.0)
        return start.job, self.take(told_end(self.context, finished, now_s=1.0))

    def progressed(self, now_s: float) -> None:
        pass

    def replay_failed(self, now_s: float, reason: str) -> None:
        self.machine.machine.restart(now_s, reason)

    def step(self, iteration: int) -> None:
        """Propose an iteration, whose average is here, and take that for final before it."""
        job, _ = self.pipeline(Proposed(f"h{iteration}"))
        assert job == Propose(iteration, 2, 8, _norm_of(iteration)), "as the members do"


def _norm_of(iteration: int) -> float:
    return iteration / 8


def opening(committed: Iteration, *members: str) -> Opening:
    view = view_of(*(members or ("d0", "r1a", "r1b", "r1c")), version=4)
    return Opening(Iteration(committed.number + 1, 1), committed, view)


def test_a_step_that_was_not_committed_is_undone() -> None:
    candidate = Candidate()
    candidate.load()
    candidate.both(Iteration(5, 1), "h4")
    candidate.step(5)
    candidate.both(Iteration(5, 2), "h4", view=4)
    assert candidate.pipeline(Nothing())[0] == Retract()
    candidate.step(5)
    assert candidate.machine.level == Iteration(5, 2)


def test_another_state_than_the_stages_is_given_up_before_it_is_final() -> None:
    candidate = Candidate()
    candidate.load()
    candidate.both(Iteration(5, 1), "h4")
    candidate.step(5)
    effects = candidate.both(Iteration(6, 1), "other")
    assert "replay.failed" in notes_of(effects)
    assert candidate.machine.level is None
    assert len(candidate.context.tensors) == 0
    assert candidate.given == [], "no commit"
    assert candidate.machine.knock(1.5) == []
    assert candidate.machine.knock(3.0) == [Send(R1B, Follow(2, 1, "r1c:7700"))], "another member"


def test_what_waits_is_bounded() -> None:
    candidate = Candidate(keep_max_bytes=35)
    candidate.begin()
    candidate.both(Iteration(5, 1), "h4")
    candidate.average(Iteration(6, 1), "h5")
    effects = candidate.average(Iteration(6, 1), "h5", part=1)
    assert len(freed(effects)) == 4
    (note,) = (e for e in effects if isinstance(e, Note))
    assert dict(note.fields)["pause_s"] == 30
    assert candidate.machine.knock(30.0) == []
    assert candidate.machine.knock(31.0) != []


@pytest.mark.parametrize(
    "trouble", ["silent", "refused", "unreachable", "unfetched", "started again"]
)
def test_whatever_fails_is_begun_again_with_another_member(trouble: str) -> None:
    candidate = Candidate()
    machine = candidate.machine
    candidate.begin()
    match trouble:
        case "silent":
            effects = machine.knock(11.0)
        case "refused":
            effects = machine.answered(2.0, R1A, Followed(1, 1, BASE, "it leaves"))
        case "unreachable":
            effects = machine.unreachable(2.0, R1A, "refused")
        case "started again":
            assert machine.answered(2.0, R1A, Followed(1, 1, BASE)) == []
            effects = machine.answered(2.0, R1A, Followed(1, 1, Iteration(5, 0)))
        case _:
            effects = machine.fetch_failed(2.0, StateFetchFailed(1, 4, "gone"))
    assert "replay.failed" in notes_of(effects)
    assert machine.knock(60.0) == [Send(R1B, Follow(2, 1, "r1c:7700"))]


def test_parts_that_nobody_wants_are_freed() -> None:
    candidate = Candidate()
    candidate.load()
    candidate.average(Iteration(5, 1), "h4")
    message = Average(AveragingId(Iteration(5, 1), 3), 0, 2, 8, "h4")
    for sender, wrong in (
        (R1A, message),
        (R1B, message),
        (R1A, dataclasses.replace(message, averaging=AveragingId(Iteration(4, 1), 3))),
        (R1A, dataclasses.replace(message, averaging=AveragingId(Iteration(5, 1, 1), 3))),
        (R1A, dataclasses.replace(message, num_parts=3, part=2)),
    ):
        assert freed(candidate.machine.average(1.0, sender, wrong, tensor(900))) == [900]


def test_it_undoes_what_was_not_committed_when_it_enters() -> None:
    candidate = Candidate()
    candidate.load()
    candidate.both(Iteration(5, 1), "h4")
    candidate.step(5)
    assert candidate.machine.enter(2.0, opening(BASE), 0, "") is Entry.READY
    assert jobs_of(candidate.context.out.taken()) == [Retract()]


def test_the_last_average_may_come_after_it_has_entered() -> None:
    candidate = Candidate()
    candidate.load()
    entered = opening(Iteration(5, 2))
    assert candidate.machine.enter(2.0, entered, 3, "h5") is Entry.WAITING
    assert candidate.machine.waiting
    candidate.both(Iteration(5, 1), "h4")
    assert candidate.given == [], "of another attempt"
    candidate.both(Iteration(5, 2), "h4")
    candidate.step(5)
    assert candidate.machine.arrived
    assert candidate.pipeline(Nothing())[0] == CommitStep(5)


@pytest.mark.parametrize(
    "trouble", ["hash", "era", "host gone", "host back", "host back soon", "nothing"]
)
def test_it_enters_with_nothing_rather_than_with_something_else(trouble: str) -> None:
    candidate = Candidate()
    if trouble != "nothing":
        candidate.load()
    committed = Iteration(4, 1, 1) if trouble == "era" else Iteration(4, 1)
    entered = opening(committed)
    if trouble == "host gone":
        entered = opening(Iteration(5, 1), "d0", "r1b", "r1c")
    if trouble.startswith("host back"):
        # Soon: while the state was fetched that it had promised to send the averages behind.
        since = 3 if trouble == "host back soon" else 5
        entered = opening(Iteration(5, 1))
        back = [dataclasses.replace(m, since_iteration=since) for m in entered.view.members]
        entered = dataclasses.replace(entered, view=entered.view.successor(back, leader=D0))
    wanted = "other" if trouble == "hash" else ""
    assert candidate.machine.enter(2.0, entered, 3, wanted) is Entry.LOST
    assert candidate.machine.level is None


class Host:
    """r1a, which others follow."""

    def __init__(self) -> None:
        self.context = context_of(R1A, VIEW)
        self.stage = StageState(self.context, not_called)
        self.stage.enter(0)
        self.machine = Heard(ReplaySource(self.context, self.stage))

    def commit(self, now_s: float, iteration: int) -> list[Effect]:
        self.stage.committed(iteration)
        opened = Opening(Iteration(iteration + 1, 1), Iteration(iteration, 1), VIEW)
        return self.machine.opened(now_s, opened, stepped=True)

    def follow(self, now_s: float, node: NodeId = R1C, number: int = 1) -> Followed:
        ((to, answer),) = sent(self.machine.follow(now_s, node, Follow(number, 1, "h:1")))
        assert to == node
        assert isinstance(answer, Followed)
        return answer

    def enters(self, iteration: int) -> list[Effect]:
        with_it = view_of("d0", "r1a", "r1b", "r1c", version=4)
        opened = Opening(Iteration(iteration + 1, 1), Iteration(iteration, 1), with_it)
        self.context.view = with_it
        return self.machine.opened(2.0, opened, stepped=True)

    def share(self, iteration: int, number: int) -> list[Effect]:
        part = self.context.tensors.add(tensor(number))
        reopen(self.context, committed=Iteration(iteration - 1, 1))
        job = Propose(iteration, 1, 8, 0.5)
        found: list[Effect] = self.machine.share(
            AveragingId(Iteration(iteration, 1), 3), job, [part]
        )
        return found


def test_averages_go_to_those_who_follow_until_they_lag() -> None:
    followed = Host()
    followed.commit(1.0, 1)
    base = followed.follow(1.0).committed.number
    assert not followed.machine.wants(Iteration(base, 1))
    assert followed.machine.wants(Iteration(base + 1, 1))
    assert followed.share(base, 1) == []
    for k in range(1, LAG_MAX + 1):
        (effect,) = followed.share(base + k, 10 + k)
        assert isinstance(effect, SendTensor)
        assert isinstance(effect.message, Average)
        assert effect.message.gradient_norm == 0.5
    followed.machine.sent(TensorSent(R1C, TensorId(11), 8, 1.0))
    assert isinstance(followed.share(base + 9, 30)[0], SendTensor)
    effects = followed.share(base + 10, 31)
    assert notes_of(effects) == ["follower.left"]
    assert not followed.machine.wants(Iteration(99, 1))


@pytest.mark.parametrize("enters", [False, True])
def test_an_average_that_is_lost_is_sent_again_a_few_times(*, enters: bool) -> None:
    """Also to one that is a member meanwhile: the iteration stands still until it has that
    average.
    """
    followed = Host()
    base = followed.follow(1.0).committed.number
    (effect,) = followed.share(base + 1, 1)
    assert isinstance(effect, SendTensor)
    if enters:
        assert followed.enters(base + 1) == []
    failed = SendFailed(R1C, effect.message, "lost", effect.tensor)
    for _ in range(8):
        assert followed.machine.undelivered(failed) == [effect]
    effects = followed.machine.undelivered(failed)
    assert notes_of(effects) == ["follower.left"]
    ((to, word),) = sent(effects)
    assert isinstance(word, Followed)
    assert (to, word.refusal) == (R1C, "lost"), "it fetches what stands still"
    unheard = followed.machine.undelivered(SendFailed(R1C, word, "lost"))
    assert unheard == ([Send(R1C, word)] if enters else []), "a candidate asks again by itself"


def test_a_member_says_why_it_is_not_to_be_followed() -> None:
    followed = Host()
    for k in range(FOLLOWERS_MAX):
        assert not followed.follow(1.0, NodeId(f"x{k}")).refusal
    assert followed.follow(1.0, STRANGER).refusal == "as many as may be follow it"
    assert not followed.follow(20.0, STRANGER).refusal, "the others have been silent"
    ((_, other),) = sent(followed.machine.follow(1.0, R1C, Follow(1, 2, "h:1")))
    assert isinstance(other, Followed)
    assert other.refusal == "it serves stage 1"
    followed.stage.loaded = False
    assert followed.follow(20.0, NodeId("y")).refusal == "it is loading its stage's state"
