"""A leader takes over from another, and messages of other terms than a node's change nothing."""

import dataclasses

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import messages as m
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import Assign, Prepared
from decod.protocol.core.messages import decision_messages as em
from decod.protocol.core.messages.scopes import Passed
from decod.protocol.core.view import Opening, View
from decod.protocol.leadership.election import Succession
from decod.protocol.leadership.leader import Leader
from decod.protocol.leadership.leadership import Fate
from tests.unit.protocol.cast import (
    D0,
    D1,
    FACTS,
    R1A,
    R1B,
    STRANGER,
    commits,
    configured,
    member,
    notes_of,
    reopens,
    repeated,
    sent,
    suspect,
)
from tests.unit.protocol.leading import CONFIG, Run, decision, opening_view
from tests.unit.protocol.world import World


def successor(run: Run, *, hashes: tuple[tuple[int, str], ...] = ()) -> tuple[Leader, list[Effect]]:
    """Let d1 take over from d0, in the iteration that is open."""
    old = run.leader
    leader = Leader(D1, old.run, FACTS, lambda: 0)
    begun = old._batch.begun
    last = repeated(old.iteration, Opening(old.iteration, old.committed, old.view), "of a test")
    won = Succession(2, D0, last, old.view, hashes)
    return leader, leader.take_over(5.0, won, begun)


def test_an_elected_leader_that_finishes_the_iteration_says_who_was_lost_all_the_same() -> None:
    run = Run(R1A, R1B)
    run.aggregate()
    _, effects = successor(run, hashes=((0, "a"), (1, "b")))
    assert notes_of(effects)[:3] == ["member.lost", "iteration.kept", "iteration.committed"]


def test_an_elected_leader_repeats_the_iteration_without_the_old_one() -> None:
    run = Run(R1A, R1B)
    _, effects = successor(run)
    message = decision(effects, D1)
    assert reopens(message)
    view = message.opening.view
    assert (view.leader, view.term, view.version) == (D1, 2, 2)
    assert D0 not in view
    assert message.opening.iteration == Iteration(1, 2)
    assert message.opening.electors == (D0, D1, R1A, R1B), "the last committed view counts on"
    assert decision(effects, D0) == message, "the old one is told, should it live"


def test_an_elected_leader_commits_what_all_have_voted_for() -> None:
    run = Run(R1A, R1B)
    run.aggregate()
    leader, effects = successor(run, hashes=((0, "a"), (1, "b")))
    message = decision(effects, D1)
    assert commits(message)
    assert (message.closed, message.loss, message.num_tokens) == (Iteration(1, 1), 2.5, 40)
    assert message.opening.iteration == Iteration(2, 1)
    assert D0 not in message.opening.view
    assert leader.committed == Iteration(1, 1)


def test_a_leader_that_has_lost_most_members_waits_for_them() -> None:
    run = Run(R1A, R1B)
    leader = run.leader
    for node in (D1, R1A):
        suspect(leader, 1.0, node, "silent")
    leader.overdue(1.0 + CONFIG.probe_timeout_s)
    assert leader.view.by_id.keys() == {D0, R1B}, "half of them, with the leader, is enough"
    suspect(leader, 5.0, R1B, "silent")
    effects = leader.overdue(5.0 + CONFIG.probe_timeout_s)
    assert notes_of(effects) == ["member.lost", "quorum.lost"]
    assert leader.quorum.lacking == (R1B,)
    assert leader.view.by_id.keys() == {D0, R1B}
    assert notes_of(run.enter(R1B))[-1:] == ["iteration.aborted"], "back, in a new life"
    assert leader.quorum.lacking == ()


def without_quorum(run: Run) -> float:
    """Have the leader of a run of four lose two members, and then the one without whom no quorum is
    left. Returns an instant after that."""
    for node in (D1, R1A):
        suspect(run.leader, 1.0, node, "silent")
    run.leader.overdue(1.0 + CONFIG.probe_timeout_s)
    suspect(run.leader, 5.0, R1B, "silent")
    run.leader.overdue(5.0 + CONFIG.probe_timeout_s)
    assert run.leader.quorum.lacking == (R1B,)
    return 6.0 + CONFIG.probe_timeout_s


def stands_prepared(run: Run, now_s: float) -> list[Effect]:
    """Have a member whose earlier life is in the view say that it has prepared its stage again."""
    return run.leader.prepared(now_s, R1B, Prepared(1, "h1", run.leader.iteration))


def test_iterations_that_fail_while_a_quorum_lacks_take_nobody_for_back_who_is_not() -> None:
    """A member has started again, and the iteration is repeated in a view with its earlier life."""
    run = Run(R1A, R1B)
    leader, now_s = run.leader, without_quorum(run)
    back = run.offer(R1B)
    assert "candidate.joined" in notes_of(leader.join(now_s, R1B, back))
    for _ in range(10):
        now_s += 10 * CONFIG.iteration_timeout_s
        leader.received(now_s, R1B, back)
        assert opening_view(leader.overdue(now_s)) == {D0, R1B}
        assert leader.quorum.lacking == (R1B,), "what is in the view is its earlier life"
    assert sent(leader.join(now_s, R1B, back)) == [(R1B, Assign(1, -1))], "a candidate, as before"
    assert opening_view(stands_prepared(run, now_s)) == {D0, R1B}
    assert leader.quorum.lacking == ()
    assert R1B not in leader.admission.candidates


def test_who_was_given_up_and_answers_is_waited_for_no_more() -> None:
    """It was cut off and is back as it was: with it a quorum is there, and the others may wait."""
    run = Run(R1A, R1B)
    leader, now_s = run.leader, 1.0 + CONFIG.probe_timeout_s
    for node in (D1, R1A, R1B):
        suspect(leader, 1.0, node, "cut")
    leader.overdue(now_s)
    assert {*leader.quorum.lacking} == {D1, R1A, R1B}
    leader.join(now_s, R1A, run.offer(R1A))
    assert leader.received(now_s, R1A, m.Pong(0)) == [], "a later life has to prepare first"
    now_s += CONFIG.utilisation_interval_s
    asked = {to: said for to, said in sent(leader.overdue(now_s)) if isinstance(said, m.Ping)}
    assert asked.keys() == {D1, R1B}, "from time to time"
    effects = leader.received(now_s, R1B, m.Pong(asked[R1B].nonce))
    assert opening_view(effects) == {D0, R1B}
    assert leader.quorum.lacking == ()


def test_who_is_lost_again_before_it_has_prepared_is_taken_in_by_the_same_offer() -> None:
    """It had only stalled; the view goes on to hold its earlier life, which never offered that."""
    run = Run(R1A, R1B)
    leader, now_s = run.leader, without_quorum(run)
    back = run.offer(R1B)
    leader.join(now_s, R1B, back)
    suspect(leader, now_s, R1B, "silent")
    leader.overdue(now_s + CONFIG.probe_timeout_s)
    assert R1B not in leader.admission.candidates
    now_s += 10.0
    assert "candidate.joined" in notes_of(leader.join(now_s, R1B, back))
    assert opening_view(stands_prepared(run, now_s)) == {D0, R1B}


def test_an_offer_of_an_earlier_life_that_comes_late_changes_nothing() -> None:
    run = Run(R1A, R1B)
    leader, now_s = run.leader, without_quorum(run)
    late = run.offer(R1B)
    leader.join(now_s, R1B, late)
    leader.join(now_s, R1B, run.offer(R1B))
    stands_prepared(run, now_s)
    assert leader.join(now_s, R1B, late) == []
    assert R1B in leader.view


# --- terms ----------------------------------------------------------------------------------------


def trained() -> World:
    """Return a world of two data nodes and a relay in its first iteration."""
    world = World(config=configured(min_data_nodes=2), num_iterations=0)
    for name in ("d0", "d1", "r1a"):
        world.start(name, stage_index=1 if name == "r1a" else None)
    hosts = world.hosts.values()
    world.turn_until(lambda: all(host.machine.in_view for host in hosts))
    return world


def next_opening(view: View, iteration: Iteration, *, leader: NodeId, without: NodeId) -> m.Open:
    """Return the decision that a leader of term 2 opens its first iteration with."""
    members = [member for member in view.members if member.node_id != without]
    next_view = View.of(
        members, version=view.version + 1, leader=leader, term=2, num_stages=view.num_stages
    )
    committed = Iteration(iteration.number - 1, 1)
    opening = Opening(Iteration(iteration.number, iteration.attempt + 1), committed, next_view)
    return repeated(iteration, opening, "lost the leader")


def test_a_message_of_a_lower_term_changes_nothing_and_its_sender_is_told() -> None:
    world = trained()
    machine = world.hosts[R1A].machine
    view, iteration = machine.context.view, machine.context.iteration
    opening = next_opening(view, iteration, leader=D1, without=D0)
    machine.step(world.now_s, ev.Received(D1, opening, term=2))
    assert machine.context.view.term == 2
    before = machine.context.iteration
    begin = m.BeginAggregation(AveragingId(before, machine.context.view.version), 1, 1)
    effects = machine.step(world.now_s, ev.Received(D0, begin, term=1))
    assert sent(effects) == [(D0, em.LeaderIs(2, D1, "d1:1"))]
    assert machine.strategy.begun is None
    old = repeated(iteration, dataclasses.replace(opening.opening, view=view), "old")
    assert sent(machine.step(world.now_s, ev.Received(D0, old, term=1))) == []
    assert (machine.context.iteration, machine.context.view.leader) == (before, D1)


def test_a_message_of_a_higher_term_waits_for_the_opening_that_it_asks_for() -> None:
    world = trained()
    machine = world.hosts[R1A].machine
    view, iteration = machine.context.view, machine.context.iteration
    opening = next_opening(view, iteration, leader=D1, without=D0)
    query = m.UtilisationQuery(1, opening.opening.iteration)
    effects = machine.step(world.now_s, ev.Received(D1, query, term=2))
    assert sent(effects) == [(D1, m.CatchUp(iteration, view.hash))]
    effects = machine.step(world.now_s, ev.Received(D1, opening, term=2))
    assert any(isinstance(message, m.UtilisationAnswer) for _, message in sent(effects))


def test_a_message_of_a_higher_term_waits_though_its_sender_is_no_member_yet() -> None:
    """The other term's iterations and views may have the numbers of this one's: they come next."""
    world = trained()
    machine = world.hosts[R1A].machine
    view, iteration = machine.context.view, machine.context.iteration
    members = [*(member for member in view.members if member.node_id != D0), member("r1x")]
    view = View.of(members, version=1, leader=D1, term=2, num_stages=view.num_stages)
    committed = Iteration(iteration.number - 1, 1)
    opening = repeated(Iteration(1, 1), Opening(iteration, committed, view), "lost the leader")
    query = m.UtilisationQuery(1, iteration)
    assert machine.step(world.now_s, ev.Received(NodeId("r1x"), query, term=2)) == []
    effects = machine.step(world.now_s, ev.Received(D1, opening, term=2))
    assert query in [message for _, message in sent(effects)], "it passes it on down the tree"


def test_what_became_of_a_message_is_heard_from_somebody_in_an_earlier_term() -> None:
    world = trained()
    machine = world.hosts[R1A].machine
    view, iteration = machine.context.view, machine.context.iteration
    opening = next_opening(view, iteration, leader=D1, without=D0)
    machine.step(world.now_s, ev.Received(D1, opening, term=2))
    passed = ev.Received(D1, Passed(1, arrived=False), term=1)
    assert machine.leadership.screen(world.now_s, passed) == (Fate.TAKE, [])


def test_an_old_leader_hears_of_the_new_one_and_stops() -> None:
    world = trained()
    machine = world.hosts[D0].machine
    view, iteration = machine.context.view, machine.context.iteration
    effects = machine.step(world.now_s, ev.Received(R1A, em.LeaderIs(2, D1, "d1:1"), term=2))
    assert sent(effects) == [(D1, m.CatchUp(iteration, view.hash))]
    assert machine.leader is None, "it decides nothing any more"
    opening = next_opening(view, iteration, leader=D1, without=D0)
    (stop,) = machine.step(world.now_s, ev.Received(D1, opening, term=2))
    assert stop == fx.Stop(fx.StopReason.SUPERSEDED, "d1 leads the run in term 2")


def test_a_stranger_can_not_make_a_leader_step_down() -> None:
    world = trained()
    machine = world.hosts[D0].machine
    for message in (em.LeaderIs(9, STRANGER, "x:1"), em.Vote(9, False, 1, Iteration(1, 1), 1)):
        machine.step(world.now_s, ev.Received(STRANGER, message, term=9))
    assert machine.leader is not None


def test_a_leader_without_a_quorum_believes_that_another_was_found() -> None:
    """The others may not know any more where it is, and so can't tell it."""
    world = trained()
    machine = world.hosts[D0].machine
    assert machine.leader is not None
    assert machine.step(world.now_s, ev.LeaderFound(D1, 2)) == [], "it has its members"
    machine.leader.quorum.lacking = (D1, R1A)
    assert machine.step(world.now_s, ev.LeaderFound(D1, 1)) == []
    (stop,) = machine.step(world.now_s, ev.LeaderFound(D1, 2))
    assert stop == fx.Stop(fx.StopReason.SUPERSEDED, "d1 leads the run in term 2")


def test_a_leader_steps_down_for_a_member_that_has_voted_and_stands_again() -> None:
    """The election that the member has voted in came to nothing: nobody else will lead."""
    world = trained()
    machine = world.hosts[D0].machine
    view = machine.context.view
    machine.step(world.now_s, ev.Received(R1A, em.LeaderIs(4, None)))
    assert machine.leader is None
    effects = machine.step(world.now_s + 1.5, ev.DeadlinePassed())
    assert [to for to, message in sent(effects) if isinstance(message, em.Canvass)] == [D1, R1A]
    canvass = em.CanvassAnswer(1, machine.context.iteration, view.version, silent=True)
    (persist,) = machine.step(world.now_s + 1.6, ev.Received(R1A, canvass, term=1))
    assert persist == fx.PersistVote(5, D0)


def test_who_has_voted_casts_no_vote_for_the_old_leaders_iteration() -> None:
    world = trained()
    machine = world.hosts[R1A].machine
    ready = fx.Send(D0, m.Ready(AveragingId(machine.context.iteration, 1), ((1, "a"),)))
    assert not machine.leadership.fence(ready)
    machine.step(
        world.now_s, ev.Received(D1, em.Candidacy(2, 1, machine.context.iteration, 1), term=1)
    )
    assert machine.leadership.fence(ready)
