"""One peer's core: what its loop is told, and what becomes of a round here."""

import pytest

from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.messages import ReducedPart, ReducePart
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Farewell,
    Greeting,
    Height,
    Progress,
    Roll,
    RoundClosed,
    RoundReady,
)
from tests.unit.protocol.collaboration.rounds_cast import (
    CONFIG,
    START,
    A,
    B,
    C,
    Peer,
    averaging,
    events_of,
    height,
    of,
    roll,
    sent,
    standing,
)

CLOSE, BEGIN = averaging(1, 1), averaging(1, 2)


def greeting_of(peer: str, at: Height = START) -> Greeting:
    return Greeting(f"{peer}:1", at, (), 1, peer, f"{peer}:1")  # type: ignore[arg-type]


def following(**fields: object) -> Peer:
    """Return a peer that follows B, with C."""
    peer = Peer(**fields)  # type: ignore[arg-type]
    peer.hear(B, roll(B, A, C))
    peer.hear(B, standing(0))
    return peer


def answer_of(effects: list[lp.PeerEffect]) -> bool:
    """Return whether the loop waits."""
    (*_, answer) = of(lp.AnswerLoop, effects)
    return answer.waits


def begin(*weights: int, listeners: tuple[str, ...] = (), digest: int = 0) -> BeginRound:
    roster = (A, B, C)[: len(weights)]
    digests = (digest, *([0] * (len(weights) - 1)))
    return BeginRound(BEGIN, START, roster, weights, digests, 1, listeners)  # type: ignore[arg-type]


def listens(peer: Peer, *, commit: bool = False, at: Height = START) -> ev.JobFinished:
    """Have a peer listen to B's average; return the end of its decoding."""
    begin = averaging(at.round + 1, 2)
    peer.hear(B, BeginRound(begin, at, (B,), (32,), (5,), 1, (A,)))
    effects = peer.take(
        ev.Received(B, ReducedPart(begin, 0, 0.0, num_microbatches=32), peer.tensor())
    )
    (job,) = of(fx.StartJob, effects)
    assert isinstance(job.job, jobs.Decode)
    if commit:
        peer.hear(B, CommitRound(begin, "hash"))
    return ev.JobFinished(job.job_id, jobs.Proposed("hash"), (peer.tensor(),), 0.0)


# --- alone ----------------------------------------------------------------------------------------


def test_a_lone_peer_steps_by_itself_once_its_batch_is_full() -> None:
    peer = Peer()
    for _ in range(3):
        assert of(lp.StepAlone, peer.steps()) == []
    effects = peer.steps()
    assert of(lp.StepAlone, effects) == [lp.StepAlone(1)]
    assert not answer_of(effects), "it need not wait"
    peer.take(lp.LoopApplied(1))
    assert peer.machine.past.height.round == 1
    assert peer.machine.own.num_applied == 32


def test_a_lone_step_and_a_newcomer_that_comes_meanwhile() -> None:
    """The step counts, and the newcomer is not asked for samples that would lead elsewhere."""
    peer = Peer(C)
    peer.steps(32)
    peer.hear(B, greeting_of(B))
    effects = peer.hear(B, Progress(1, 2, START, 64, 8.0, 1.0))
    assert not of(CloseRound, sent(effects))
    effects = peer.take(lp.LoopApplied(1))
    assert peer.machine.past.height.round == 1
    (told,) = of(Roll, sent(effects, B))
    assert [each.level for each in told.peers] == [True, False]
    effects = peer.hear(B, Progress(1, told.version, START, 64, 8.0, 1.0))
    assert not of(CloseRound, sent(effects)), "its samples are of another state"


def test_a_lone_step_of_a_peer_that_has_met_others_meanwhile_is_reported_as_lost() -> None:
    peer = Peer()
    peer.steps(32)
    peer.hear(B, roll(B, A))
    effects = peer.take(lp.LoopApplied(1))
    assert [n.event for n in of(fx.Note, effects)] == ["samples.lost"]
    assert peer.machine.company.num_lost == 32
    assert not peer.machine.company.level


def test_a_lone_step_is_no_part_of_the_round_that_closes_meanwhile() -> None:
    peer = Peer()
    peer.steps(32)
    peer.hear(B, roll(B, A))
    effects = peer.hear(B, CloseRound(CLOSE))
    assert sent(effects, B) == [RoundClosed(CLOSE, 0, 0)]


# --- whether the loop waits -----------------------------------------------------------------------


def test_the_loop_goes_on_while_the_batch_is_far_from_full() -> None:
    peer = following()
    peer.steps(at_s=1.0)
    peer.hear(B, standing(8, rate=8.0), at_s=2.0)
    assert not answer_of(peer.steps(at_s=2.0))


def test_the_loop_waits_if_the_batch_is_full_early_in_its_next_step() -> None:
    """And goes on if it does not become full within a step."""
    peer = following()
    peer.steps(at_s=0.0)
    peer.steps(at_s=1.0)
    peer.hear(B, standing(31, rate=8.0), at_s=2.0)
    assert answer_of(peer.steps(at_s=2.0))
    assert not answer_of(peer.wait_until(3.1))


def test_the_loop_waits_while_a_round_closes_and_while_an_average_is_under_way() -> None:
    peer = following()
    peer.steps(at_s=0.0)
    peer.hear(B, CloseRound(CLOSE))
    assert answer_of(peer.steps(at_s=1.0))
    effects = peer.contributes(16)
    (closed,) = of(RoundClosed, sent(effects, B))
    assert answer_of(peer.steps(at_s=2.0)), "its contribution is part of the round"
    peer.hear(B, begin(16, 16, digest=closed.digest))
    assert answer_of(peer.steps(at_s=3.0))


def test_a_loop_that_overlaps_never_waits_for_an_average() -> None:
    peer = following(config=RoundConfig(target_batch_size=32, overlap=True))
    peer.hear(B, CloseRound(CLOSE))
    assert not answer_of(peer.steps(at_s=1.0))


def test_a_loop_with_a_share_waits_once_it_has_done_it() -> None:
    peer = following(config=RoundConfig(target_batch_size=48, share=16))
    assert not answer_of(peer.steps(at_s=1.0))
    assert answer_of(peer.steps(at_s=2.0))


def test_a_share_means_nothing_to_a_lone_peer() -> None:
    peer = Peer(config=RoundConfig(target_batch_size=48, share=16))
    for second in range(5):
        assert not answer_of(peer.steps(at_s=float(second)))


def test_the_loop_waits_for_a_state_and_goes_on_if_it_can_not_be_had() -> None:
    peer = following()
    (asked,) = of(lp.LoadState, peer.hear(B, standing(0, at=height(4))))
    assert (asked.donors, asked.height) == ((B, C), height(4))
    assert answer_of(peer.steps(at_s=1.0))
    assert not answer_of(peer.take(lp.StateCame(height(4), "no donor has it")))


# --- rounds ---------------------------------------------------------------------------------------


def test_an_average_with_the_peers_own_samples() -> None:
    peer = following()
    peer.steps(16)
    peer.hear(B, CloseRound(CLOSE))
    (closed,) = of(RoundClosed, sent(peer.contributes(16), B))
    assert closed.num_samples == 16
    effects = peer.hear(B, BeginRound(BEGIN, START, (A,), (16,), (closed.digest,)))
    for result in (jobs.Nothing(), jobs.Squared(0.0), jobs.Proposed("hash")):
        (job,) = of(fx.StartJob, effects)
        effects = peer.take(ev.JobFinished(job.job_id, result, (peer.tensor(),), 0.0))
    assert sent(effects, B) == [RoundReady(BEGIN, "hash")]
    (average,) = of(lp.DeliverAverage, peer.hear(B, CommitRound(BEGIN, "hash")))
    assert (average.round, average.num_samples, average.total) == (1, 16, 16)
    assert (peer.machine.own.num_applied, peer.machine.own.held) == (16, None)
    assert len(peer.machine.tensors) == 0


def test_a_peer_at_another_state_contributes_nothing() -> None:
    peer = following()
    peer.steps(16)
    effects = peer.hear(B, CloseRound(averaging(3, 1)))
    assert sent(effects, B) == [RoundClosed(averaging(3, 1), 0, 0)]
    assert of(lp.AskContribution, effects) == []


@pytest.mark.parametrize("sender", [C, A])
def test_only_the_coordinators_word_counts(sender: str) -> None:
    peer = following()
    messages = (CloseRound(CLOSE), BeginRound(BEGIN, START, (C,), (32,), (5,), 1, (A,)))
    for message in (*messages, CommitRound(BEGIN, "hash")):
        assert sent(peer.hear(sender, message)) == []  # type: ignore[arg-type]
    assert not peer.machine.rounds.is_busy


def test_a_beginning_that_comes_twice_is_one() -> None:
    peer = following()
    message = BeginRound(BEGIN, START, (B,), (32,), (5,), 1, (A,))
    peer.hear(B, message)
    assert peer.hear(B, message) == []


def test_an_attempt_of_a_coordinator_with_a_lower_term_is_no_older_one() -> None:
    """Runs that meet have counted their terms apart."""
    peer = Peer()
    peer.hear(B, roll(B, A, term=7))
    peer.hear(B, BeginRound(averaging(1, 2, term=7), START, (B,), (32,), (5,), 1, (A,)))
    peer.hear(B, CommitRound(averaging(1, 2, term=7), "hash"))  # Its average never comes.
    peer.hear(B, Farewell(C, "c:1"))
    peer.hear(C, roll(C, A, term=2, at=height(5), past=(START.state_id,)))
    assert peer.machine.company.coordinator == C
    begun = BeginRound(averaging(6, 2, term=2), height(5), (C,), (32,), (5,), 1, (A,))
    peer.hear(C, begun)
    assert peer.machine.rounds.is_busy


def test_a_mean_that_comes_before_the_beginning_is_kept_and_freed_once_it_is_of_no_use() -> None:
    peer = following()
    mean = ReducedPart(BEGIN, 0, 0.0, num_microbatches=32)
    peer.take(ev.Received(B, mean, peer.tensor()))
    assert peer.machine.rounds.num_early == 1
    effects = peer.hear(B, BeginRound(BEGIN, START, (B,), (32,), (5,), 1, (A,)))
    assert [type(job.job) for job in of(fx.StartJob, effects)] == [jobs.Decode]
    late = ReducedPart(averaging(1, 1), 0, 0.0, num_microbatches=32)
    assert len(of(fx.FreeTensor, peer.take(ev.Received(B, late, peer.tensor())))) == 1


def test_an_average_that_differs_from_the_one_that_counts_is_not_applied() -> None:
    peer = following()
    finished = listens(peer)
    peer.take(finished)
    effects = peer.hear(B, CommitRound(BEGIN, "other"))
    assert of(lp.DeliverAverage, effects) == []
    assert len(peer.machine.tensors) == 0
    assert peer.machine.past.height == START


def test_it_is_not_applied_either_if_it_is_decoded_later() -> None:
    peer = following()
    finished = listens(peer)
    peer.hear(B, CommitRound(BEGIN, "other"))
    assert of(lp.DeliverAverage, peer.take(finished)) == []
    assert len(peer.machine.tensors) == 0


def test_no_state_is_loaded_while_an_average_that_counts_leads_there() -> None:
    """Though it is not decoded yet."""
    peer = following()
    finished = listens(peer, commit=True)
    there = peer.machine.rounds
    (part,) = there._parts.values()
    from decod.protocol.collaboration.loading import after

    reached = after(part.begun.height, "hash")
    assert of(lp.LoadState, peer.hear(B, standing(0, at=reached, committed=BEGIN))) == []
    assert len(of(lp.DeliverAverage, peer.take(finished))) == 1
    assert peer.machine.past.height == reached


def test_an_average_that_comes_while_a_state_is_loaded_waits_for_it() -> None:
    """The state replaces all that the loop would do meanwhile."""
    peer = following()
    peer.hear(B, standing(0, at=height(1, "other")))
    assert peer.machine.loading.under_way
    peer.hear(B, BeginRound(averaging(2, 2), height(1, "other"), (B,), (32,), (5,), 1, (A,)))
    mean = ReducedPart(averaging(2, 2), 0, 0.0, num_microbatches=32)
    (job,) = of(fx.StartJob, peer.take(ev.Received(B, mean, peer.tensor())))
    peer.take(ev.JobFinished(job.job_id, jobs.Proposed("hash"), (peer.tensor(),), 0.0))
    assert of(lp.DeliverAverage, peer.hear(B, CommitRound(averaging(2, 2), "hash"))) == []
    effects = peer.take(lp.LoopLoaded(height(1, "other")))
    assert [each.round for each in of(lp.DeliverAverage, effects)] == [2]
    assert peer.machine.past.height.round == 2
    assert len(peer.machine.tensors) == 0


def test_a_peer_that_loads_contributes_nothing() -> None:
    """Its samples are about to be dropped."""
    peer = following()
    peer.steps(16)
    peer.hear(B, standing(0, at=Height(0, "other")))
    assert peer.machine.loading.under_way
    effects = peer.hear(B, CloseRound(CLOSE))
    assert sent(effects, B) == [RoundClosed(CLOSE, 0, 0)]


def test_an_average_whose_commit_was_lost_counts_once_the_next_round_begins() -> None:
    peer = following()
    peer.take(listens(peer))
    (part,) = peer.machine.rounds._parts.values()
    from decod.protocol.collaboration.rounds import reached_by

    reached = reached_by(part)
    effects = peer.hear(B, BeginRound(averaging(2, 2), reached, (B,), (32,), (5,), 1, (A,)))
    assert [each.round for each in of(lp.DeliverAverage, effects)] == [1]


def test_what_is_in_doubt_after_the_coordinator_is_lost_holds_nobody_up() -> None:
    """It may have said that the average counts. If another peer has it, it counts here too."""
    peer = following()
    peer.take(listens(peer))
    (part,) = peer.machine.rounds._parts.values()
    from decod.protocol.collaboration.rounds import reached_by

    reached = reached_by(part)
    effects = peer.hear(B, Farewell(), at_s=1.0)
    assert peer.machine.company.coordinator == A
    assert not answer_of(effects)
    assert not answer_of(peer.steps(at_s=2.0))
    effects = peer.hear(C, Progress(2, 2, reached, 0, 8.0, 1.0), at_s=2.1)
    assert [each.round for each in of(lp.DeliverAverage, effects)] == [1]
    assert peer.machine.past.height == reached


def test_an_attempt_that_came_to_nothing_gives_back_and_lets_the_loop_go_on() -> None:
    peer = following()
    peer.steps(16)
    peer.hear(B, CloseRound(CLOSE))
    (closed,) = of(RoundClosed, sent(peer.contributes(16), B))
    peer.hear(B, begin(16, 16, digest=closed.digest))
    assert answer_of(peer.steps(16))
    effects = peer.hear(B, standing(0))
    assert len(of(lp.GiveBack, effects)) == 1
    assert not answer_of(effects)
    assert peer.machine.own.num_outstanding == 32


def test_a_contribution_that_cannot_be_delivered_is_sent_again_once() -> None:
    peer = following()
    peer.steps(16)
    peer.hear(B, CloseRound(CLOSE))
    (closed,) = of(RoundClosed, sent(peer.contributes(16), B))
    (job,) = of(fx.StartJob, peer.hear(B, begin(16, 16, digest=closed.digest + 5)))
    parts = (peer.tensor(), peer.tensor())
    (send,) = of(fx.SendTensor, peer.take(ev.JobFinished(job.job_id, jobs.Nothing(), parts, 0.0)))
    assert isinstance(send.message, ReducePart)
    failed = ev.SendFailed(B, send.message, "lost", send.tensor, fault=ev.Fault.LINK)
    assert of(fx.SendTensor, peer.take(failed)) == [send]
    (ready,) = of(RoundReady, sent(peer.take(failed), B))
    assert (ready.failure, ready.lost) == ("a peer can't be reached", (B,))


# --- states ---------------------------------------------------------------------------------------


def test_a_copy_is_given_once_the_loop_has_the_state() -> None:
    peer = following()
    finished = listens(peer, commit=True)
    peer.take(finished)
    assert of(lp.CopyState, peer.take(lp.CopyRequested(7, peer.machine.past.height))) == []
    effects = peer.take(lp.LoopApplied(1))
    assert of(lp.CopyState, effects) == [lp.CopyState(7)]
    assert of(lp.CopyState, peer.wait_until(9.0)) == [], "it is given once"


@pytest.mark.parametrize("number", [0, 5])
def test_a_state_that_is_over_or_not_here_is_refused(number: int) -> None:
    peer = following()
    peer.take(listens(peer, commit=True))
    peer.take(lp.LoopApplied(1))
    (refused,) = of(lp.RefuseCopy, peer.take(lp.CopyRequested(7, height(number))))
    assert refused.request == 7


def test_a_loop_that_stands_still_gives_no_copy() -> None:
    peer = following()
    for number in range(2):
        peer.take(listens(peer, commit=True, at=peer.machine.past.height))
        asked = lp.CopyRequested(number, peer.machine.past.height)
        refused = of(lp.RefuseCopy, peer.take(asked))
        assert len(refused) == number
        assert not of(lp.CopyState, peer.effects)


def test_a_state_of_the_same_round_that_others_led_to_is_refused() -> None:
    peer = following()
    peer.take(listens(peer, commit=True))
    assert of(lp.RefuseCopy, peer.take(lp.CopyRequested(7, height(1, "other"))))
    peer.take(lp.LoopApplied(1))
    (refused,) = of(lp.RefuseCopy, peer.take(lp.CopyRequested(8, height(1, "other"))))
    assert (refused.request, refused.reason) == (8, "it has another state of round 1")
    assert of(lp.CopyState, peer.take(lp.CopyRequested(9, peer.machine.past.height)))


def test_a_state_with_the_averages_that_came_meanwhile_is_no_reason_to_load_again() -> None:
    peer = following()
    assert of(lp.LoadState, peer.hear(B, standing(0, at=height(4))))
    peer.take(listens(peer, commit=True, at=height(4)))
    peer.take(lp.StateCame(height(4)))
    effects = peer.take(lp.LoopLoaded(height(4)))
    assert [each.round for each in of(lp.DeliverAverage, effects)] == [5]
    assert of(lp.LoadState, effects) == [], "the coordinator's last word was of round 4"


def test_a_state_that_the_loop_refuses_is_asked_for_again_and_not_for_ever() -> None:
    peer = following()
    effects = peer.hear(B, standing(0, at=height(4)))
    for attempt in range(CONFIG.loads_max):
        assert of(lp.LoadState, effects), attempt
        peer.take(lp.StateCame(height(4)))
        effects = peer.take(lp.LoadRefused(height(4), "it is of round 5"))
        assert "peer.unloaded" in events_of(effects)
        if not of(fx.Stop, effects):
            assert not answer_of(effects)
            peer.hear(B, standing(0, at=height(4)))
            effects = peer.wait_until(peer.now_s + CONFIG.load_pause_s)
    (stop,) = of(fx.Stop, effects)
    assert (stop.reason, stop.detail) == (fx.StopReason.FAILED, "it is of round 5")


def test_refusals_before_a_state_was_loaded_do_not_count() -> None:
    peer = following()
    peer.hear(B, standing(0, at=height(4)))
    for number in range(2 * CONFIG.loads_max):
        peer.take(lp.StateCame(height(4 + number)))
        peer.take(lp.LoadRefused(height(4 + number), "it is damaged"))
        peer.hear(B, standing(0, at=height(5 + number)))
        (asked,) = of(lp.LoadState, peer.wait_until(peer.now_s + CONFIG.load_pause_s))
        if number % 2:
            peer.take(lp.StateCame(asked.height))
            peer.take(lp.LoopLoaded(asked.height))
            peer.hear(B, standing(0, at=height(6 + number, "y")))
    assert not peer.machine.stopped


# --- the end --------------------------------------------------------------------------------------


def test_a_peer_that_leaves_says_goodbye_and_does_nothing_more() -> None:
    peer = following()
    effects = peer.take(lp.LeaveRequested())
    assert sent(effects, B) == [Farewell()]
    assert len(of(fx.Stop, effects)) == 1
    assert peer.steps() == []
    assert peer.machine.deadline_s is None


def test_a_coordinator_that_is_silent_is_lost_and_the_peer_goes_on() -> None:
    peer = following()
    peer.wait_until(11.5)
    assert peer.machine.company.coordinator == A
    for second in range(4):
        effects = peer.steps(at_s=12.0 + second)
    assert peer.machine.company.peers == (A,)
    assert of(lp.StepAlone, effects) == [lp.StepAlone(1)]


def test_who_was_taken_for_lost_is_told_so_by_the_coordinator() -> None:
    peer = Peer()
    (message,) = sent(peer.hear(B, Progress(1, 2, START, 8, 8.0, 1.0)), B)
    assert message == peer.machine.company.coordinating.roll()  # type: ignore[union-attr]
