"""A decision crosses the wire as a change of the view, and is whole again on the other side."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import Iteration, NodeId
from decod.protocol.core import events as ev
from decod.protocol.core.known_views import KnownViews
from decod.protocol.core.messages import CatchUp, Mend, Message, Open
from decod.protocol.core.view import (
    Member,
    Opening,
    View,
    ViewChange,
    change_between,
    changed_electors,
    changed_view,
)
from tests.unit.protocol.cast import (
    D0,
    R1A,
    R1B,
    R1C,
    context_of,
    member,
    received,
    repeated,
    sent,
    view_of,
)
from tests.unit.protocol.small_run import training

NAMES = ("d0", "d1", "r1a", "r1b", "r1c", "r2a", "r2b")
BEFORE = view_of("d0", "r1a", "r1b")
AFTER = view_of("d0", "r1b", "r1c", version=2)


def decision(view: View, iteration: Iteration, electors: tuple[NodeId, ...] = ()) -> Open:
    return repeated(
        Iteration(1, 1), Opening(iteration, Iteration(0, 0), view, electors=electors), ""
    )


def knows(name: str, *views: View) -> KnownViews:
    """Return what a member knows that has acted on decisions with these views."""
    context = context_of(NodeId(name), views[0])
    known = KnownViews(context)
    for attempt, view in enumerate(views, 1):
        known.taken(decision(view, Iteration(1, attempt)))
        context.adopt(view)
        context.iteration = Iteration(1, attempt)
    return known


@st.composite
def views(draw: st.DrawFn) -> View:
    names = draw(st.lists(st.sampled_from(NAMES[1:]), unique=True))
    members: list[str | Member] = ["d0"]
    for name in names:
        capacity, since = draw(st.integers(1, 2)), draw(st.integers(0, 1))
        members.append(member(name, capacity=capacity, since_iteration=since))
    return view_of(*members, version=draw(st.integers(1, 3)), num_stages=3)


@given(views(), views(), st.lists(st.sampled_from(NAMES), unique=True))
def test_a_change_makes_one_view_of_any_other(base: View, view: View, electors: list[str]) -> None:
    chosen = tuple(NodeId(name) for name in electors)
    change = change_between(base, view, chosen)
    assert changed_view(base, view.outline, change) == view
    told = changed_electors(view, change.electors)
    assert (told[:1], set(told)) == (chosen[:1], set(chosen))


@given(views(), views())
def test_views_have_the_same_hash_if_and_only_if_they_are_equal(one: View, other: View) -> None:
    assert (one.hash == other.hash) == (one == other)


@given(views(), views(), views())
def test_a_change_of_another_view_gives_nothing(base: View, other: View, view: View) -> None:
    """Whatever a change is applied to: it makes the sender's view, or none."""
    change = change_between(base, view)
    assert changed_view(other, view.outline, change) in (view, None)


def test_a_result_that_is_no_view_is_refused() -> None:
    """Its sender has the same hash: it is wrong about more than the members."""
    flawed = View.of([member("r1a")], version=2, leader=D0, term=1, num_stages=3)
    change = ViewChange(BEFORE.hash, flawed.hash, gone=(D0, R1B))
    assert changed_view(BEFORE, flawed.outline, change) is None
    empty = View.of([], version=2, leader=D0, term=1, num_stages=3)
    change = ViewChange(BEFORE.hash, empty.hash, gone=(D0, R1A, R1B))
    assert changed_view(BEFORE, empty.outline, change) is None


def test_a_member_of_the_view_before_is_told_the_change() -> None:
    message = decision(AFTER, Iteration(1, 2), electors=(D0, R1B, R1A))
    told = knows("d0", BEFORE, AFTER).told(R1B, message)
    assert isinstance(told, Open)
    assert told.opening.view == AFTER.outline
    assert told.change is not None
    assert (told.change.gone, told.change.changed) == ((R1A,), (member("r1c"),))
    assert knows("r1b", BEFORE).whole(told) == message


def test_a_view_that_stays_as_it_is_costs_two_hashes() -> None:
    message = decision(BEFORE, Iteration(1, 2))
    told = knows("d0", BEFORE, BEFORE).told(R1B, message)
    assert isinstance(told, Open)
    assert told.change == ViewChange(BEFORE.hash, BEFORE.hash)
    known = knows("r1b", BEFORE)
    whole = known.whole(told)
    assert isinstance(whole, Open)
    assert whole.opening.view is BEFORE


def test_who_enters_or_enters_again_gets_the_whole_view() -> None:
    again = view_of("d0", member("r1b", since_iteration=3), "r1c", version=2)
    known, message = knows("d0", BEFORE, again), decision(again, Iteration(1, 2))
    assert known.told(R1C, message) is message
    assert known.told(R1B, message) is message


def test_a_mend_is_told_as_a_change_too() -> None:
    left = view_of("d0", "r1b", version=2)
    context = context_of(D0, BEFORE)
    known, mend = KnownViews(context), Mend(Iteration(1, 1), left, "lost r1a")
    known.taken(mend)
    told = known.told(R1B, mend)
    assert isinstance(told, Mend)
    assert told.change is not None
    assert told.change.gone == (R1A,)
    assert knows("r1b", BEFORE).whole(told) == mend
    assert known.told(R1B, told) is told, "what goes another way is as it was"


def test_who_has_missed_the_view_before_makes_nothing_of_a_change() -> None:
    newest = view_of("d0", "r1b", version=3)
    told = knows("d0", BEFORE, AFTER, newest).told(R1B, decision(newest, Iteration(1, 3)))
    assert knows("r1b", BEFORE).whole(told) is None
    assert isinstance(told, Open)
    assert told.change is not None
    forged = dataclasses.replace(told.change, base=BEFORE.hash)
    assert knows("r1b", BEFORE).whole(dataclasses.replace(told, change=forged)) is None


def test_who_wakes_to_many_messages_asks_once() -> None:
    """All that came while it slept is dropped, and one whole view makes up for it."""
    newest = view_of("d0", "r1b", version=3)
    told = knows("d0", BEFORE, AFTER, newest).told(R1B, decision(newest, Iteration(1, 3)))
    context = context_of(R1B, BEFORE)
    known = KnownViews(context)

    def asked(sender: NodeId) -> list[tuple[NodeId, Message]]:
        message, effects = known.take(received(sender, told))
        assert message is None
        return sent(effects)

    assert asked(D0) == [(D0, CatchUp(context.iteration))]
    assert asked(D0) == []
    assert asked(R1C) == [(R1C, CatchUp(context.iteration))], "another may know more"
    context.now_s += context.run.protocol.heartbeat_interval_s
    assert asked(R1C) == [(R1C, CatchUp(context.iteration))], "an answer may be lost"


def test_who_asks_is_told_the_change_of_the_view_that_it_names() -> None:
    newest = view_of("d0", "r1b", version=3)
    message = decision(newest, Iteration(1, 3))
    known = knows("d0", BEFORE, AFTER, newest)
    known.asked(R1B, CatchUp(Iteration(1, 1), BEFORE.hash))
    told = known.told(R1B, message)
    assert knows("r1b", BEFORE).whole(told) == message
    known.asked(R1B, CatchUp(Iteration(1, 1), "0" * 64))
    assert known.told(R1B, message) is message, "it names one that is not known here"
    known.asked(R1B, CatchUp(Iteration(1, 1)))
    assert known.told(R1B, message) is message, "it has found another hash"
    known.answered()
    assert known.told(R1B, message) != message


# --- a whole node -----------------------------------------------------------------------------


def test_a_member_that_lacks_a_view_asks_whoever_told_it_and_goes_on() -> None:
    world = training("r1a", "r1b")
    machine = world.hosts[R1B].machine
    before = machine.context.view
    missed = before.successor([m for m in before.members if m.node_id != R1A], leader=D0)
    newest = missed.successor([*missed.members, member("r1c")], leader=D0)
    message = decision(newest, Iteration(1, 3))
    told = knows("d0", missed, newest).told(R1B, decision(newest, Iteration(1, 2)))
    assert isinstance(told, Open)
    assert told.change is not None

    effects = world.step("r1b", ev.Received(D0, told))
    assert sent(effects) == [(D0, CatchUp(Iteration(1, 1)))]
    assert machine.context.view == before, "it acts on no view that it has not checked"

    world.step("r1b", ev.Received(D0, message))
    assert (machine.context.view, machine.context.iteration) == (newest, Iteration(1, 3))


def test_who_is_asked_answers_with_the_whole_view() -> None:
    world = training("r1a", "r1b")
    for name in ("d0", "r1a"):
        effects = world.step(name, ev.Received(R1B, CatchUp(Iteration(1, 0))))
        (answer,) = [m for to, m in sent(effects) if to == R1B and isinstance(m, Open)]
        assert answer.change is None
        assert R1B in answer.opening.view
