"""Pausing at the leader: it comes with the next opening, and no stage is paused as a whole."""

from decod.ids import NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.membership_messages import Capacity, CapacityAnswer, Leave
from decod.protocol.leadership.leader import LeaderState
from tests.unit.protocol.cast import D0, R1A, R1B, R1C, STRANGER, notes_of, sent
from tests.unit.protocol.leading import LEAVE, Run, report


def pause(run: Run, node: NodeId, request_id: int = 1, capacity: int = 0) -> list[Effect]:
    return run.leader.capacity(3.0, node, Capacity(request_id, capacity))


def capacities(run: Run) -> dict[NodeId, int]:
    return {m.node_id: m.capacity for m in run.leader.view.members if m.stage_index}


def test_a_pause_that_would_stop_its_stage_is_refused_or_taken_back() -> None:
    run = Run(R1A, R1B)
    pause(run, R1A)
    ((_, answer),) = sent(pause(run, R1B))
    assert isinstance(answer, CapacityAnswer)
    assert "stage 1 would stop" in answer.refusal
    run.leader.leave(4.0, R1B, Leave("device failed", at_once=True))
    effects = run.commit(now_s=5.0)
    taken_back = [m for node, m in sent(effects) if node == R1A and isinstance(m, CapacityAnswer)]
    assert ["would stop" in answer.refusal for answer in taken_back] == [True]
    assert capacities(run) == {R1A: 2}


def test_a_stage_with_only_paused_ones_keeps_its_weights_and_waits() -> None:
    run = Run(R1A, R1B)
    pause(run, R1A)
    run.commit()
    effects = run.leader.leave(4.0, R1B, Leave("device failed", at_once=True))
    assert run.leader.state is LeaderState.GATHERING
    assert "member.lost" in notes_of(effects)
    assert run.leader.deadline_s is not None, "members are still told that the leader lives"
    assert run.leader.report(5.0, D0, report(run.leader.iteration)) == []
    # It leaves only when somebody else has the weights, or when its time is up.
    assert notes_of(run.leader.leave(5.0, R1A, LEAVE)) == ["member.leaving", "stage.ending"]
    run.leader.seats.forget(R1A)
    effects = pause(run, R1A, 2, capacity=2)
    assert "iteration.aborted" in notes_of(effects)
    assert run.leader.state is LeaderState.TRAINING
    assert capacities(run) == {R1A: 2}


def test_a_newcomer_takes_over_from_those_that_are_paused() -> None:
    run = Run(R1A, R1B)
    pause(run, R1A)
    run.commit()
    run.leader.leave(4.0, R1B, Leave("device failed", at_once=True))
    run.enter(R1C)
    assert run.leader.state is LeaderState.TRAINING
    assert capacities(run) == {R1A: 0, R1C: 2}


def test_a_stranger_and_a_run_that_is_done_change_nothing() -> None:
    run = Run(R1A, R1B, num_iterations=1)
    assert pause(run, STRANGER) == []
    run.commit()
    assert sent(pause(run, R1A)) == [(R1A, CapacityAnswer(1, "all iterations are done"))]
