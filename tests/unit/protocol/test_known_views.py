"""A decision crosses the wire as a change of the view, and is whole again on the other side."""

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import Iteration, NodeId
from decod.protocol.core.known_views import KnownViews
from decod.protocol.core.messages.decision_messages import Open
from decod.protocol.core.messages.membership_messages import CatchUp
from decod.protocol.core.messages.scopes import Message
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
    reopen,
    repeated,
    sent,
    view_of,
)

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
        reopen(context, iteration=Iteration(1, attempt))
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


def test_who_wakes_to_many_messages_asks_once() -> None:
    """All that came while it slept is dropped, and one whole view makes up for it."""
    newest = view_of("d0", "r1b", version=3)
    told = knows("d0", BEFORE, AFTER, newest).told(R1B, decision(newest, Iteration(1, 3)))
    context = context_of(R1B, BEFORE)
    known = KnownViews(context)

    def asked(sender: NodeId) -> list[tuple[NodeId, Message]]:
        assert known.take(received(sender, told)) is None
        return sent(context.out.taken())

    assert asked(D0) == [(D0, CatchUp(context.iteration))]
    assert asked(D0) == []
    assert asked(R1C) == [(R1C, CatchUp(context.iteration))], "another may know more"
    context.now_s += context.run.protocol.heartbeat_interval_s
    assert asked(R1C) == [(R1C, CatchUp(context.iteration))], "an answer may be lost"
