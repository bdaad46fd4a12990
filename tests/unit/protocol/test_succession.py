"""A leader takes over from another, and messages of other terms than a node's change nothing."""

from decod.ids import Iteration
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import decision_messages as em
from decod.protocol.core.messages.membership_messages import Prepared
from tests.unit.protocol.cast import D0, D1, R1A, R1B, STRANGER, configured, suspect
from tests.unit.protocol.leading import CONFIG, Run
from tests.unit.protocol.world import World


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
