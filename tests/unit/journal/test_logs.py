"""Logs and events: two views of one record, and nothing that a peer sends can spoil them."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import HardwareError
from decod.journal.event_specs import EVENTS, event_level, render_note
from decod.journal.logs import LogContext, Throttle, close_logs, log_note, set_up_logs
from decod.texts import clean_text


@pytest.fixture(autouse=True)
def closed_logs() -> Iterator[None]:
    yield
    close_logs()


def test_one_event_gives_a_json_line_and_a_short_text(tmp_path: Path) -> None:
    terminal = io.StringIO()
    context = LogContext({"node_id": "k7q2", "stage_index": None})
    logger = set_up_logs(file=tmp_path / "a" / "log", context=context, terminal=terminal)
    log_note(logger, "peer.suspected", {"peer": "abc", "reason": "silent"})
    context.fields["stage_index"] = 3
    log_note(logger, "iteration.opened", {"iteration": "5.1"})  # DEBUG: in the file only.
    lines = [json.loads(line) for line in (tmp_path / "a" / "log").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["peer.suspected", "iteration.opened"]
    assert [line["level"] for line in lines] == ["warning", "debug"]
    assert lines[1]["stage_index"] == 3
    assert lines[1]["iteration"] == "5.1"
    assert terminal.getvalue()[8:] == " warning abc is suspected: silent\n"


def test_a_plain_log_call_and_a_traceback_stay_on_one_line_of_json(tmp_path: Path) -> None:
    logger = set_up_logs(file=tmp_path / "log", terminal=io.StringIO())
    try:
        int("x")
    except ValueError:
        logging.getLogger("decod.net").exception("broken\n%s", "by us")
    logger.info("fine")
    first, second = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert first["message"] == "broken by us"
    assert "ValueError: invalid literal" in first["traceback"]
    assert second["logger"] == "decod"


def test_one_error_that_comes_again_and_again_is_shown_now_and_then(tmp_path: Path) -> None:
    terminal = io.StringIO()
    logger = set_up_logs(file=tmp_path / "log", terminal=terminal)
    for _ in range(1234):
        error = OSError(24, "Too many open files")
        logging.getLogger("decod.net").error("accept failed", exc_info=error)
    logging.getLogger("decod.net").error("something else")
    log_note(logger, "worker.died", {"reason": "x"})
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("count") for line in lines] == [None] * 5 + [10, 100, 1000] + [None] * 2
    shown = terminal.getvalue().splitlines()
    assert len(shown) == len(lines)
    assert shown[7].endswith("error accept failed (1000 times within a minute)")


def test_errors_of_a_kind_are_counted_by_the_minute() -> None:
    now_s = 100.0
    throttle = Throttle(lambda: now_s)

    def passes(text: str, level: int = logging.ERROR, **more: object) -> bool:
        record = logging.makeLogRecord({"name": "decod", "levelno": level, "msg": text, **more})
        first = throttle.filter(record)
        assert throttle.filter(record) == first, "another handler decides as the first"
        return first

    assert [passes("a") for _ in range(7)] == [True] * 5 + [False] * 2
    assert passes("b")
    assert passes("a", fields={"peer": "x"})
    assert passes("a", level=logging.WARNING)
    now_s += 59.0
    assert not passes("a")
    now_s += 1.0
    assert passes("a")


def test_people_see_eight_characters_of_a_node_that_has_no_name_yet() -> None:
    terminal, stranger = io.StringIO(), "ab2" * 17 + "c"
    logger = set_up_logs(file=None, terminal=terminal)
    fields = {"peer": stranger, "address": "1.2.3.4:5", "role": "relay", "token": "abcd2345"}
    log_note(logger, "member.admitted", fields)
    told = "ab2ab2ab at 1.2.3.4:5 became a member, as relay, with token abcd2345\n"
    assert terminal.getvalue().endswith(told)


def test_no_raw_fields_follow_what_the_leader_has_kept_or_measured() -> None:
    measured = {"loss": 4.5, "perplexity": 90.0, "num_tokens": 256, "duration_s": 13.5}
    told = render_note("evaluation.done", {"iteration": 5, **measured})
    assert told.endswith("loss 4.5, perplexity 90, over 256 tokens in 13.5 s")
    kept = {"iteration": 5, "path": "/c/5", "gathered_s": 1.0, "duration_s": 2.0}
    assert "=" not in render_note("checkpoint.written", kept)


def test_what_is_no_warning_is_always_written(tmp_path: Path) -> None:
    logger = set_up_logs(file=tmp_path / "log", terminal=io.StringIO())
    for _ in range(20):
        log_note(logger, "iteration.committed", {"iteration": "1.1", "loss": 1.0})
    assert len((tmp_path / "log").read_text().splitlines()) == 20


def test_a_closed_terminal_loses_records_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = io.StringIO()
    logger = set_up_logs(file=None, terminal=terminal)
    terminal.close()
    log_note(logger, "node.stopped", {"reason": "test"})
    assert capsys.readouterr().err == ""


def test_a_full_disk_loses_records_and_nothing_else() -> None:
    """Not when the log is closed either: how a node ended is told after that."""
    logger = set_up_logs(file=Path("/dev/full"), terminal=io.StringIO())
    for _ in range(3):
        log_note(logger, "stage.assigned", {"stage": 1, "reason": "its operator chose it"})
    assert [getattr(handler, "num_lost", None) for handler in logger.handlers] == [3, 0]
    close_logs()
    assert not logger.handlers


def test_a_log_file_that_cannot_be_opened_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="--state-dir"):
        set_up_logs(file=tmp_path)


def test_a_peers_string_cannot_forge_a_line_or_move_the_cursor() -> None:
    evil = "a\nerror: all is lost\r\x1b[2J\u202e{node_id}\ud800"
    text = render_note("message.refused", {"peer": "n", "reason": evil})
    assert text == "message from n refused: a error: all is lost??[2J?{node_id}?"


@given(st.dictionaries(st.text(max_size=20), st.one_of(st.text(), st.floats(), st.none())))
def test_any_fields_render_to_one_bounded_printable_line(fields: dict[str, object]) -> None:
    for event in ("node.stopped", "not registered"):
        text = render_note(event, fields)
        assert len(text.splitlines()) <= 1
        assert len(text) < 10_000
        text.encode()


def test_an_unregistered_event_is_shown_with_all_its_fields() -> None:
    assert render_note("some.thing", {"a": 1, "b": "x"}) == "some.thing a=1 b=x"
    assert event_level("some.thing") == logging.INFO


def test_fields_that_the_text_does_not_mention_follow_it() -> None:
    text = render_note(
        "iteration.committed", {"iteration": "3.1", "loss": 2.5000000001, "extra": 1}
    )
    assert text == "iteration 3.1 is committed, loss 2.5 extra=1"
    assert render_note("iteration.committed", {}) == "iteration ? is committed, loss ?"


@given(st.text(), st.integers(min_value=3, max_value=50))
def test_cleaned_text_is_bounded_and_cleaning_twice_changes_nothing(text: str, limit: int) -> None:
    clean = clean_text(text, limit=limit)
    assert len(clean) <= limit
    assert clean_text(clean, limit=limit) == clean


def test_a_value_that_cannot_be_written_is_named_by_its_type() -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError

    assert clean_text(Bad()) == "<Bad>"


def test_every_registered_text_renders_with_its_own_fields() -> None:
    for spec in EVENTS.values():
        assert "?" not in render_note(spec.name, dict.fromkeys(spec.fields, "x"))
