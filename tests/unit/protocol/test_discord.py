"""When members that live can't work together, and who goes."""

from decod.ids import NodeId
from decod.protocol.core.effects import EffectSink
from decod.protocol.core.view import View
from decod.protocol.leadership.suspicions import Conflicts, Doubt, IterationProgress
from tests.unit.protocol.cast import CONFIG, D0, R1A, R1B, R1C, R2A, R2B, view_of

VIEW = view_of("d0", "r1a", "r1b", "r2a")
WIDE = view_of("d0", "r1a", "r1b", "r1c", "r2a", "r2b")
PATIENCE_S = CONFIG.probe_timeout_s + 2 * CONFIG.heartbeat_interval_s


def discord() -> Conflicts:
    return Conflicts(CONFIG, lambda _: True, EffectSink())


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


def test_an_accuser_that_the_run_has_lost_a_member_to_is_not_believed_about_the_next() -> None:
    """Not in a later view either, and not if it keeps the next one from reaching it."""
    doubts = discord()
    told(doubts, PATIENCE_S - 1.0, ends=(R1A, R2A))
    assert list(told(doubts, *OFTEN_S, ends=(R2A, R1A))) == [R1A]
    later = VIEW.successor(WIDE.members[:3] + WIDE.members[4:5], leader=D0)
    for at_s in OFTEN_S:
        assert not told(doubts, 600.0 + at_s, ends=(R2A, R1B), view=later)
        assert not told(doubts, 600.0 + at_s, ends=(R1B, R2A), view=later)


def test_a_member_that_holds_iterations_up_has_nobody_removed_for_a_second_time() -> None:
    doubts = discord()
    for at_s in (300.0, 600.0):
        doubts.stalled(at_s, VIEW, {R2A: [R1A], R1A: [R2A]})
    assert list(doubts.due(VIEW)) == [R1A]
    doubts.stalled(900.0, WIDE, {R2A: [R1C], R1C: [R2A]})
    assert R1C not in doubts.due(WIDE)


# --- tensors that are too slow ----------------------------------------------------------------


def test_nobody_goes_if_it_is_not_clear_whose_fault_it_is() -> None:
    doubts = discord()
    assert not slowed(doubts, 0.0, (R1A, R2A), (R1B, R2B))
    # Now both r1a and r2b have two others each, and one of these is the other.
    assert not slowed(doubts, 1.0, (R1A, R2B))
