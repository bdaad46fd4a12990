"""When members that live can't work together, and who goes."""

import pytest

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, noted
from decod.protocol.core.view import View
from decod.protocol.leadership.suspicions import Conflicts, Doubt, IterationProgress
from tests.unit.protocol.cast import CONFIG, D0, R1A, R1B, R1C, R2A, R2B, view_of

VIEW = view_of("d0", "r1a", "r1b", "r2a")
WIDE = view_of("d0", "r1a", "r1b", "r1c", "r2a", "r2b")
PATIENCE_S = CONFIG.probe_timeout_s + 2 * CONFIG.heartbeat_interval_s


def discord() -> Conflicts:
    return Conflicts(CONFIG, lambda _: True)


def told(
    doubts: Conflicts,
    *times_s: float,
    ends: tuple[NodeId, NodeId] = (R1A, R2A),
    due_s: float = 0.0,
    view: View = VIEW,
) -> dict[NodeId, str]:
    """Tell of one doubt again and again; return who goes then."""
    for now_s in times_s:
        doubts.doubted(now_s, Doubt(ends, slow=False), IterationProgress(view, due_s))
    return doubts.due(view)


def slowed(doubts: Conflicts, now_s: float, *pairs: tuple[NodeId, NodeId]) -> dict[NodeId, str]:
    """Tell of tensors that were given up; return who goes then."""
    for ends in pairs:
        doubts.doubted(now_s, Doubt(ends, slow=True), IterationProgress(WIDE, now_s))
    return doubts.due(WIDE)


# --- links that are cut -----------------------------------------------------------------------


def test_a_doubt_that_stays_costs_the_end_that_is_missed_less() -> None:
    """r2a is the last of its stage: r1a goes, though it was r1a that doubted."""
    doubts = discord()
    assert not told(doubts, 0.0, 1.0, PATIENCE_S - 0.1)
    assert list(told(doubts, PATIENCE_S)) == [R1A]
    assert not doubts.due(VIEW)


def test_an_iteration_that_gets_on_has_no_cut_link() -> None:
    """However long it usually takes: only what comes later than usual is held up."""
    doubts = discord()
    assert not told(doubts, 0.0, PATIENCE_S, 2 * PATIENCE_S, due_s=2 * PATIENCE_S)
    assert told(doubts, 3 * PATIENCE_S, due_s=2 * PATIENCE_S)


def test_two_mishaps_far_apart_are_no_cut_link() -> None:
    """An iteration may be long, and a message may get lost twice in it."""
    doubts = discord()
    apart_s = 2 * CONFIG.heartbeat_timeout_s + 1.0
    assert not told(doubts, 0.0, apart_s, 2 * apart_s)
    assert told(doubts, 2 * apart_s + PATIENCE_S)


def test_data_nodes_and_the_last_of_a_stage_stay() -> None:
    doubts = discord()
    times_s = (0.0, PATIENCE_S / 2, PATIENCE_S)
    assert not told(doubts, *times_s, ends=(D0, R2A))
    assert list(told(doubts, *times_s, ends=(D0, R1B))) == [R1B]


# --- members that accuse others falsely -------------------------------------------------------

OFTEN_S = tuple(step / 3 for step in range(round(3 * PATIENCE_S) + 2))
"""Three times a second, for longer than the leader's patience."""


def test_one_members_word_removes_nobody_else() -> None:
    """r2a is alone in its stage, so it can't go itself. r1a answers the leader, and stays."""
    doubts = discord()
    assert not told(doubts, *OFTEN_S, ends=(R2A, R1A))
    assert not told(doubts, *OFTEN_S, ends=(R2A, R1B))


def test_an_accuser_that_nobody_confirms_goes_itself() -> None:
    doubts = discord()
    assert list(told(doubts, *OFTEN_S, ends=(R2A, R1A), view=WIDE)) == [R2A]


@pytest.mark.parametrize("witness", [(R1B, R1A), (D0, R1A), (R1A, R2A)])
def test_a_second_witness_confirms_an_accusation(witness: tuple[NodeId, NodeId]) -> None:
    """So does the accused, if it says the same of the accuser."""
    doubts = discord()
    assert not told(doubts, PATIENCE_S - 1.0, ends=witness)
    assert list(told(doubts, *OFTEN_S, ends=(R2A, R1A))) == [R1A]


def test_an_accuser_that_the_run_has_lost_a_member_to_is_not_believed_about_the_next() -> None:
    """Not in a later view either, and not if it keeps the next one from reaching it."""
    doubts = discord()
    told(doubts, PATIENCE_S - 1.0, ends=(R1A, R2A))
    assert list(told(doubts, *OFTEN_S, ends=(R2A, R1A))) == [R1A]
    later = VIEW.successor(WIDE.members[:3] + WIDE.members[4:5], leader=D0)
    for at_s in OFTEN_S:
        assert not told(doubts, 600.0 + at_s, ends=(R2A, R1B), view=later)
        assert not told(doubts, 600.0 + at_s, ends=(R1B, R2A), view=later)


def test_a_doubt_that_nobody_confirms_is_told_once_and_names_the_accuser() -> None:
    """Also while the iteration gets on."""
    doubts, effects = discord(), list[Effect]()
    for now_s in OFTEN_S:
        progress = IterationProgress(VIEW, due_s=now_s)
        effects += doubts.doubted(now_s, Doubt((R2A, R1A), slow=False), progress)
    assert effects == [noted("member.doubted", peer=R2A, suspect=VIEW.by_id[R1A].label)]


def test_a_member_that_holds_iterations_up_has_nobody_removed_for_a_second_time() -> None:
    doubts = discord()
    for at_s in (300.0, 600.0):
        doubts.stalled(at_s, VIEW, {R2A: [R1A], R1A: [R2A]})
    assert list(doubts.due(VIEW)) == [R1A]
    doubts.stalled(900.0, WIDE, {R2A: [R1C], R1C: [R2A]})
    assert R1C not in doubts.due(WIDE)


# --- tensors that are too slow ----------------------------------------------------------------


def test_one_link_that_is_too_slow_costs_nobody_its_place() -> None:
    """Its tensors go by way of others."""
    doubts = discord()
    assert not slowed(doubts, 0.0, (R1A, R2A), (R2A, R1A))
    assert not slowed(doubts, 20.0, (R1A, R2A))


@pytest.mark.parametrize(
    "pairs",
    [[(R1A, R2A), (R1A, R1B)], [(R2A, R1A), (R1B, R1A)], [(R1A, R2A), (D0, R1A)]],
    ids=["it says so", "others do", "both"],
)
def test_who_is_too_slow_for_several_others_goes(pairs: list[tuple[NodeId, NodeId]]) -> None:
    """Doubts add up over repeated iterations: they come tens of seconds apart."""
    doubts = discord()
    assert not slowed(doubts, 0.0, pairs[0])
    assert list(slowed(doubts, 50.0, pairs[1])) == [R1A]


def test_nobody_goes_if_it_is_not_clear_whose_fault_it_is() -> None:
    doubts = discord()
    assert not slowed(doubts, 0.0, (R1A, R2A), (R1B, R2B))
    # Now both r1a and r2b have two others each, and one of these is the other.
    assert not slowed(doubts, 1.0, (R1A, R2B))


def test_a_commit_clears_everybody_of_slowness() -> None:
    doubts = discord()
    assert not slowed(doubts, 0.0, (R1A, R2A))
    doubts.committed()
    assert not slowed(doubts, 30.0, (R1A, R2B))


def test_what_was_slow_long_ago_does_not_count() -> None:
    doubts = discord()
    assert not slowed(doubts, 0.0, (R1A, R2A))
    assert not slowed(doubts, 181.0, (R1A, R2B))


# --- iterations that stand still ------------------------------------------------------------------


def test_after_a_second_iteration_without_progress_whoever_the_others_wait_for_goes() -> None:
    doubts = discord()
    awaited = {R1B: [R1A], R2A: [R1A], R1A: [], D0: [R2A]}
    doubts.stalled(300.0, WIDE, awaited)
    assert not doubts.due(WIDE)
    doubts.stalled(600.0, WIDE, awaited)
    (reason,) = [why for node, why in doubts.due(WIDE).items() if node == R1A]
    assert "2 iterations stood still while r1b, r2a waited for it" in reason


def test_who_waits_for_nobody_goes_before_who_waits_too() -> None:
    """Three wait for r1c, which itself waits for r2b: nothing comes from there."""
    doubts = discord()
    awaited = {R1A: [R1C], R1B: [R1C], D0: [R1C], R1C: [R2B], R2B: []}
    for at_s in (300.0, 600.0):
        doubts.stalled(at_s, WIDE, awaited)
    assert list(doubts.due(WIDE)) == [R2B]


def test_iterations_that_stand_still_with_commits_between_them_are_not_in_a_row() -> None:
    doubts = discord()
    for at_s in (300.0, 900.0):
        doubts.stalled(at_s, WIDE, {R1B: [R1A]})
        doubts.committed()
    assert not doubts.due(WIDE)


def test_nobody_goes_of_whom_nobody_waits() -> None:
    doubts = discord()
    for at_s in (300.0, 600.0, 900.0):
        doubts.stalled(at_s, WIDE, {})
    assert not doubts.due(WIDE)


def test_nobody_goes_who_has_gone_already_or_is_the_last_of_its_stage_by_now() -> None:
    """A leader that slept takes in much at once: the view may change in between."""
    for view in (view_of("d0", "r1b", "r2a"), view_of("d0", "r1a", "r2a")):
        doubts = discord()
        for at_s in (300.0, 600.0):
            doubts.stalled(at_s, WIDE, {R1B: [R1A]})
        assert not doubts.due(view)
