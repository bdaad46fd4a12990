"""Which server deals with which microbatch: the same on every node, and little moves."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.protocol.core.view import View
from decod.protocol.strategy.servers.placement import Placement, servers_of
from tests.unit.protocol.cast import D0, mb, member, view_of

FRONTAL = tuple(f"f1{letter}" for letter in "abcde")
BACKWARD = tuple(f"b1{letter}" for letter in "abcde")


def placed(view: View, *, num: int = 6, num_shares: int = 1) -> Placement:
    return Placement(view, num_microbatches=num, num_shares=num_shares)


def frontal(opening: View, view: View, num: int) -> list[NodeId | None]:
    """Return the frontal servers of stage 1 in a view, by microbatch."""
    placement = placed(opening, num=num)
    return [placement.frontal(view, 1, mb(index)) for index in range(num)]


@st.composite
def stages(draw: st.DrawFn) -> tuple[View, View, int]:
    """Stage 1 with servers, the same after losses, and a number of microbatches."""
    kinds = FRONTAL[: draw(st.integers(0, 5))], BACKWARD[: draw(st.integers(0, 5))]
    names = [name for kind in kinds for name in kind] or ["r1a", "r1b"]
    kept = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    num = draw(st.integers(1, 40))
    return view_of("d0", *names), view_of("d0", *kept, version=2, num_stages=2), num


@given(stages())
def test_servers_of_a_kind_get_equal_runs_of_microbatches(case: tuple[View, View, int]) -> None:
    opening, _, num = case
    found = frontal(opening, opening, num)
    runs = [node for index, node in enumerate(found) if not index or found[index - 1] != node]
    counts = Counter(found)
    assert len(runs) == len(counts), "each has one run"
    assert max(counts.values()) - min(counts.values()) <= 1


@given(stages())
def test_after_losses_only_what_the_lost_ones_had_moves(case: tuple[View, View, int]) -> None:
    opening, view, num = case
    before, after = frontal(opening, opening, num), frontal(opening, view, num)
    for first, second in zip(before, after, strict=True):
        assert second in view
        if first in view:
            assert second == first


@given(stages())
def test_a_server_of_the_other_kind_helps_only_if_none_of_its_own_is_left(
    case: tuple[View, View, int],
) -> None:
    opening, view, num = case
    kind = {*servers_of(opening.roster(1), member("f1a").duty)}
    if kind & {m.node_id for m in view.roster(1)}:
        assert {*frontal(opening, view, num)} <= kind


@given(stages())
def test_what_a_lost_server_had_is_dealt_out_evenly(case: tuple[View, View, int]) -> None:
    opening, _, num = case
    (lost, *rest) = opening.roster(1)
    view = view_of("d0", *rest, version=2, num_stages=2)
    before, after = frontal(opening, opening, num), frontal(opening, view, num)
    moved = Counter(b for a, b in zip(before, after, strict=True) if a == lost.node_id)
    assert not moved or max(moved.values()) - min(moved.values()) <= 1


@given(stages(), st.randoms(use_true_random=False))
def test_it_matters_who_is_left_and_not_how_the_view_came_about(
    case: tuple[View, View, int], rng: Random
) -> None:
    opening, view, num = case
    members = [*view.members]
    rng.shuffle(members)
    same = View.of(members, version=9, leader=D0, term=3, num_stages=2)
    assert frontal(opening, same, num) == frontal(opening, view, num)


def test_a_stage_without_servers_has_nobody() -> None:
    view = view_of("d0", "c1a", num_stages=2)
    assert placed(view).frontal(view, 1, mb(0)) is None
    opening, left = view_of("d0", "f1a"), view_of("d0", num_stages=2)
    assert placed(opening).frontal(left, 1, mb(0)) is None
