"""Elections: one leader a term (I4), one content of an iteration, and always a leader again."""

import dataclasses
import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.core import effects as fx
from decod.protocol.core import messages as m
from decod.protocol.core.context import NO_PROMISE, Promise
from decod.protocol.core.messages import decision_messages as em
from decod.protocol.core.view import Opening
from decod.protocol.leadership.election import Election
from tests.support.mutations import CONFIRM, mutated
from tests.support.quick import first_of
from tests.unit.protocol.cast import D0, D1, R1A, Heard, context_of, repeated, view_of
from tests.unit.protocol.electing import Electing, Faults, Node

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "300"))

NAMES = ("d0", "d1", "d2", "r1a", "r1b", "r2a", "r2b")


def hurt(world: Electing, rng: Random) -> None:
    """Do something bad, or mend something."""
    names = sorted(world.nodes)
    match rng.randrange(8):
        case 0:
            world.kill(rng.choice(names))
        case 1:
            acting = world.acting
            if acting is not None:
                world.kill(acting)
        case 2:
            dead = [n for n in names if not world.nodes[n].alive]
            if dead:
                world.restart(rng.choice(dead))
        case 3:
            world.restart(rng.choice(names))
        case 4 | 5:
            world.faults.sides = {NodeId(n): rng.randrange(2) for n in names}
        case _:
            world.faults.sides = {}


@pytest.mark.parametrize("block", first_of(range(10), 4))
def test_no_term_has_two_leaders_and_no_iteration_two_contents(block: int) -> None:
    """Messages are lost, late, twice; nodes crash, restart, are cut off; then all is mended.

    The checks are in `Electing`: they fail at the moment in which it happens.
    """
    num_terms = num_iterations = 0
    for seed in range(block, NUM_SEEDS, 10):
        rng = Random(seed)
        names = NAMES[: rng.choice((3, 5, 7))] if rng.random() < 0.3 else NAMES
        names = tuple(n for n in names if n != "d2" or rng.random() < 0.6)
        if not any(n.startswith("r1") for n in names):
            names += ("r1a",)
        world = Electing(*names, seed=seed)
        world.faults = Faults(
            loss=rng.choice((0.0, 0.05, 0.2)), duplicate=0.1, delay_s=rng.choice((0.05, 0.3, 1.0))
        )
        for _ in range(rng.randint(5, 20)):
            world.run(rng.uniform(0.2, 6.0))
            hurt(world, rng)
        num_terms += len(world.leaders)
        num_iterations += world.iteration
    assert num_terms > NUM_SEEDS / 10, "elections take place"
    assert num_iterations > 3 * NUM_SEEDS / 10


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("names", [("d0", "d1", "r1a"), NAMES])
def test_a_dead_leader_is_replaced_within_five_seconds(seed: int, names: tuple[str, ...]) -> None:
    world = Electing(*names, seed=seed)
    world.run(3.0 + seed / 7)
    before = world.iteration
    world.kill(D0)
    world.run(5.0)
    assert world.acting is not None
    assert len(world.leaders) == 2, world.leaders
    world.run(20.0)
    assert world.iteration > before


@pytest.mark.parametrize("seed", range(12))
def test_when_all_is_mended_iterations_are_committed_again(seed: int) -> None:
    """I7: as long as a quorum has kept what it knows."""
    rng = Random(seed)
    world = Electing(*NAMES, seed=seed)
    world.faults = Faults(loss=0.2, duplicate=0.1, delay_s=0.5)
    for _ in range(6):
        world.run(rng.uniform(0.5, 5.0))
        world.faults.sides = {NodeId(n): rng.randrange(2) for n in NAMES}
    world.faults = Faults()
    before = world.iteration
    world.run(60.0)
    assert world.iteration > before + 1, world.told()


@pytest.mark.parametrize("seed", range(10))
def test_a_leader_that_lives_is_not_replaced_for_one_broken_link(seed: int) -> None:
    world = Electing("d0", "d1", "r1a", "r1b", seed=seed)

    def cut(sender: NodeId, to: NodeId) -> bool:
        return {sender, to} == {D0, D1}

    send = world._send
    world._send = lambda s, t, message: None if cut(s, t) else send(s, t, message)  # type: ignore[method-assign]
    world.run(30.0)
    assert world.leaders == {1: D0}


@pytest.mark.parametrize("seed", range(10))
def test_the_smaller_part_of_a_run_commits_nothing(seed: int) -> None:
    world = Electing("d0", "d1", "r1a", "r1b", "r2a", seed=seed)
    world.run(2.0)
    # The old leader keeps one relay; the others are more.
    world.faults.sides = {D0: 1, R1A: 1}
    world.run(30.0)
    assert len(world.leaders) == 2
    old, new = world.nodes[D0], world.nodes[D1]
    assert old.context.view.term == 1
    assert old.context.iteration < new.context.iteration
    world.faults.sides = {}
    world.run(10.0)
    assert old.lead is None or not old.alive


# --- what a candidate commits ---------------------------------------------------------------------


def ready_world(*names: str) -> Electing:
    """Return a world in which all have cast their votes for an iteration, and nobody hears
    another.
    """
    world = Electing(*names, seed=1)
    for index, node in enumerate(world.nodes.values()):
        node.ready = True
        world.faults.sides[node.context.node_id] = index
    return world


def hear_each_other(world: Electing, *names: str) -> None:
    world.faults.sides |= dict.fromkeys(map(NodeId, names), 99)


def aborted(world: Electing) -> m.Open:
    """Return what the first leader says if it repeats the iteration in the same view."""
    view = dataclasses.replace(world.nodes[D0].context.view, version=2)
    return repeated(Iteration(1, 1), Opening(Iteration(1, 2), Iteration(0, 0), view), "it failed")


def voter_hears_of_an_abort() -> None:
    """Else two leaders go on from different pasts: its next vote is for another iteration."""
    world = ready_world("d0", "d1", "d2", "r1a", "r1b")
    hear_each_other(world, "d1", "r1a", "r1b")
    world.run_until(lambda: world.disks.get(R1A) == Promise(2, D1))
    for node in (D0, NodeId("d2"), R1A):
        world._open(node, aborted(world))
    # Its vote, that the iteration is ready, is on its way; then the two can't hear each other.
    world.run(0.1)
    world.faults.sides = {D1: 1, NodeId("r1b"): 1}
    world.run(20.0)
    assert len(world.leaders) > 1
    world.faults.sides = {}
    world.run(30.0)
    assert world.iteration > 1


def next_candidate_has_another_quorum() -> None:
    """Though the first is lost before it has told anybody, and the next has a voter that lags."""
    world = ready_world("d0", "d1", "d2", "r1a", "r1b")
    late = NodeId("r1b")
    world.nodes[late].ready = False
    world.never_ready.add(late)
    announce = world._announce

    def alone(node: Node, *args: Any, **how: Any) -> None:
        if node.context.node_id == D1:
            world.faults.sides[D1] = 0
        announce(node, *args, **how)

    world._announce = alone  # type: ignore[method-assign]
    hear_each_other(world, "d1", "d2", "r1a")
    world.run_until(lambda: 1 in world.committed)
    assert world.leaders == {1: D0, 2: D1}
    world.kill(D1)
    hear_each_other(world, "d2", "r1a", "r1b")
    world.run_until(lambda: len(world.leaders) > 2)
    assert world.nodes[NodeId("d2")].steps == {1: (1, Iteration(1, 1))}, "not the same step"


FORKS = (voter_hears_of_an_abort, next_candidate_has_another_quorum)


@pytest.mark.parametrize("scenario", FORKS)
def test_an_iteration_is_committed_once_whoever_is_lost(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize("scenario", FORKS)
def test_it_would_be_committed_twice_if_nobody_confirmed_it(scenario: Callable[[], None]) -> None:
    with mutated(CONFIRM), pytest.raises(AssertionError, match=r"Content|same"):
        scenario()


# --- one vote a term ------------------------------------------------------------------------------


def voter(*, promise: Promise = NO_PROMISE) -> Heard:
    """Return the election of a relay in iteration 1.1 of term 1."""
    view = view_of(D0, D1, "d2", R1A)
    context = context_of(R1A, view)
    election = Heard(Election(context, Random(0), promise, lambda: ()))
    election.adopt(
        0.0, repeated(Iteration(1, 0), Opening(Iteration(1, 1), Iteration(0, 0), view), "")
    )
    return election


def test_a_vote_is_sent_when_it_is_on_disk_and_not_before() -> None:
    election = voter()
    assert election.stood(1.0, D1, em.Candidacy(2, 1, Iteration(1, 1), 1)) == [
        fx.PersistVote(2, D1)
    ]
    assert election.stood(1.0, D1, em.Candidacy(2, 1, Iteration(1, 1), 1)) == [], (
        "still being written"
    )
    (vote,) = election.persisted(1.1, Promise(2, D1))
    assert vote == fx.Send(D1, em.Vote(2, True, 1, Iteration(1, 1), 1))
    assert election.stood(1.2, D1, em.Candidacy(2, 1, Iteration(1, 1), 1)) == [vote], "a repeat"
    assert election.voter.bound


@pytest.mark.parametrize("restarted", [False, True])
def test_a_second_candidate_of_the_term_is_refused_even_after_a_restart(restarted: bool) -> None:
    election = voter(promise=Promise(2, D1) if restarted else NO_PROMISE)
    if not restarted:
        election.stood(1.0, D1, em.Candidacy(2, 1, Iteration(1, 1), 1))
        election.persisted(1.1, Promise(2, D1))
    (answer,) = election.stood(1.2, NodeId("d2"), em.Candidacy(2, 1, Iteration(1, 1), 1))
    assert isinstance(answer, fx.Send)
    assert isinstance(answer.message, em.Vote)
    assert not answer.message.granted


def test_who_has_forgotten_a_term_votes_for_nobody_of_an_earlier_one() -> None:
    """It may have known of a commit there that the candidate does not know."""
    election = voter(promise=Promise(5, D1))
    (answer,) = election.stood(1.0, D1, em.Candidacy(6, 1, Iteration(1, 1), 1))
    assert isinstance(answer, fx.Send)
    assert answer.message == em.Vote(5, False, 1, Iteration(1, 1), 1)


def test_a_candidate_that_is_behind_gets_the_decision_and_no_vote() -> None:
    election = voter()
    decision, refusal = election.stood(1.0, D1, em.Candidacy(2, 1, Iteration(1, 0), 1))
    assert decision == fx.Send(D1, election.decisions.opened)  # type: ignore[arg-type]
    assert isinstance(refusal, fx.Send)
    assert isinstance(refusal.message, em.Vote)
    assert not refusal.message.granted


@pytest.mark.parametrize(("gap_s", "most_times"), [(0.5, 1.0), (1.5, 3.0), (30.0, 6.0)])
def test_a_leader_whose_signs_of_life_are_irregular_is_given_more_time(
    gap_s: float, most_times: float
) -> None:
    view = view_of(D0, D1, "d2", R1A)
    election = Election(context_of(D1, view), Random(0), NO_PROMISE, lambda: ())
    election.adopt(
        0.0, repeated(Iteration(1, 0), Opening(Iteration(1, 1), Iteration(0, 0), view), "")
    )
    usual_s = election.deadline_s
    assert usual_s is not None
    now_s = 0.0
    for number in range(40):
        now_s += gap_s if number % 4 == 0 else 0.5
        election.heard(now_s, D0)
    patience_s = (election.deadline_s or 0.0) - now_s
    assert 1.0 <= patience_s / usual_s <= most_times
    assert (patience_s > usual_s) == (gap_s > 0.5)


def test_who_leaves_has_no_vote() -> None:
    election = voter()
    election.abstain(0.5)
    assert election.stood(1.0, D1, em.Candidacy(2, 1, Iteration(1, 1), 1)) == []
    assert election.canvassed(1.0, D1, em.Canvass(1, Iteration(1, 1), 1)) == []


@pytest.mark.parametrize("kept", [False, True])
def test_who_leaves_while_it_stands_is_not_elected(kept: bool) -> None:
    """Its own vote was being written, or on disk, when its operator asked it to leave."""
    view = view_of(D0, D1, R1A)
    election = Heard(Election(context_of(D1, view), Random(0), NO_PROMISE, lambda: ()))
    election.adopt(
        0.0, repeated(Iteration(1, 0), Opening(Iteration(1, 1), Iteration(0, 0), view), "")
    )
    election.campaign.stand(1.0)
    assert election.persisted(1.0, Promise(2, D1)) if kept else True
    election.abstain(1.1)
    assert kept or election.persisted(1.2, Promise(2, D1)) == []
    late = em.Vote(2, True, 1, Iteration(1, 1), 1)
    assert election.campaign.voted(1.3, R1A, late) == []
    assert election.campaign.machine.take() is None


def test_who_follows_a_leader_does_not_forget_its_term() -> None:
    election = voter()
    view = dataclasses.replace(election._context.view, term=3, version=2)
    opening = Opening(Iteration(1, 2), Iteration(0, 0), view)
    assert election.adopt(1.0, repeated(Iteration(1, 1), opening, "")) == [fx.PersistVote(3, D0)]
