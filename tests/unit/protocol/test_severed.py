"""When a link counts as cut, and which end goes."""

from decod.ids import NodeId, Round
from decod.protocol.severed import Severed
from tests.unit.protocol.cast import CONFIG, D0, R1A, R1B, R2A, ROUND, view_of

VIEW = view_of("d0", "r1a", "r1b", "r2a")
PATIENCE_S = 2 * CONFIG.heartbeat_interval_s


def told(
    severed: Severed, *times_s: float, ends: tuple[NodeId, NodeId] = (R1A, R2A), **changes: Round
) -> dict[NodeId, str]:
    """Tell of one doubt again and again; return who goes then."""
    place = (changes.get("round_", ROUND), False)
    for now_s in times_s:
        severed.doubted(now_s, ends, VIEW, place, lambda _: True)
    return severed.due()


def test_a_doubt_that_stays_costs_the_end_that_is_missed_less() -> None:
    """r2a is the last of its stage: r1a goes, though it was r1a that doubted."""
    severed = Severed(CONFIG)
    assert not told(severed, 0.0, 1.0, PATIENCE_S - 0.1)
    assert list(told(severed, PATIENCE_S)) == [R1A]
    assert not severed.due()


def test_a_round_that_gets_on_has_no_cut_link() -> None:
    severed = Severed(CONFIG)
    assert not told(severed, 0.0, PATIENCE_S - 0.1)
    assert not told(severed, PATIENCE_S, round_=Round(2, 1))


def test_two_mishaps_far_apart_are_no_cut_link() -> None:
    """A round may be long, and a message may get lost twice in it."""
    severed = Severed(CONFIG)
    apart_s = 2 * CONFIG.heartbeat_timeout_s + 1.0
    assert not told(severed, 0.0, apart_s, 2 * apart_s)
    assert told(severed, 2 * apart_s + PATIENCE_S)


def test_data_nodes_and_the_last_of_a_stage_stay() -> None:
    severed = Severed(CONFIG)
    assert not told(severed, 0.0, 2.0, 4.0, ends=(D0, R2A))
    assert list(told(severed, 0.0, 2.0, 4.0, ends=(D0, R1B))) == [R1B]
