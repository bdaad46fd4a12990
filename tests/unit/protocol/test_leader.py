"""The leader's decisions: each is made once, in the state that allows it, and is told to all."""

import dataclasses

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.effects import CompleteRun, Send
from decod.protocol.core.messages import (
    Assign,
    BeginAggregation,
    CatchUp,
    Leave,
    NodeLoad,
    Prepared,
    Ready,
    Refuse,
    UtilisationQuery,
)
from decod.protocol.leadership.leader import LeaderState
from tests.unit.protocol.cast import (
    D0,
    D1,
    R1A,
    R1B,
    R1C,
    STRANGER,
    commits,
    member,
    notes_of,
    reopens,
    sent,
)
from tests.unit.protocol.leading import Run, decision, decisions, opening_view, report


def test_the_run_is_opened_when_every_stage_has_its_members() -> None:
    run = Run(R1A)
    leader = run.leader
    assert leader.state is LeaderState.TRAINING
    assert leader.iteration == Iteration(1, 1)
    assert set(leader.view.by_id) == {D0, D1, R1A}
    assert leader.view.version == 1
    assert leader.admission.candidates == {}


def test_nothing_is_opened_while_a_stage_lacks_members() -> None:
    leader = Run().leader
    assert leader.state is LeaderState.GATHERING
    assert leader.iteration == Iteration(1, 0)
    assert leader.catch_up(D1, CatchUp(Iteration(0, 0))) == []
    assert leader.report(1.0, D0, report(leader.iteration)) == []


def test_the_opening_is_an_abort_of_an_attempt_that_never_was() -> None:
    run = Run(R1A)
    leader = Run().leader
    run = Run()
    effects = run.enter(R1A)
    message = decision(effects)
    assert reopens(message)
    assert (message.closed, message.opening.iteration) == (Iteration(1, 0), Iteration(1, 1))
    assert message.opening.committed == Iteration(0, 0)
    assert "run.opened" in notes_of(effects)
    assert leader.state is LeaderState.GATHERING


# --- an iteration
# --------------------------------------------------------------------------------------


def test_when_all_shares_are_done_the_batch_is_their_sum() -> None:
    leader = Run(R1A).leader
    assert leader.report(1.0, D0, report(leader.iteration, 2, digest=5)) == []
    assert leader.report(1.0, D0, report(leader.iteration, 2, digest=5)) == [], "a repeat"
    begin = BeginAggregation(
        AveragingId(leader.iteration, 1), 3, 12, loss_sum=7.5, num_tokens=30, num_deferred=2
    )
    assert leader.report(1.0, D1, report(leader.iteration, 1, digest=7)) == [Send(D0, begin)]
    assert leader.state is LeaderState.AGGREGATING
    assert leader.report(1.0, D1, report(leader.iteration)) == []


@pytest.mark.parametrize(
    ("sender", "iteration"),
    [
        (R1A, Iteration(1, 1)),
        (STRANGER, Iteration(1, 1)),
        (D1, Iteration(1, 0)),
        (D1, Iteration(2, 1)),
    ],
)
def test_only_data_nodes_report_and_only_on_this_iteration(
    sender: NodeId, iteration: Iteration
) -> None:
    leader = Run(R1A).leader
    leader.report(1.0, D0, report(leader.iteration))
    assert leader.report(1.0, sender, report(iteration)) == []
    assert leader.state is LeaderState.TRAINING


def test_a_vote_of_all_is_committed_once() -> None:
    run = Run(R1A)
    leader = run.leader
    effects = run.commit()
    message = decision(effects)
    assert commits(message)
    assert message.closed == message.opening.committed == Iteration(1, 1)
    assert message.opening.iteration == leader.iteration == Iteration(2, 1)
    assert (message.loss, message.num_tokens) == (2.5, 40)
    assert leader.state is LeaderState.TRAINING
    assert leader.voted(3.0, Ready(AveragingId(Iteration(1, 1), 1), ())) == [], (
        "of an iteration that is over"
    )
    assert leader.voted(3.0, Ready(AveragingId(Iteration(2, 1), 1), ())) == [], (
        "nothing is aggregated yet"
    )
    assert leader.block_commits(3.0, blocked=False) == []
    assert leader.committed == Iteration(1, 1)


def test_without_changes_of_membership_a_commit_keeps_the_view() -> None:
    run = Run(R1A)
    view = run.leader.view
    run.commit()
    assert run.leader.view is view


def test_a_vote_against_repeats_the_iteration() -> None:
    run = Run(R1A)
    run.aggregate()
    effects = run.leader.voted(2.0, Ready(AveragingId(Iteration(1, 1), 1), (), failure="no memory"))
    message = decision(effects)
    assert reopens(message)
    assert (message.closed, message.opening.iteration) == (Iteration(1, 1), Iteration(1, 2))
    assert message.reason == "no memory"
    assert notes_of(effects) == ["iteration.aborted"]
    assert run.leader.view.version == 2, "flows are built anew"


def test_whoever_enters_with_a_repeated_iteration_is_told_what_its_parameters_must_be() -> None:
    run = Run(R1A)
    committed = decision(run.commit())
    repeated = decision(run.leader.leave(3.0, R1A, Leave("ill", at_once=True)))
    assert reopens(repeated)
    assert repeated.hashes == committed.hashes != ()


def test_a_share_that_can_not_be_finished_repeats_the_iteration() -> None:
    run = Run(R1A)
    effects = run.leader.report(1.0, D1, report(Iteration(1, 1), failure="gradient lost"))
    assert reopens(decision(effects))
    assert run.leader.iteration == Iteration(1, 2)


def test_a_share_that_fails_after_it_was_reported_repeats_the_iteration() -> None:
    run = Run(R1A)
    run.aggregate()
    assert run.leader.report(2.0, D1, report(Iteration(1, 1))) == []
    effects = run.leader.report(2.0, D1, report(Iteration(1, 1), failure="gradient lost"))
    assert reopens(decision(effects))
    assert (run.leader.iteration, run.leader.state) == (Iteration(1, 2), LeaderState.TRAINING)


def test_an_empty_batch_repeats_the_iteration() -> None:
    leader = Run(R1A).leader
    leader.report(1.0, D0, report(leader.iteration, 0))
    effects = leader.report(1.0, D1, report(leader.iteration, 0))
    message = decision(effects)
    assert reopens(message)
    assert message.reason == "no microbatch found a way through"


def test_an_iteration_without_progress_is_repeated_and_each_step_is_progress() -> None:
    leader = Run(R1A).leader
    for now_s in (50.0, 99.0):
        assert not [e for e in leader.overdue(now_s) if isinstance(e, Send) and e.to == D1]
        assert leader.iteration == Iteration(1, 1)
    leader.report(99.0, D0, report(leader.iteration))
    leader.overdue(100.0)
    assert leader.iteration == Iteration(1, 1)
    effects = leader.overdue(199.0)
    assert leader.iteration == Iteration(1, 2)
    message = decision(effects)
    assert reopens(message)
    assert message.reason == f"no progress in time, the batches of {D1[:8]} did not come"


def test_where_all_have_reported_the_votes_are_what_did_not_come() -> None:
    run = Run(R1A)
    run.aggregate()
    message = decision(run.leader.overdue(1000.0))
    assert reopens(message)
    assert message.reason == "no progress in time, the votes of all members did not come"


def test_a_run_whose_iterations_take_long_is_given_longer() -> None:
    run = Run(R1A)
    run.commit(now_s=200.0)
    run.leader.overdue(999.0)
    assert run.leader.iteration == Iteration(2, 1), "four times 200 s are not over"
    run.leader.overdue(1000.0)
    assert run.leader.iteration == Iteration(2, 2)


def test_an_iteration_whose_commit_is_held_is_not_repeated() -> None:
    """Large states take longer to copy than an iteration may go without progress."""
    run = Run(R1A)
    run.leader.block_commits(0.0, blocked=True)
    run.commit()
    for now_s in (200.0, 400.0):
        run.leader.overdue(now_s)
    assert (run.leader.iteration, run.leader.committed.number) == (Iteration(1, 1), 0)
    assert commits(decision(run.leader.block_commits(500.0, blocked=False)))


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


def test_a_commit_forgives_earlier_failures() -> None:
    run = Run(R1A)
    for _ in range(3):
        for _ in range(4):
            run.aggregate()
            run.leader.voted(
                2.0,
                Ready(
                    AveragingId(run.leader.iteration, run.leader.view.version),
                    (),
                    failure="no memory",
                ),
            )
        run.commit()
    assert run.leader.committed.number == 3


def test_commits_wait_while_they_are_held() -> None:
    run = Run(R1A)
    assert run.leader.block_commits(0.0, blocked=True) == []
    assert run.commit() == []
    assert run.leader.committed == Iteration(0, 0)
    assert commits(decision(run.leader.block_commits(3.0, blocked=False)))
    assert run.leader.block_commits(3.0, blocked=False) == []


def test_an_iteration_is_committed_though_those_who_voted_in_it_are_gone_since() -> None:
    """Their votes count: no other leader can have a quorum that does not know of them."""
    run = Run(R1A, R1B)
    run.aggregate()
    run.leader.quorum.wait_for((D1, R1A, R1B), run.leader.view)
    averaging = AveragingId(run.leader.iteration, run.leader.view.version)
    assert commits(decision(run.leader.voted(2.0, Ready(averaging, ((0, "a"), (1, "b"))))))
    assert run.leader.committed.number == 1


# --- the end --------------------------------------------------------------------------------------


def test_after_the_last_iteration_members_hold_still() -> None:
    run = Run(R1A, num_iterations=1)
    run.enter(R1B)
    effects = run.commit()
    assert commits(message := decision(effects))
    assert message.opening.paused
    assert R1B not in message.opening.view, "nobody enters a run that is done"
    assert run.leader.state is LeaderState.PAUSED
    assert (D0, UtilisationQuery(1, run.leader.iteration)) in sent(effects)
    assert CompleteRun(1) not in effects, "somebody may not have heard of the commit yet"
    loads = tuple(NodeLoad(node, 0, 1, 0, "paused") for node in (D0, R1A))
    assert run.leader.loads_told(2.0, loads) == [CompleteRun(1)]
    assert run.leader.loads_told(2.5, loads) == [], "once"
    assert run.leader.report(3.0, D0, report(run.leader.iteration)) == []


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


def test_a_candidate_that_is_ready_enters_with_the_next_commit() -> None:
    run = Run(R1A)
    assert decisions(run.enter(R1B)) == []
    assert opening_view(run.commit()) == {D0, D1, R1A, R1B}
    assert run.leader.view.by_id[R1B].since_iteration == 1


def test_a_member_that_repeats_its_offer_gets_the_last_decision() -> None:
    run = Run()
    join = run.offer(R1A)
    run.leader.join(0.0, R1A, join)
    opened = decision(run.leader.prepared(0.0, R1A, Prepared(1, "h1")))
    assert run.leader.join(1.0, R1A, join) == [Send(R1A, opened)]


def test_a_member_that_restarted_is_removed_and_a_candidate_again() -> None:
    run = Run(R1A, R1B)
    effects = run.leader.join(5.0, R1B, run.offer(R1B))
    assert opening_view(effects) == {D0, D1, R1A}
    assert notes_of(effects) == ["member.lost", "iteration.mended", "candidate.joined"]
    assert (R1B, Assign(1, -1)) in sent(effects)


def test_a_member_that_offers_what_the_run_refuses_stays_a_member() -> None:
    run = Run(R1A)
    foreign = dataclasses.replace(run.offer(R1A), manifest_sha256="f" * 64)
    ((_, refusal),) = sent(run.leader.join(5.0, R1A, foreign))
    assert isinstance(refusal, Refuse)
    assert R1A in run.leader.view


# --- doubts ---------------------------------------------------------------------------------------
