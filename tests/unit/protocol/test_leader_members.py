"""What a leader decides about members: doubts, losses, leaving, loads."""

import dataclasses

from decod.ids import AveragingId, Iteration
from decod.protocol.core.effects import Send
from decod.protocol.core.messages import (
    Assign,
    BeginAggregation,
    CatchUp,
    Leave,
    Mend,
    NodeLoad,
    Ping,
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
    notes_of,
    reopens,
    sent,
    suspect,
)
from tests.unit.protocol.leading import CONFIG, LEAVE, Run, decision, opened_epoch, opening_view


def test_a_suspect_that_answers_stays() -> None:
    leader = Run(R1A, R1B).leader
    assert suspect(leader, 5.0, R1B, "no heartbeat") == [Send(R1B, Ping(1))]
    assert suspect(leader, 6.0, R1B, "no heartbeat") == [], "it has been asked"
    assert leader.deadline_s == 1.0
    leader.suspicions.probes.answered(R1A, 1)
    leader.suspicions.probes.answered(R1B, 99)
    assert suspect(leader, 6.0, R1B, "again") == [], "an answer to another question does not count"
    leader.suspicions.probes.answered(R1B, 1)
    leader.overdue(8.0)
    assert R1B in leader.view
    assert suspect(leader, 9.0, R1B, "again") == [Send(R1B, Ping(2))]


def test_a_suspect_that_is_silent_is_removed_and_told() -> None:
    leader = Run(R1A, R1B).leader
    suspect(leader, 5.0, R1B, "no heartbeat")
    effects = leader.overdue(8.0)
    message = decision(effects)
    assert isinstance(message, Mend)
    assert message.reason == "lost r1b (no heartbeat)"
    assert opening_view(effects) == {D0, D1, R1A}
    assert (R1B, message) in sent(effects)
    assert leader.iteration == Iteration(1, 1), "others do again what it has done in it"


def test_one_lost_ping_costs_no_member_two_do() -> None:
    leader = Run(R1A, R1B).leader
    assert leader.unreachable(5.0, R1B, ping=False, reason="refused") == [Send(R1B, Ping(1))]
    assert leader.unreachable(5.0, R1B, ping=False, reason="refused") == []
    assert leader.unreachable(5.1, R1B, ping=True, reason="refused") == [Send(R1B, Ping(1))]
    effects = leader.unreachable(5.2, R1B, ping=True, reason="refused")
    assert opening_view(effects) == {D0, D1, R1A}
    assert leader.unreachable(5.3, R1B, ping=True, reason="refused") == [], "it is no member"


def test_strangers_and_the_leader_itself_are_not_doubted() -> None:
    leader = Run(R1A).leader
    assert suspect(leader, 5.0, STRANGER, "gone") == []
    assert suspect(leader, 5.0, D0, "gone") == []


def test_a_candidate_that_is_gone_is_forgotten_and_costs_no_iteration() -> None:
    run = Run(R1A)
    run.enter(R1B)
    suspect(run.leader, 5.0, R1B, "refused")
    assert notes_of(run.leader.overdue(8.0)) == ["candidate.lost"]
    assert R1B not in run.leader.admission.candidates
    assert run.leader.iteration == Iteration(1, 1)


def test_two_members_lost_at_once_are_one_loss() -> None:
    leader = Run(R1A, R1B, R1C).leader
    for node in (R1B, R1C):
        suspect(leader, 5.0, node, "no heartbeat")
    effects = leader.overdue(8.0)
    assert leader.view.version == 2
    assert opening_view(effects) == {D0, D1, R1A}
    for node in (R1B, R1C):
        assert isinstance(decision(effects, node), Mend)


def test_a_stage_that_is_lost_before_the_first_commit_is_filled_again() -> None:
    run = Run(R1A)
    suspect(run.leader, 5.0, R1A, "no heartbeat")
    run.leader.overdue(8.0)
    assert run.leader.state is LeaderState.GATHERING
    assert run.leader.overdue(1000.0) is not None
    assert run.leader.iteration == Iteration(1, 2), (
        "an iteration without all its stages has no deadline"
    )
    run.leader.loads_told(1000.0, ())
    assert opening_view(run.enter(R1B)) == {D0, D1, R1B}
    assert run.leader.iteration == Iteration(1, 1, era=1)
    assert run.leader.state is LeaderState.TRAINING


def test_a_stage_of_which_nothing_is_left_anywhere_ends_the_run() -> None:
    """No state is kept, and it has no neighbours: anything else would be another model."""
    run = Run(R1A, config=dataclasses.replace(CONFIG, snapshot_every_iterations=0))
    run.commit()
    suspect(run.leader, 5.0, R1A, "no heartbeat")
    message = decision(run.leader.overdue(8.0))
    assert reopens(message)
    assert not message.failed, "others are asked first"
    message = decision(run.leader.loads_told(8.1, ()))
    assert reopens(message)
    assert message.failed
    assert message.reason == "stage 1 has lost its last member, and its weights are nowhere"


# --- leaving --------------------------------------------------------------------------------------


def test_who_leaves_finishes_the_iteration_and_is_let_go_with_the_commit() -> None:
    run = Run(R1A, R1B)
    assert notes_of(run.leader.leave(1.0, R1B, LEAVE)) == ["member.leaving"]
    assert run.leader.leave(1.0, R1B, LEAVE) == []
    effects = run.commit()
    assert opening_view(effects) == {D0, D1, R1A}
    assert commits(decision(effects, R1B))
    assert run.leader.leaving == {}


def test_the_last_of_a_stage_stays_until_somebody_else_holds_its_weights() -> None:
    run = Run(R1A)
    run.leader.leave(1.0, R1A, LEAVE)
    assert opening_view(run.commit()) == {D0, D1, R1A}
    run.enter(R1B)
    assert opening_view(run.commit()) == {D0, D1, R1A, R1B}
    assert opening_view(run.commit()) == {D0, D1, R1B}


def test_the_end_of_a_stage_is_announced_when_its_last_member_leaves() -> None:
    run = Run(R1A, R1B)
    assert notes_of(run.leader.leave(1.0, R1A, LEAVE)) == ["member.leaving"]
    assert notes_of(run.leader.leave(1.0, R1B, LEAVE)) == ["member.leaving", "stage.ending"]


def test_of_several_who_leave_a_stage_one_stays() -> None:
    run = Run(R1A, R1B)
    for node in (R1A, R1B):
        run.leader.leave(1.0, node, LEAVE)
    assert opening_view(run.commit()) == {D0, D1, R1A}


def test_who_can_not_finish_is_done_without_at_once() -> None:
    run = Run(R1A, R1B)
    effects = run.leader.leave(1.0, R1B, Leave("device failed", at_once=True))
    assert opening_view(effects) == {D0, D1, R1A}


def test_candidates_and_strangers_leave_without_a_trace() -> None:
    run = Run(R1A)
    run.enter(R1B)
    assert run.leader.leave(1.0, R1B, LEAVE) == []
    assert R1B not in run.leader.admission.candidates
    assert run.leader.leave(1.0, STRANGER, LEAVE) == []


def test_while_nodes_are_gathered_leaving_is_at_once() -> None:
    run = Run(R1A, R1B)
    for node in (R1A, R1B):
        run.leader.leave(1.0, node, Leave("device failed", at_once=True))
    assert run.leader.state is LeaderState.GATHERING
    assert opening_view(run.leader.leave(1.0, D1, LEAVE)) == {D0}


# --- catching up ----------------------------------------------------------------------------------


def test_who_missed_a_decision_gets_the_last_one() -> None:
    run = Run(R1A)
    committed = decision(run.commit())
    assert run.leader.catch_up(R1A, CatchUp(Iteration(1, 1))) == [Send(R1A, committed)]
    assert run.leader.catch_up(R1A, CatchUp(Iteration(2, 1))) == [Send(R1A, committed)]
    assert run.leader.catch_up(STRANGER, CatchUp(Iteration(1, 1))) == [Send(STRANGER, committed)]


def test_who_missed_the_beginning_of_aggregation_gets_that() -> None:
    run = Run(R1A)
    run.aggregate()
    begin = BeginAggregation(
        AveragingId(Iteration(1, 1), 1), 4, 14, loss_sum=10, num_tokens=40, num_deferred=2
    )
    assert run.leader.catch_up(R1A, CatchUp(Iteration(1, 1))) == [Send(R1A, begin)]


# --- utilisation ----------------------------------------------------------------------------------


def test_members_are_asked_regularly_how_busy_they_are() -> None:
    leader = Run(R1A).leader
    assert leader.deadline_s == 1.0
    assert leader.overdue(1.0) == [Send(D0, UtilisationQuery(1, Iteration(1, 1)))]
    assert leader.deadline_s == 3.0
    assert leader.overdue(3.0) == [Send(D0, UtilisationQuery(2, Iteration(1, 1)))]


def test_while_nodes_are_gathered_candidates_are_placed_without_asking() -> None:
    run = Run()
    wait = dataclasses.replace(run.offer(R1A), stage_index=None)
    run.leader.join(0.0, R1A, wait)
    assert (R1A, Assign(1, -1)) in sent(run.leader.overdue(1.0))


def test_answers_place_the_candidates_that_wait() -> None:
    run = Run(R1A)
    run.leader.join(0.0, R1B, dataclasses.replace(run.offer(R1B), stage_index=None))
    loads = (NodeLoad(R1A, 2, 2, 9, "training"),)
    assert (R1B, Assign(1, -1)) in sent(run.leader.loads_told(1.0, loads))
    assert run.leader.polling.loads == {R1A: loads[0]}


# --- settlements ----------------------------------------------------------------------------------


def test_an_iteration_opens_with_the_settlement_that_is_agreed_on() -> None:
    run = Run(R1A)
    assert opened_epoch(run) == 0
    run.agreed_epoch = 3
    assert opened_epoch(run) == 3


def test_another_view_begins_without_a_settlement() -> None:
    run = Run(R1A)
    run.agreed_epoch = 3
    run.enter(R1B)
    assert opened_epoch(run) == 0
