"""Whole nodes: which messages count, what a decision does, and how a node ends."""

import pytest

from decod.ids import AveragingId, Iteration, JobId, NodeId, TensorId
from decod.protocol.core import events as ev
from decod.protocol.core import messages
from decod.protocol.core.context import NodeState
from decod.protocol.core.dispatch import Dispatch
from decod.protocol.core.effects import (
    FetchState,
    FreeTensor,
    Send,
    Stop,
    StopReason,
    UseMembers,
)
from decod.protocol.core.jobs import Built, Load, Nothing, Reset
from decod.protocol.core.messages import round_messages as rounds
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.view import Opening, View
from tests.unit.protocol.cast import (
    D0,
    R1A,
    R1B,
    STRANGER,
    committed,
    flow,
    mb,
    notes_of,
    reopens,
    sent,
    tensor,
)
from tests.unit.protocol.small_run import LINGER_S, abort, context_of, stops, training
from tests.unit.protocol.world import World

# --- a whole run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_relays", [1, 2, 3])
def test_a_run_commits_all_its_iterations_and_holds_nothing_after(num_relays: int) -> None:
    names = ("r1a", "r1b", "r1c")[:num_relays]
    world = training(*names, num_iterations=3)
    world.settle()
    world.wait(60.0)
    assert "d0 has the result of iteration 3" in world.seen
    for host in world.hosts.values():
        assert host.machine.state is NodeState.PAUSED
        assert host.iteration == 3
        assert host.tensors == {}, "everything is freed at the commit (I6)"
        assert len(host.machine.context.tensors) == 0
    world.step("d0", ev.DrainRequested())
    world.wait(LINGER_S)
    assert {h.stop.reason for h in world.hosts.values() if h.stop} == {StopReason.FINISHED}
    assert all(host.machine.state is NodeState.STOPPED for host in world.hosts.values())


def test_a_node_says_how_busy_it_is() -> None:
    world = training(num_iterations=1)
    world.settle()
    machine = world.hosts[R1A].machine
    expected = messages.NodeLoad(R1A, num_flows=1, capacity=1, num_microbatches=1, state="paused")
    assert machine.own_load() == expected
    assert world.hosts[D0].machine.own_load().num_microbatches == 1


def test_the_leader_knows_how_busy_everybody_is() -> None:
    world = training("r1a", "r1b")
    world.settle()
    world.wait(5.0)
    leader = world.hosts[D0].machine.leader
    assert leader is not None
    assert set(leader.polling.loads) == {D0, R1A, R1B}


def test_states_follow_the_life_of_a_node() -> None:
    world = World(num_iterations=1)
    world.start("d0")
    world.start("r1a", stage_index=1)
    machine = world.hosts[R1A].machine
    states = [machine.state]
    for message in ("ForwardActivation", "Ready"):
        world.settle([message])
        states.append(machine.state)
    world.settle()
    states.append(machine.state)
    world.step("r1a", ev.DrainRequested())
    states.append(machine.state)
    world.kill("d0")
    world.wait(100.0)
    states.append(machine.state)
    assert machine.deadline_s is None
    assert [state.value for state in states] == [
        "joining",
        "training",
        "aggregating",
        "paused",
        "draining",
        "stopped",
    ]


# --- stale and early messages ---------------------------------------------------------------------


def test_a_message_of_an_earlier_iteration_is_dropped_and_its_tensor_freed() -> None:
    world = training()
    old = messages.ReducedPart(AveragingId(Iteration(1, 0), 1), 0)
    assert world.hosts[R1A].machine.step(0.0, ev.Received(D0, old, tensor(900))) == [
        FreeTensor(TensorId(900))
    ]
    assert world.step("r1a", ev.Received(D0, messages.CanTake(Iteration(1, 0)))) == []


def test_a_message_of_an_earlier_view_is_dropped() -> None:
    world = training()
    assert world.step("r1a", ev.Received(D0, messages.Withdraw(0, 1))) == []


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


def test_early_messages_are_taken_up_in_order_when_their_iteration_comes() -> None:
    """An asker's request may overtake the opening that made it possible."""
    world = training()
    view = world.hosts[D0].machine.context.view
    later = View.of(view.members, version=2, leader=D0, term=1, num_stages=2)
    early = [
        ev.Received(D0, messages.FlowCost(2, D0, 0.0, 1, 1.0)),
        ev.Received(D0, messages.CanTake(Iteration(1, 2))),
    ]
    for event in early:
        assert world.step("r1a", event) == []
    effects = world.step("r1a", ev.Received(D0, abort(world, Iteration(1, 2), later)))
    assert (D0, messages.RequestFlow(2, 1, D0, 0.0)) in sent(effects)


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


def test_all_tensors_that_a_sender_may_have_under_way_are_kept_early() -> None:
    """A data node sends hundreds of activations at once, and the opening may come after them."""
    dispatch = Dispatch(training().hosts[R1A].machine.context, num_sent=400)
    activation = messages.ForwardActivation(Iteration(2, 1), mb(0), flow(0), (R1A,))
    events = [ev.Received(D0, activation, tensor(number)) for number in range(400)]
    assert [dispatch.keep(event) for event in events] == 400 * [[]]


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


def test_a_decision_is_passed_down_the_tree_once() -> None:
    world = training("r1a", "r1b")
    decision = abort(world, Iteration(1, 2))
    effects = world.step("r1a", ev.Received(D0, decision))
    told = [message for to, message in sent(effects) if isinstance(message, messages.Open)]
    assert [message.opening.iteration for message in told] == [Iteration(1, 2)]
    assert world.step("r1a", ev.Received(D0, decision)) == []


def test_an_abort_clears_the_device_and_the_iteration_is_opened_again() -> None:
    world = training()
    world.settle(["Complete", "to=d0"])
    effects = world.step("r1a", ev.Received(D0, abort(world, Iteration(1, 2))))
    assert "iteration.opened" in notes_of(effects)
    assert context_of(world, "r1a").iteration == Iteration(1, 2)  # type: ignore[attr-defined]
    assert Reset() in [start.job for start in world.hosts[R1A].queue]


def test_new_members_are_known_before_they_are_told() -> None:
    """The driver dials a child of the tree where the view says."""
    world = training("r1a", "r1b")
    view = world.hosts[D0].machine.context.view
    later = View.of(view.members, version=2, leader=D0, term=1, num_stages=2)
    effects = world.step("r1a", ev.Received(D0, abort(world, Iteration(1, 2), later)))
    assert effects[0] == UseMembers(later.members)
    assert isinstance(effects[1], Send)


def test_a_member_that_the_run_goes_on_without_stops() -> None:
    world = training("r1a", "r1b")
    members = [m for m in world.hosts[D0].machine.context.view.members if m.node_id != R1B]
    later = View.of(members, version=2, leader=D0, term=1, num_stages=2)
    world.step("r1b", ev.Received(D0, abort(world, Iteration(1, 2), later)))
    assert stops(world, "r1b").reason is StopReason.REMOVED


def test_a_goodbye_to_a_former_self_is_not_for_a_candidate() -> None:
    world = training("r1a")
    world.start("r1b", stage_index=1)
    assert world.step("r1b", ev.Received(D0, abort(world, Iteration(1, 2)))) == []
    assert world.hosts[R1B].stop is None


def test_a_node_that_missed_a_commit_can_not_follow() -> None:
    """It does not hold the parameters that the others have now (I3)."""
    world = training("r1a")
    view = world.hosts[D0].machine.context.view
    opening = Opening(Iteration(3, 1), Iteration(2, 1), view)
    world.step("r1a", ev.Received(D0, committed(Iteration(2, 1), opening, 1.0, 1)))
    stop = stops(world, "r1a")
    assert stop == Stop(StopReason.REMOVED, "the run has committed iteration 2 without it")


@pytest.mark.parametrize("own", [True, False])
def test_a_node_that_has_come_to_other_parameters_than_were_committed_can_not_follow(
    own: bool,
) -> None:
    """A leader may be elected without those of a stage who would have told that one differs."""
    world = training("r1a")
    context = world.hosts[R1A].machine.context
    strategy = world.hosts[R1A].machine.strategy
    world.turn_until(lambda: strategy.voted_for(Iteration(1, 1)))
    opening = Opening(Iteration(2, 1), Iteration(1, 1), context.view)
    hashes = ((1, strategy.proposal if own else "f" * 64),)
    decision = committed(
        Iteration(1, 1), opening, view_version=context.view.version, view_term=1, hashes=hashes
    )
    world.step("r1a", ev.Received(D0, decision))
    assert (world.hosts[R1A].stop is None) is own


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


def test_a_newcomer_loads_the_state_of_its_stage_before_it_trains() -> None:
    world = training("r1a", num_iterations=3)
    enters_with_nothing(world)
    world.settle()
    loaded = [line for line in world.seen if line.startswith("r1b notes state.loaded")]
    assert loaded == ["r1b notes state.loaded iteration=1"]
    assert world.hosts[R1B].iteration == world.hosts[R1A].iteration == 3
    assert "d0 has the result of iteration 3" in world.seen


def test_a_newcomer_that_loads_is_seen_syncing() -> None:
    world = training("r1a", num_iterations=3)
    enters_with_nothing(world)
    world.turn_until(lambda: world.hosts[R1B].machine.in_view)
    assert world.hosts[R1B].machine.state is NodeState.SYNCING


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


def test_weights_that_the_leader_can_not_give_yet_are_asked_for_again() -> None:
    world = World(num_iterations=1, initial_from_leader=True)
    world.start("d0")
    world.settle()
    host = world.start("r1a", stage_index=1)
    machine = host.machine
    machine.step(0.0, ev.Received(D0, messages.Assign(1, -1)))
    built = ev.JobFinished(JobId(1), Built("seed"), (), 1.0)
    assert machine.step(0.0, built)[-1] == FetchState((D0,), 1, 0)
    assert machine.step(1.0, ev.DeadlinePassed()) == []
    failed = ev.StateFetchFailed(1, 0, "busy")
    assert machine.step(1.0, failed) == []
    offer, fetch = machine.step(2.0, ev.DeadlinePassed())
    assert isinstance(offer, Send)
    assert isinstance(offer.message, messages.Join), "the run may have begun meanwhile"
    assert fetch == FetchState((D0,), 1, 0)


@pytest.mark.parametrize(("over", "how"), [(False, "REFUSED"), (True, "FINISHED")])
def test_refusals_count_only_from_the_leader_and_only_for_candidates(over: bool, how: str) -> None:
    world = training("r1a")
    refuse = messages.Refuse("another manifest", over=over)
    assert world.step("r1a", ev.Received(D0, refuse)) == []
    world.start("r1b")
    assert world.step("r1b", ev.Received(R1A, refuse)) == []
    world.step("r1b", ev.Received(D0, refuse))
    assert stops(world, "r1b") == Stop(StopReason[how], "another manifest")


def test_a_candidate_that_is_drained_leaves_at_once() -> None:
    world = training("r1a")
    world.start("r1b")
    effects = world.step("r1b", ev.DrainRequested())
    assert sent(effects)[0][0] == D0
    assert stops(world, "r1b").reason is StopReason.DRAINED


def test_the_last_member_of_a_stage_says_that_it_is_waited_for() -> None:
    world = training("r1a")
    assert notes_of(world.step("r1a", ev.DrainRequested())) == ["successor.awaited"]


def test_a_member_that_is_drained_says_so_once() -> None:
    world = training("r1a", "r1b")
    assert len(world.step("r1b", ev.DrainRequested())) == 1
    assert world.step("r1b", ev.DrainRequested()) == []
    world.settle()
    assert stops(world, "r1b").reason is StopReason.DRAINED


# --- failures -------------------------------------------------------------------------------------


def test_a_relay_without_its_device_leaves_at_once() -> None:
    world = training("r1a", "r1b")
    world.settle(["Complete"])
    world.deliver(world.flight.popleft())
    effects = world.step("r1a", ev.JobFailed(JobId(99), "exit code 1", fatal=True))
    leave = messages.Leave("device failed: exit code 1", at_once=True)
    assert (D0, leave) in sent(effects)
    assert stops(world, "r1a") == Stop(StopReason.CRIPPLED, "exit code 1")


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


def test_a_candidate_that_can_not_build_leaves() -> None:
    world = training("r1a", num_iterations=9)
    world.start("r1b", stage_index=1)
    world.turn_until(lambda: bool(world.hosts[R1B].queue))
    world.work("r1b", refuse="no memory")
    assert stops(world, "r1b") == Stop(StopReason.CRIPPLED, "no memory")


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


def test_a_commit_that_the_device_can_not_make_final_ends_the_node() -> None:
    world = training("r1a", "r1b", num_iterations=9)
    _refuse_first(world, "CommitStep", "r1b")
    assert stops(world, "r1b").reason is StopReason.CRIPPLED


def test_a_copy_that_fails_is_refused_to_its_asker() -> None:
    world = training("r1a", num_iterations=9)
    enters_with_nothing(world)
    _refuse_first(world, "Snapshot", "r1a")
    assert any(line.startswith("r1b stops: removed") for line in world.seen)


# --- deliveries and time --------------------------------------------------------------------------


def test_what_could_not_be_delivered_is_told_to_the_leader_and_tried_again() -> None:
    world = training("r1a", "r1b")
    failed = ev.SendFailed(R1B, messages.CanTake(Iteration(1, 1)), "refused")
    assert (D0, messages.Suspect(R1B, "refused")) in sent(world.step("r1a", failed))
    world.now_s = 1.0
    effects = world.step("r1a", ev.DeadlinePassed())
    assert (R1B, messages.CanTake(Iteration(1, 1))) in sent(effects)


def test_a_leader_that_can_not_deliver_asks_the_receiver() -> None:
    world = training("r1a")
    failed = ev.SendFailed(R1A, messages.CanTake(Iteration(1, 1)), "refused")
    assert sent(world.step("d0", failed)) == [(R1A, messages.Ping(1))]
    assert world.step("d0", ev.Received(R1A, messages.Pong(1))) == []


def test_a_ping_is_answered_at_once() -> None:
    world = training("r1a")
    assert world.step("r1a", ev.Received(D0, messages.Ping(7))) == [Send(D0, messages.Pong(7))]


def test_heartbeats_that_are_passed_on_are_not_ones_own() -> None:
    world = training("r1a", "r1b")
    machine, way = world.hosts[R1A].machine, Way(R1B, D0, 1, 1)
    beat = machine.context.heartbeat
    own, passed_on = Send(D0, beat), Send(D0, beat, way)
    for at_s in (10.0, 20.0):
        effects = machine.step(at_s - 0.1, ev.Received(R1B, beat, way=way))
        assert effects == [passed_on]
        assert own in machine.step(at_s, ev.DeadlinePassed())


def test_what_only_the_leader_decides_is_nothing_to_others() -> None:
    world = training("r1a", "r1b")
    for message in (messages.Suspect(R1B, "x"), messages.Pong(1), messages.Leave("x")):
        assert world.step("r1a", ev.Received(R1B, message)) == []
    assert world.step("r1a", ev.BlockCommits(blocked=True)) == []


def test_commits_can_be_held_at_the_leader() -> None:
    world = training("r1a", num_iterations=1)
    world.step("d0", ev.BlockCommits(blocked=True))
    world.settle()
    assert "d0 has the result of iteration 1" not in world.seen
    world.step("d0", ev.BlockCommits(blocked=False))
    world.settle()
    assert "d0 has the result of iteration 1" in world.seen


def test_links_are_measured_by_large_tensors_and_timed_exchanges() -> None:
    world = training("r1a")
    machine = world.hosts[R1A].machine
    links = machine.context.links
    for size_bytes, duration_s, rate in ((1 << 15, 1.0, 12.5e6), (1 << 20, 0.0, 12.5e6)):
        machine.context.tensors.add(ev.Tensor(TensorId(900), size_bytes))
        machine.step(0.0, ev.TensorSent(R1B, TensorId(900), size_bytes, duration_s))
        assert links.link(R1B).bandwidth_bytes_per_s == rate
    machine.context.tensors.add(ev.Tensor(TensorId(900), 1 << 20))
    machine.step(0.0, ev.TensorSent(R1B, TensorId(900), 1 << 20, 0.5))
    assert links.link(R1B).bandwidth_bytes_per_s == 1 << 21
    assert machine.step(0.0, ev.LinkMeasured(D0, latency_s=0.2)) == []
    assert links.link(D0).latency_s == 0.2


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


def test_the_leader_takes_doubts_and_questions_of_members() -> None:
    world = training("r1a", "r1b")
    doubt = messages.Suspect(R1B, "no heartbeat")
    assert sent(world.step("d0", ev.Received(R1A, doubt))) == [(R1B, messages.Ping(1))]
    ask = messages.CatchUp(Iteration(1, 0))
    ((_, last),) = sent(world.step("d0", ev.Received(R1A, ask)))
    assert reopens(last)


def test_a_candidate_has_no_flows_to_talk_about() -> None:
    world = World()
    world.start("d0")
    world.start("r1a")
    assert world.step("r1a", ev.Received(D0, messages.FlowCost(0, D0, 0.0, 1, 1.0))) == []


def test_a_member_that_waits_for_its_state_tells_nobody_that_it_can_take() -> None:
    world = training("r1a", num_iterations=9)
    enters_with_nothing(world)
    world.turn_until(lambda: world.hosts[R1B].machine.in_view)
    iteration = world.hosts[R1B].machine.context.iteration
    assert world.step("r1b", ev.Received(D0, messages.CanTake(iteration))) == []


def test_an_early_message_about_initial_state_is_not_for_members() -> None:
    world = training("r1a")
    assert world.step("r1a", ev.Received(D0, messages.Assign(1, -1))) == []


def test_a_computed_pass_without_its_tensor_is_a_bug_of_the_device() -> None:
    world = training("r1a")
    world.settle(["ForwardActivation", "to=r1a"])
    world.deliver(world.flight.popleft())
    (start,) = world.hosts[R1A].queue
    empty = ev.JobFinished(start.job_id, Nothing(), (), 1.0)
    with pytest.raises(AssertionError, match="ended with"):
        world.hosts[R1A].machine.step(0.0, empty)


def test_an_abort_frees_the_parts_that_were_gathered() -> None:
    world = training("r1a", "r1b")
    world.hosts[R1A].tensors[TensorId(900)] = None
    part = messages.ReducePart(AveragingId(Iteration(1, 1), 1), 0, 1, 5)
    assert world.step("r1a", ev.Received(R1B, part, tensor(900))) == []
    effects = world.step("r1a", ev.Received(D0, abort(world, Iteration(1, 2))))
    assert FreeTensor(TensorId(900)) in effects


def test_a_job_of_an_abandoned_iteration_may_fail_without_a_word() -> None:
    world = training("r1a")
    world.deliver(world.flight.popleft())
    world.step("r1a", ev.Received(D0, abort(world, Iteration(1, 2))))
    assert notes_of(world.work("r1a", refuse="interrupted")) == []
    assert world.hosts[R1A].stop is None
