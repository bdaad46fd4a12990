"""The leader's decisions: each is made once, in the state that allows it, and is told to all."""

import dataclasses

from decod.ids import AveragingId, Iteration
from decod.protocol.core.effects import CompleteRun, Send
from decod.protocol.core.messages.averaging_messages import Ready
from decod.protocol.core.messages.membership_messages import Prepared, Refuse
from decod.protocol.leadership.leader import LeaderState
from tests.unit.protocol.cast import D0, D1, R1A, R1B, R1C, member, reopens, sent
from tests.unit.protocol.leading import Run, decision, report

# --------------------------------------------------------------------------------------


def test_an_empty_batch_repeats_the_iteration() -> None:
    leader = Run(R1A).leader
    leader.report(1.0, D0, report(leader.iteration, 0))
    effects = leader.report(1.0, D1, report(leader.iteration, 0))
    message = decision(effects)
    assert reopens(message)
    assert message.reason == "no microbatch found a way through"


def test_an_iteration_that_lacks_votes_is_repeated_while_commits_are_held() -> None:
    run = Run(R1A)
    run.leader.block_commits(0.0, blocked=True)
    run.leader.overdue(1000.0)
    assert run.leader.iteration == Iteration(1, 2)


def test_after_five_failed_attempts_the_run_ends_when_its_result_is_kept() -> None:
    run = Run(R1A)
    for k in range(5):
        assert run.leader.state is LeaderState.TRAINING
        run.aggregate()
        effects = run.leader.voted(
            2.0,
            Ready(
                AveragingId(Iteration(1, 1 + k), run.leader.view.version), (), failure="no memory"
            ),
        )
    assert effects == [CompleteRun(0)]
    assert run.commit() == [], "nothing more is committed"
    assert run.leader.give_up("another reason") == []
    message = decision(run.leader.finish(reason=run.leader.failure, failed=True))
    assert reopens(message)
    assert message.ended
    assert message.failed
    assert message.reason == "iteration 1 failed 5 times, last: no memory"
    assert run.leader.state is LeaderState.FINISHED
    assert run.leader.deadline_s is None
    assert run.leader.give_up("another reason") == [], "it has ended"


# --- the end --------------------------------------------------------------------------------------


def test_a_run_that_ends_tells_members_and_candidates_once() -> None:
    run = Run(R1A)
    run.enter(R1B)
    run.leader.suspicions.cooldowns.put(1.0, member("r1c"), "its tensors take too long")
    effects = run.leader.finish(reason="enough", failed=False)
    assert [to for to, word in sent(effects) if word == Refuse("enough", over=True)] == [R1B, R1C]
    message = decision(effects)
    assert reopens(message)
    assert message.ended
    assert not message.failed
    assert run.leader.finish(reason="again", failed=True) == []


# --- joining --------------------------------------------------------------------------------------


def test_a_member_that_repeats_its_offer_gets_the_last_decision() -> None:
    run = Run()
    join = run.offer(R1A)
    run.leader.join(0.0, R1A, join)
    opened = decision(run.leader.prepared(0.0, R1A, Prepared(1, "h1")))
    assert run.leader.join(1.0, R1A, join) == [Send(R1A, opened)]


def test_a_member_that_offers_what_the_run_refuses_stays_a_member() -> None:
    run = Run(R1A)
    foreign = dataclasses.replace(run.offer(R1A), manifest_sha256="f" * 64)
    ((_, refusal),) = sent(run.leader.join(5.0, R1A, foreign))
    assert isinstance(refusal, Refuse)
    assert R1A in run.leader.view
