"""What keys and answers do to `decod top`, without a terminal."""

import pytest

from decod.cli.top_state import (
    SORTS,
    Curves,
    TopState,
    Wish,
    is_paused,
    keys_of,
    left_s,
    sparkline,
)
from tests.support.fake_daemon import status_answer


def press(state: TopState, keys: str | list[str], *, paused: bool = False) -> list[Wish]:
    return [state.press(key, paused=paused) for key in keys]


def test_keys_are_read_from_what_a_terminal_sends() -> None:
    assert keys_of(b"jq?") == ["j", "q", "?"]
    assert keys_of(b"\x1b[A\x1bOB\x1b[5~\x1b[6~") == ["up", "down", "page up", "page down"]
    assert keys_of(b"\x1b[H\x1b[4~\x1b\x03") == ["home", "end", "escape", "q"]
    # Shift-Tab, Ctrl-Right, and a byte that is no text.
    assert keys_of(b"\x1b[Z\x1b[1;5Cs\xff") == ["s", "\ufffd"]
    assert keys_of(b"") == []


def test_the_table_scrolls_within_its_rows() -> None:
    state = TopState()
    state.fit(100, 10)
    press(state, ["down", "j", "page down"])
    state.fit(100, 10)
    assert state.scroll == 12
    press(state, ["up", "k", "k"])
    assert state.scroll == 9
    press(state, ["end"])
    state.fit(100, 10)
    assert state.scroll == 90
    press(state, ["down"])
    state.fit(100, 10)
    assert state.scroll == 90
    # Members have left, and the terminal has grown.
    state.fit(30, 25)
    assert state.scroll == 5
    press(state, ["page up"])
    assert state.scroll == 0
    press(state, ["end", "home"])
    assert state.scroll == 0
    state.fit(3, 25)
    assert state.scroll == 0


def test_s_goes_through_the_columns_and_back_to_the_first_row() -> None:
    state = TopState(scroll=7)
    found = []
    for _ in SORTS:
        found.append(state.sort)
        press(state, "s")
    assert (tuple(found), state.sort, state.scroll) == (SORTS, SORTS[0], 0)


@pytest.mark.parametrize(("paused", "wish"), [(False, Wish.PAUSE), (True, Wish.RESUME)])
def test_a_pause_is_asked_about_first(wish: Wish, *, paused: bool) -> None:
    state = TopState()
    assert press(state, "p", paused=paused) == [Wish.NOTHING]
    assert state.asks is wish
    assert press(state, "y", paused=paused) == [wish]
    assert state.asks is Wish.NOTHING
    for no in ("n", "j", "p", "escape", "?"):
        assert press(state, ["p", no, "y"], paused=paused) == [Wish.NOTHING] * 3
        assert (state.asks, state.scroll, state.shows_help) == (Wish.NOTHING, 0, False)
    assert press(state, "pq", paused=paused) == [Wish.NOTHING, Wish.QUIT]


def test_help_is_shown_until_the_next_key() -> None:
    state = TopState()
    press(state, "?")
    assert state.shows_help
    press(state, "j")
    assert (state.shows_help, state.scroll) == (False, 0)
    assert press(state, "?q") == [Wish.NOTHING, Wish.QUIT]


def test_a_key_takes_the_notice_away() -> None:
    state = TopState(notice="the node has agreed to pause")
    press(state, "x")
    assert state.notice == ""


def steps(*iterations: int, period_s: float = 2.0) -> list[list[float | None]]:
    return [[i, 1e9 + period_s * i, 5.0 - i / 100, 1000.0 + i] for i in iterations]


def test_curves_grow_by_what_is_new_and_begin_anew_after_a_rollback() -> None:
    curves = Curves()
    assert curves.request == {"command": "history", "generation": "", "num_steps": 0}
    curves = curves.after({"generation": "a", "steps": steps(1, 2)})
    assert curves.request == {"command": "history", "generation": "a", "num_steps": 2}
    curves = curves.after({"generation": "a", "steps": steps(3)})
    assert [step.iteration for step in curves.steps] == [1, 2, 3]
    curves = curves.after({"generation": "b", "steps": steps(1)})
    assert [step.iteration for step in curves.steps] == [1]
    assert curves.request["num_steps"] == 1


def test_what_is_malformed_in_a_history_is_left_out() -> None:
    told = [*steps(1), None, [2], ["3", 1.0, 2.0, 3.0], [4, 1.0, None, "x"], [True, 1, 1, 1]]
    curves = Curves().after({"generation": "a", "steps": told})
    assert [(step.iteration, step.loss) for step in curves.steps] == [(1, 4.99), (4, None)]
    # They count all the same, or the node would tell them again and again.
    assert curves.request["num_steps"] == 6
    for answer in ({}, {"generation": 1, "steps": []}, {"generation": "a", "steps": "x"}):
        assert curves.after(answer) is curves


def test_the_end_is_estimated_by_the_newest_iterations() -> None:
    status = status_answer(iteration=300, num_iterations=400)
    slow_then_fast = [*steps(*range(1, 250), period_s=60.0), *steps(*range(250, 301))]
    curves = Curves().after({"generation": "a", "steps": slow_then_fast})
    assert left_s(status, curves) == pytest.approx(200.0)
    assert left_s(status_answer(iteration=300), curves) is None
    assert left_s(status, Curves().after({"generation": "a", "steps": steps(1)})) is None
    assert left_s(status | {"iteration": 401}, curves) == 0.0
    # The clock was set back.
    backwards = Curves().after({"generation": "a", "steps": [[1, 9.0, 1, 1], [2, 5.0, 1, 1]]})
    assert left_s(status, backwards) is None


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, None, 8, 8], 5) == "▁▁ ██"
    assert sparkline([2, 2, 2], 5) == "▄▄▄"
    assert sparkline([1, 3, 7, 9], 2) == "▁█"
    assert sparkline([None, None], 5) == sparkline([], 5) == ""
    assert sparkline([1, 2], 0) == ""


def test_only_the_persons_own_pause_can_be_ended() -> None:
    assert is_paused(status_answer(pausing={"by_person": True}))
    assert not is_paused(status_answer(pausing={"by_person": False, "causes": [{}]}))
    assert not is_paused(status_answer(pausing=None))
