"""Lists of bans: who passes them on, who asks for them, and what they do to a run."""

import json

from decod.ids import Iteration, NodeId
from decod.protocol.core.bans import NO_BANS, BanList, disbelieve
from decod.protocol.core.context import Context
from decod.protocol.core.effects import ContestBans, Effect, Send, Stop, StopReason, UseBans
from decod.protocol.core.events import BansMade, Received
from decod.protocol.core.messages.decision_messages import Mend
from decod.protocol.core.messages.membership_messages import Bans, Heartbeat, Join
from decod.protocol.core.view import Role, View
from decod.protocol.links.ban_news import BanNews, word_of
from decod.sim.core import read_bans, without
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    MANIFEST,
    R1A,
    R1B,
    R1C,
    STRANGER,
    configured,
    context_of,
    notes_of,
    sent,
    view_of,
)
from tests.unit.protocol.world import World

VIEW = view_of("d0", "d1", "r1a", "r1b", "r1c", "r1d", "r1e")
"""With a fanout of 2: d0 tells r1a and d1, r1a tells r1b and r1c, r1b tells r1d and r1e."""


def bans(version: int, *banned: NodeId) -> BanList:
    content = [version, {node: f"{node} lies" for node in banned}]
    return BanList(version, {node: f"{node} lies" for node in banned}, json.dumps(content).encode())


def news(node: NodeId, view: View = VIEW, known: BanList = NO_BANS) -> tuple[BanNews, Context]:
    context = context_of(node, view, config=configured(tree_fanout=2))
    context.bans = known
    return BanNews(context, read_bans), context


def receivers(effects: list[Effect]) -> list[str]:
    return sorted(to for to, message in sent(effects) if isinstance(message, Bans))


def test_of_two_neighbours_one_has_the_list_from_the_other() -> None:
    made = bans(5, STRANGER)
    ahead, leading = news(R1A, known=made)
    behind, context = news(R1B, known=bans(4))
    behind.heard(0.0, R1A, Heartbeat(ITERATION, 5))
    assert context.out.taken() == [Send(R1A, Heartbeat(ITERATION, 4, VIEW.version))]
    ahead.heard(0.0, R1B, Heartbeat(ITERATION, 4))
    assert leading.out.taken() == [Send(R1B, word_of(made))]
    assert behind.received(Received(R1A, word_of(made))) == made
    assert context.out.taken() == []
    behind.adopt(made, R1A)
    assert context.bans == made
    context.out.taken()
    behind.heard(9.0, R1A, Heartbeat(ITERATION, 5))
    assert behind.received(Received(R1A, word_of(made))) is None, "it is no news any more"
    assert context.out.taken() == []


def test_a_list_that_proves_nothing_is_not_used() -> None:
    context = context_of(R1A, VIEW)
    doubting = BanNews(context, disbelieve)
    assert doubting.received(Received(R1B, Bans(5, b"x"))) is None
    assert notes_of(context.out.taken()) == ["bans.unproven"]
    believing, context = news(R1A)
    assert believing.received(Received(R1B, Bans(6, bans(5).statement))) is None
    unproven = notes_of(context.out.taken())
    assert unproven == ["bans.unproven"], "a version that is not the list's own"


# --- in a run ---------------------------------------------------------------------------------


def training(*relays: str) -> World:
    world = World(config=configured(min_nodes_per_stage=len(relays)), num_microbatches=2)
    for name in ("d0", *relays):
        host = world.start(name, stage_index=1 if name != "d0" else None)
        host.machine._delivery._bans._read = read_bans
    world.turn_until(lambda: world.hosts[D0].machine.context.iteration == Iteration(2, 1))
    return world


def test_the_leader_goes_on_without_a_banned_relay_in_the_same_iteration() -> None:
    world = training("r1a", "r1b")
    iteration = world.hosts[D0].machine.context.iteration
    effects = world.step("d0", BansMade(bans(5, R1A)))
    mends = [message for _, message in sent(effects) if isinstance(message, Mend)]
    assert mends
    assert mends[0].iteration == iteration
    kinds = [type(message) for to, message in sent(effects) if to == R1A]
    assert kinds == [Bans, Mend], "it hears first why"
    world.turn_until(lambda: "r1a stops: banned, r1a lies" in world.seen)
    world.turn_until(lambda: world.hosts[D0].machine.context.iteration > Iteration(2, 9))
    assert R1A not in world.hosts[R1B].machine.context.view


def test_a_banned_node_stops_with_the_reason_and_passes_the_list_on_before() -> None:
    machine = training("r1a", "r1b").hosts[R1A].machine
    effects = machine.step(9.0, Received(D0, word_of(bans(5, R1A))))
    assert effects[-1] == Stop(StopReason.BANNED, "r1a lies")
    assert UseBans(bans(5, R1A)) in effects


def test_an_earlier_list_changes_nothing() -> None:
    world = training("r1a", "r1b")
    world.step("d0", BansMade(bans(5)))
    world.turn_until(lambda: world.hosts[R1A].machine.context.bans.version == 5)
    assert world.step("d0", BansMade(bans(4, R1A))) == []
    assert world.step("r1a", Received(D0, word_of(bans(4, R1A)))) == []


def test_a_list_that_bans_the_leader_is_for_the_leader_to_replace() -> None:
    """Somebody made it who led before, or leads where others can't be reached."""
    world = training("r1a", "r1b")
    machine, made = world.hosts[R1A].machine, bans(5, D0, R1B)
    told = machine.step(world.now_s, Received(STRANGER, word_of(made)))
    assert told == [Send(D0, word_of(made))]
    assert machine.step(world.now_s + 4.9, Received(STRANGER, word_of(made))) == []
    assert machine.step(world.now_s + 5.0, Received(STRANGER, word_of(made))) == told
    assert machine.context.bans is NO_BANS
    leader = world.hosts[D0].machine
    assert leader.step(world.now_s, Received(R1A, word_of(made))) == [ContestBans(made)]
    assert leader.context.bans is NO_BANS
    effects = leader.step(world.now_s, BansMade(without(made, D0)))
    assert [*leader.context.bans.banned] == [R1B]
    assert R1A in receivers(effects)


def test_a_banned_candidate_is_forgotten_and_others_are_told() -> None:
    world = training("r1a", "r1b")
    leader = world.hosts[D0].machine.leader
    assert leader is not None
    for node in (STRANGER, R1C):
        join = Join(f"{node}:1", Role.RELAY, 1, 1, MANIFEST, incarnation=7)
        world.hosts[D0].machine.step(world.now_s, Received(node, join))
    effects = world.hosts[D0].machine.step(world.now_s, BansMade(bans(5, STRANGER)))
    assert [*leader.admission.candidates] == [R1C]
    assert {STRANGER, R1C} <= {*receivers(effects)}
