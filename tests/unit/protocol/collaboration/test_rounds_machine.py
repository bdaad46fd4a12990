"""One peer's core: what its loop is told, and what becomes of a round here."""

from decod.protocol.collaboration import loop as lp
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.messages.averaging_messages import ReducedPart
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Farewell,
    Greeting,
    Height,
    Progress,
    Roll,
)
from tests.unit.protocol.collaboration.rounds_cast import (
    CONFIG,
    START,
    A,
    B,
    C,
    Peer,
    averaging,
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


# --- whether the loop waits -----------------------------------------------------------------------


def test_a_loop_with_a_share_waits_once_it_has_done_it() -> None:
    peer = following(config=RoundConfig(target_batch_size=48, share=16))
    assert not answer_of(peer.steps(at_s=1.0))
    assert answer_of(peer.steps(at_s=2.0))


# --- rounds ---------------------------------------------------------------------------------------


def test_a_beginning_that_comes_twice_is_one() -> None:
    peer = following()
    message = BeginRound(BEGIN, START, (B,), (32,), (5,), 1, (A,))
    peer.hear(B, message)
    assert peer.hear(B, message) == []


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


# --- states ---------------------------------------------------------------------------------------


def test_a_state_of_the_same_round_that_others_led_to_is_refused() -> None:
    peer = following()
    peer.take(listens(peer, commit=True))
    assert of(lp.RefuseCopy, peer.take(lp.CopyRequested(7, height(1, "other"))))
    peer.take(lp.LoopApplied(1))
    (refused,) = of(lp.RefuseCopy, peer.take(lp.CopyRequested(8, height(1, "other"))))
    assert (refused.request, refused.reason) == (8, "it has another state of round 1")
    assert of(lp.CopyState, peer.take(lp.CopyRequested(9, peer.machine.past.height)))


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
