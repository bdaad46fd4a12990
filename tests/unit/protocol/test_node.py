"""Whole nodes: which messages count, what a decision does, and how a node ends."""

import pytest

from decod.ids import AveragingId, Iteration, JobId, NodeId, TensorId
from decod.protocol.core import events as ev
from decod.protocol.core import messages
from decod.protocol.core.effects import FreeTensor, Send, Stop, StopReason
from decod.protocol.core.jobs import Load
from decod.protocol.core.messages import round_messages as rounds
from decod.protocol.core.view import Opening
from tests.unit.protocol.cast import D0, R1A, R1B, STRANGER, committed, flow, mb, notes_of, tensor
from tests.unit.protocol.small_run import LINGER_S, stops, training
from tests.unit.protocol.world import World

# --- stale and early messages ---------------------------------------------------------------------


def test_a_message_of_another_kind_of_run_is_dropped() -> None:
    world = training()
    for message in (rounds.Farewell(), rounds.CloseRound(AveragingId(Iteration(1, 1), 1))):
        assert world.step("r1a", ev.Received(D0, message)) == []


def test_a_strangers_message_is_dropped_and_its_tensor_freed() -> None:
    world = training("r1a", "r1b")
    part = messages.ReducedPart(AveragingId(Iteration(1, 1), 1), 0)
    effects = world.hosts[R1A].machine.step(0.0, ev.Received(STRANGER, part, tensor(900)))
    assert effects == [FreeTensor(TensorId(900))]
    query = messages.UtilisationQuery(99, Iteration(1, 1))
    assert world.step("r1a", ev.Received(STRANGER, query)) == []
    request = messages.RequestFlow(1, 5, D0, 1.0)
    assert len(world.step("r1a", ev.Received(R1B, request))) == 1, "refused"
    assert world.step("r1a", ev.Received(STRANGER, request)) == []


def test_early_messages_are_kept_up_to_a_bound_the_oldest_goes_first() -> None:
    """A member that says it is far ahead has its own messages dropped, and not those of others."""
    machine = training().hosts[R1A].machine
    part = messages.ReducedPart(AveragingId(Iteration(9, 1), 1), 0)
    far = messages.CanTake(Iteration(9, 1))
    assert machine.step(0.0, ev.Received(D0, part, tensor(900))) == []
    for number in range(4095):
        liar = NodeId(f"liar {number % 16}")
        assert machine.step(0.0, ev.Received(liar, far)) == []
    for _ in range(500):
        assert machine.step(0.0, ev.Received(NodeId("liar 0"), far)) == [], "its own make room"
    assert machine.step(0.0, ev.Received(NodeId("another"), far)) == []
    assert len(machine._dispatch._early) == 4096 + 1, "the tensor has not made room for words"


def test_a_sender_has_few_tensors_kept_early_whatever_it_says() -> None:
    """Or one member could fill the memory for the tensors of all."""
    machine = training().hosts[R1A].machine  # Its capacity is 1.
    activation = messages.ForwardActivation(Iteration(2**40, 1), mb(0), flow(0), (R1A,))
    part = messages.ReducedPart(AveragingId(Iteration(9, 1), 1), 0)
    assert machine.step(0.0, ev.Received(D0, part, tensor(900))) == []
    for number in range(10):
        assert machine.step(0.0, ev.Received(STRANGER, activation, tensor(number))) == []
    for number in range(5):
        effects = machine.step(0.0, ev.Received(STRANGER, activation, tensor(1000 + number)))
        assert effects == [FreeTensor(TensorId(number))], "its oldest one makes room"


def test_a_bulk_message_without_its_tensor_changes_nothing() -> None:
    world = training()
    for message in (
        messages.ForwardActivation(Iteration(1, 1), mb(0), flow(0), (R1A,)),
        messages.BackwardGradient(Iteration(1, 1), mb(0), flow(0), (R1A,)),
        messages.ReducedPart(AveragingId(Iteration(1, 1), 1), 0),
    ):
        assert world.step("r1a", ev.Received(D0, message)) == []


# --- decisions ------------------------------------------------------------------------------------


def test_a_node_that_missed_a_commit_can_not_follow() -> None:
    """It does not hold the parameters that the others have now (I3)."""
    world = training("r1a")
    view = world.hosts[D0].machine.context.view
    opening = Opening(Iteration(3, 1), Iteration(2, 1), view)
    world.step("r1a", ev.Received(D0, committed(Iteration(2, 1), opening, 1.0, 1)))
    stop = stops(world, "r1a")
    assert stop == Stop(StopReason.REMOVED, "the run has committed iteration 2 without it")


def test_a_heartbeat_of_a_later_iteration_makes_a_node_ask_what_it_missed() -> None:
    world = training("r1a")
    beat = messages.Heartbeat(Iteration(2, 1))
    view = world.hosts[R1A].machine.context.view
    ask = Send(D0, messages.CatchUp(Iteration(1, 1), view.hash))
    assert world.step("r1a", ev.Received(D0, beat)) == [ask]
    assert world.step("r1a", ev.Received(D0, messages.Heartbeat(Iteration(1, 1)))) == []


# --- joining and state ----------------------------------------------------------------------------


def enters_with_nothing(world: World) -> None:
    """Start r1b, which the leader takes for level with its stage: it still needs the state."""
    world.start("r1b", stage_index=1)
    leader = world.hosts[D0].machine.leader
    assert leader is not None
    candidates = leader.admission.candidates
    world.turn_until(lambda: R1B in candidates and candidates[R1B].prepared)
    candidates[R1B].state_at = leader.iteration


def test_a_newcomer_whose_blob_is_bad_leaves_when_no_donor_is_left() -> None:
    world = training("r1a", num_iterations=9)
    enters_with_nothing(world)
    pipeline = world.hosts[R1B].queue
    world.turn_until(lambda: any(isinstance(start.job, Load) for start in pipeline))
    while not isinstance(pipeline[0].job, Load):
        world.work("r1b")
    world.work("r1b", refuse="a hash differs")
    assert stops(world, "r1b").reason is StopReason.REMOVED


def test_given_weights_come_from_the_leader() -> None:
    world = World(num_iterations=1, initial_from_leader=True)
    world.start("d0")
    host = world.start("r1a", stage_index=1)
    assert host.machine.in_view is False
    world.settle()
    assert any(line.startswith("r1a does Load iteration=0") for line in world.seen)
    assert "d0 has the result of iteration 1" in world.seen


@pytest.mark.parametrize(("over", "how"), [(False, "REFUSED"), (True, "FINISHED")])
def test_refusals_count_only_from_the_leader_and_only_for_candidates(over: bool, how: str) -> None:
    world = training("r1a")
    refuse = messages.Refuse("another manifest", over=over)
    assert world.step("r1a", ev.Received(D0, refuse)) == []
    world.start("r1b")
    assert world.step("r1b", ev.Received(R1A, refuse)) == []
    world.step("r1b", ev.Received(D0, refuse))
    assert stops(world, "r1b") == Stop(StopReason[how], "another manifest")


def test_the_last_member_of_a_stage_says_that_it_is_waited_for() -> None:
    world = training("r1a")
    assert notes_of(world.step("r1a", ev.DrainRequested())) == ["successor.awaited"]


# --- failures -------------------------------------------------------------------------------------


def test_a_leader_without_its_device_ends_the_run_when_its_result_is_kept() -> None:
    world = training("r1a")
    world.step("d0", ev.JobFailed(JobId(99), "exit code 1", fatal=True))
    world.step("d0", ev.JobFailed(JobId(98), "exit code 1", fatal=True))
    assert world.seen.count("d0 has the result of iteration 0") == 1
    world.step("d0", ev.DrainRequested(ends_run=True))
    world.wait(LINGER_S)
    for name in ("d0", "r1a"):
        detail = "the leader's device failed: exit code 1"
        assert stops(world, name) == Stop(StopReason.FAILED, detail)


@pytest.mark.parametrize("job", ["Gather", "Reduce", "Propose"])
def test_a_reduction_that_fails_repeats_the_iteration(job: str) -> None:
    world = training("r1a", "r1b", num_iterations=1)
    _refuse_first(world, job, "r1a" if job != "Gather" else None)
    world.settle()
    assert any("notes iteration.aborted" in line and "no memory" in line for line in world.seen)
    assert "d0 has the result of iteration 1" in world.seen
    assert all(host.tensors == {} for host in world.hosts.values())


def _refuse_first(world: World, kind: str, name: str | None = None) -> None:
    for _ in range(500):
        for node, host in world.hosts.items():
            if not host.queue or name not in (None, node):
                continue
            if host.queue[0].job.name == kind:
                world.work(node, refuse="no memory")
                return
        world.turn()
    raise AssertionError(f"no {kind}")


@pytest.mark.parametrize("job", ["Embed", "Forward", "Head", "Backward", "EmbedBackward"])
def test_a_microbatch_that_fails_costs_no_node(job: str) -> None:
    """Every pass may be refused: the microbatch is put off, and the run goes on without it."""
    world = World(num_microbatches=2, num_iterations=2)
    world.start("d0", capacity=2)
    world.start("r1a", capacity=2, stage_index=1)
    _refuse_first(world, job)
    world.settle()
    world.wait(60.0)
    assert "d0 has the result of iteration 2" in world.seen
    assert all(host.tensors == {} for host in world.hosts.values())


def test_a_copy_that_fails_is_refused_to_its_asker() -> None:
    world = training("r1a", num_iterations=9)
    enters_with_nothing(world)
    _refuse_first(world, "Snapshot", "r1a")
    assert any(line.startswith("r1b stops: removed") for line in world.seen)


# --- deliveries and time --------------------------------------------------------------------------


def test_what_only_the_leader_decides_is_nothing_to_others() -> None:
    world = training("r1a", "r1b")
    for message in (messages.Suspect(R1B, "x"), messages.Pong(1), messages.Leave("x")):
        assert world.step("r1a", ev.Received(R1B, message)) == []
    assert world.step("r1a", ev.BlockCommits(blocked=True)) == []


def test_a_node_that_has_stopped_does_nothing_but_free_what_comes() -> None:
    world = training("r1a")
    world.step("r1a", ev.JobFailed(JobId(99), "exit code 1", fatal=True))
    machine = world.hosts[R1A].machine
    part = messages.ReducedPart(AveragingId(Iteration(1, 1), 1), 0)
    freed = [FreeTensor(TensorId(900))]
    assert machine.step(1.0, ev.Received(D0, part, tensor(900))) == freed
    assert machine.step(1.0, ev.StateFetched(1, 1, "", tensor(900))) == freed
    assert machine.step(1.0, ev.Received(D0, messages.Ping(1))) == []
    assert machine.step(1.0, ev.DeadlinePassed()) == []


# --- what must not matter -------------------------------------------------------------------------


def test_a_member_that_waits_for_its_state_tells_nobody_that_it_can_take() -> None:
    world = training("r1a", num_iterations=9)
    enters_with_nothing(world)
    world.turn_until(lambda: world.hosts[R1B].machine.in_view)
    iteration = world.hosts[R1B].machine.context.iteration
    assert world.step("r1b", ev.Received(D0, messages.CanTake(iteration))) == []
