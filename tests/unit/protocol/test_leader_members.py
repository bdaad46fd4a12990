"""What a leader decides about members: doubts, losses, leaving, loads."""

import dataclasses

from decod.protocol.core.messages.membership_messages import Leave
from decod.protocol.leadership.leader import LeaderState
from tests.unit.protocol.cast import D0, D1, R1A, R1B, reopens, suspect
from tests.unit.protocol.leading import CONFIG, LEAVE, Run, decision, opening_view


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


def test_while_nodes_are_gathered_leaving_is_at_once() -> None:
    run = Run(R1A, R1B)
    for node in (R1A, R1B):
        run.leader.leave(1.0, node, Leave("device failed", at_once=True))
    assert run.leader.state is LeaderState.GATHERING
    assert opening_view(run.leader.leave(1.0, D1, LEAVE)) == {D0}
