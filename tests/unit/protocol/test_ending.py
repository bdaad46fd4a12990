"""The end of a run: what was committed is finished and told, and then the node stops."""

from decod.ids import AveragingId, Iteration, TensorId
from decod.protocol.core import events as ev
from decod.protocol.core import messages
from decod.protocol.core.context import NodeState
from decod.protocol.core.effects import FreeTensor, Send, StartJob, Stop, StopReason
from decod.protocol.core.jobs import CommitStep, Nothing
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.view import Opening
from tests.unit.protocol.cast import D0, R1A, R1B, ended, notes_of, tensor
from tests.unit.protocol.small_run import LINGER_S, stops, training


def test_a_candidate_stops_when_the_run_ends() -> None:
    world = training("r1a")
    world.start("r1b", stage_index=1)
    view = world.hosts[D0].machine.context.view
    opening = Opening(Iteration(1, 2), Iteration(0, 0), view)
    finished = ended(Iteration(1, 1), opening, "of a test", failed=True)
    world.step("r1b", ev.Received(D0, finished))
    world.wait(LINGER_S)
    assert stops(world, "r1b") == Stop(StopReason.FAILED, "of a test")


def test_the_word_that_the_run_is_over_brings_the_last_commit_along() -> None:
    """It may overtake it. Then the step is made final before the node stops (I3)."""
    world = training("r1a", num_iterations=3)
    host = world.hosts[R1A]
    world.turn_until(lambda: host.machine.strategy.facts.voted_for(Iteration(1, 1)))
    assert host.iteration == 0
    opening = Opening(Iteration(2, 2), Iteration(1, 1), host.machine.context.view)
    effects = host.machine.step(1.0, ev.Received(D0, ended(Iteration(2, 1), opening, "enough")))
    assert notes_of(effects) == ["step.committed"]
    assert [e.job for e in effects if isinstance(e, StartJob)] == [CommitStep(1)]
    assert host.machine.state is NodeState.DRAINING
    late_s = host.machine.deadline_s
    assert late_s is not None
    assert not any(isinstance(e, Stop) for e in host.machine.step(late_s, ev.DeadlinePassed()))
    (start,) = (e for e in effects if isinstance(e, StartJob))
    done = ev.JobFinished(start.job_id, Nothing(), (), 0.1)
    (stop,) = host.machine.step(late_s + 9.0, done)
    assert stop == Stop(StopReason.FINISHED, "enough")


def test_a_node_that_stays_a_moment_tells_and_passes_on_that_the_run_is_over() -> None:
    world = training("r1a", "r1b")
    machine = world.hosts[R1A].machine
    opening = Opening(Iteration(1, 2), Iteration(0, 0), machine.context.view)
    over = ended(Iteration(1, 1), opening, "enough")
    world.step("r1a", ev.Received(D0, over))
    asks = ev.Received(R1B, messages.CatchUp(Iteration(1, 1)))
    assert machine.step(0.1, asks) == [Send(R1B, over)]
    way = Way(D0, R1B, 1, 1)
    assert machine.step(0.1, ev.Received(D0, over, way=way)) == [Send(R1B, over, way)]
    ping = ev.Received(R1B, messages.Ping(7))
    assert machine.step(0.1, ping) == [Send(R1B, messages.Pong(7))]
    part = messages.ReducedPart(AveragingId(Iteration(1, 1), 1), 0)
    assert machine.step(0.1, ev.Received(R1B, part, tensor(900))) == [FreeTensor(TensorId(900))]
