"""The fullest stage gets the largest candidate (GWTF, section V-B)."""

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.planner.assignment import Applicant, StageLoad, assign_stages

BIG, SMALL = Applicant(NodeId("big"), 4), Applicant(NodeId("small"), 1)


def test_a_joiner_goes_to_the_most_utilised_stage() -> None:
    """GWTF, figure 3: two flows through stages that could carry 2, 3 and 4; the first is full."""
    loads = [StageLoad(1, 2, 2), StageLoad(2, 2, 3), StageLoad(3, 2, 4)]
    assert assign_stages([Applicant(NodeId("joiner"), 1)], loads) == {"joiner": 1}


def test_the_largest_candidate_relieves_the_fullest_stage() -> None:
    loads = [StageLoad(1, 1, 4), StageLoad(2, 4, 4)]
    assert assign_stages([SMALL, BIG], loads) == {"big": 2, "small": 2}
    # 4 / 5 after the big one would have been 1 / 4 the other way round: ranked anew each time.
    loads = [StageLoad(1, 3, 4), StageLoad(2, 4, 4)]
    assert assign_stages([SMALL, BIG], loads) == {"big": 2, "small": 1}


def test_a_stage_that_lacks_nodes_comes_before_a_full_one() -> None:
    loads = [StageLoad(1, 8, 8), StageLoad(2, 0, 2, num_missing=1)]
    assert assign_stages([BIG, SMALL], loads) == {"big": 2, "small": 1}


def test_a_stage_without_capacity_comes_before_a_full_one() -> None:
    loads = [StageLoad(1, 8, 8), StageLoad(2, 0, 0)]
    assert assign_stages([BIG], loads) == {"big": 2}


def test_of_equally_utilised_stages_the_smaller_comes_first_then_the_lower_index() -> None:
    loads = [StageLoad(1, 4, 8), StageLoad(2, 1, 2), StageLoad(3, 1, 2)]
    assert assign_stages([SMALL], loads) == {"small": 2}


def test_candidates_of_equal_capacity_go_in_order_of_their_ids() -> None:
    twins = [Applicant(NodeId("b"), 2), Applicant(NodeId("a"), 2)]
    loads = [StageLoad(1, 0, 8), StageLoad(2, 8, 8)]
    assert list(assign_stages(twins, loads)) == ["a", "b"]


def test_nobody_waits_nobody_is_placed() -> None:
    assert assign_stages([], [StageLoad(1, 0, 0)]) == {}


@given(
    capacities=st.lists(st.integers(1, 9), max_size=12),
    stages=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=5
    ),
)
def test_everybody_gets_a_stage_and_what_is_missing_is_filled_first(
    capacities: list[int], stages: list[tuple[int, int, int]]
) -> None:
    candidates = [Applicant(NodeId(f"n{k:02}"), c) for k, c in enumerate(capacities)]
    loads = [StageLoad(k, *stage) for k, stage in enumerate(stages, start=1)]
    placed = assign_stages(candidates, loads)
    assert sorted(placed) == sorted(c.node_id for c in candidates)
    missing = sum(load.num_missing for load in loads)
    got = [min(load.num_missing, list(placed.values()).count(load.stage_index)) for load in loads]
    assert sum(got) == min(missing, len(candidates))
    assert assign_stages(list(reversed(candidates)), list(reversed(loads))) == placed
