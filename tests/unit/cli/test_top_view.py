"""The picture of `decod top` at several sizes of a terminal."""

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from decod.cli.top_state import Curves, TopState, Wish
from decod.cli.top_view import Scene, Size, render_top
from decod.texts import length_of
from tests.support.fake_daemon import node, status_answer

SIZES = [Size(80, 24), Size(40, 12), Size(200, 60)]
CURVES = Curves().after(
    {"generation": "a", "steps": [[i, 1e9 + 2 * i, 9.0 - i / 50, 1000.0 + i] for i in range(300)]}
)


def ids(*names: str) -> list[str]:
    return [f"{name}-id-0123456789" for name in names]


def many(num: int) -> dict[str, Any]:
    """The status of a run with many members in four stages."""
    relays = [node(f"relay-{i:03}", microbatches=i, capacity=i % 7) for i in range(num - 1)]
    return status_answer(
        stages=[
            {"index": 0, "nodes": [node("data-1")]},
            *({"index": i + 1, "nodes": relays[i::3]} for i in range(3)),
        ]
    )


RICH = {
    "num_iterations": 1000,
    "iteration": 300,
    "flows": [{"path": ids("data-1", "relay-1", "data-1"), "costs_s": [0.01, 0.02]}] * 3,
    "links": [
        {"from": a, "to": b, "latency_s": 0.012, "bandwidth_bytes_per_s": 12.5e6}
        for a, b in [ids("data-1", "relay-1")]
    ],
    "recent": [{"age_s": 12.0, "event": "member.lost", "text": "relay-7 is lost"}],
    "evaluation": {"last": {"iteration": 200, "loss": 3.1, "perplexity": 22.2}, "problem": None},
    "syncing": {"stage_index": 1, "percent": 40.0, "bytes_per_s": 2**20, "left_s": 30.0},
}


def draw(
    status: dict[str, Any],
    size: Size = SIZES[0],
    state: TopState | None = None,
    *,
    problem: str = "",
    curves: Curves = CURVES,
) -> list[str]:
    console = Console(width=size.width, height=size.height, file=io.StringIO(), markup=False)
    console.print(render_top(Scene(status, curves, problem), state or TopState(), size))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "status",
    [status_answer(), status_answer(**RICH), many(200), many(200) | RICH, {}],
    ids=["small", "rich", "many", "many and rich", "empty"],
)
def test_a_picture_fills_its_terminal_and_no_more(status: dict[str, Any], size: Size) -> None:
    for state in (TopState(), TopState(shows_help=True), TopState(scroll=50, sort="done")):
        lines = draw(status, size, state)
        assert len(lines) == size.height
        assert max(map(cell_len, lines)) <= size.width


@pytest.mark.parametrize("size", [Size(1, 1), Size(10, 2), Size(20, 5), Size(80, 3)], ids=str)
def test_a_tiny_terminal_is_no_error(size: Size) -> None:
    lines = draw(many(200) | RICH, size)
    assert len(lines) == size.height
    assert max(map(cell_len, lines)) <= size.width


def test_a_picture_shows_run_members_flows_events_and_keys() -> None:
    lines = draw(status_answer(**RICH))
    text = "\n".join(lines)
    assert lines[0] == "run wiki   training   leader data-1 (term 1)"
    assert lines[1] == "iteration 300 of 1,000   about 23 min 20 s left"
    assert lines[2].startswith("loss 2.9131     █")
    assert lines[2].endswith("▁")
    assert lines[3].startswith("tokens/s 1,830  ▁")
    assert lines[3].endswith("█")
    assert lines[4].startswith("you data-1 (data-1-i)   training")
    assert "stage 2 has no member" in text
    assert "held-out text: loss 3.1000, perplexity 22.20, iteration 200" in text
    assert "fetching the state of stage 1" in text
    rows = [line.split() for line in lines]
    assert ["1", "relay-1", "training", "4", "3", "120", "12", "ms", "100", "Mbit/s"] in rows
    assert ["2", "nobody", "empty", "-", "-", "-", "-"] in rows
    assert ["3", "30", "data-1", "-10>", "relay-1", "-20>", "data-1"] in rows
    assert "12 s ago  relay-7 is lost" in text
    assert lines[-1] == "q quit   s sort   p pause   ? help"


def test_a_small_terminal_shows_the_run_and_some_members() -> None:
    lines = draw(many(200) | RICH, Size(40, 12))
    assert lines[0].startswith("run wiki")
    assert [line.split()[0] for line in lines[-4:-1]] == ["STAGE*", "0", "1"]
    assert lines[-1].startswith("1-2 of 200 members")


def test_a_wide_terminal_also_shows_roles_and_addresses() -> None:
    stages = [{"index": 1, "nodes": [node("s", role="relay", duty="frontal")]}]
    text = "\n".join(draw(status_answer(stages=stages), Size(200, 60)))
    assert "frontal" in text
    assert "127.0.0.1:7701" in text.partition("ADDRESS")[2]


def names(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split() if word.startswith("relay-")]


def test_two_hundred_members_scroll() -> None:
    state, status = TopState(), many(200)
    first = names(draw(status, state=state))
    assert first[0] == "relay-000"
    state.press("page down", paused=False)
    second = names(draw(status, state=state))
    assert not {*first} & {*second}
    state.press("end", paused=False)
    lines = draw(status, state=state)
    assert lines[-1].startswith("185-200 of 200 members")
    assert names(lines)[-1] == "relay-197"


def test_members_are_sorted_as_the_keys_say() -> None:
    status = many(200)
    most = names(draw(status, state=TopState(sort="done")))
    assert most[:2] == ["relay-198", "relay-197"]
    assert names(draw(status, state=TopState(sort="node")))[:2] == ["relay-000", "relay-001"]
    slow = {"latency_s": 0.2, "bandwidth_bytes_per_s": 1e6}
    links = [{"from": ids("data-1")[0], "to": ids("relay-050")[0], **slow}]
    lines = draw(status | {"links": links}, state=TopState(sort="link"))
    assert "200 ms 8 Mbit/s" in lines[7]
    assert names(lines)[0] == "relay-050"


def test_the_last_line_asks_tells_and_warns() -> None:
    status = status_answer()
    assert "y/n" in draw(status, state=TopState(asks=Wish.PAUSE))[-1]
    assert "again? y/n" in draw(status, state=TopState(asks=Wish.RESUME))[-1]
    assert draw(status, state=TopState(notice="agreed"))[-1] == "agreed"
    said = draw(status, problem="no daemon answers in /tmp/x")[-1]
    assert said.startswith("the node does not answer, this picture is old: no daemon answers")
    paused = status_answer(pausing={"by_person": True})
    assert "p resume" in draw(paused)[-1]


def test_text_of_peers_is_cleaned_and_is_no_markup() -> None:
    evil = "\x1b[2J[red]\u202ex\n"
    hostile = status_answer(
        run_name=evil,
        message=evil,
        leader={"name": evil, "term": evil},
        stages=[{"index": evil, "nodes": [node(evil, state=evil, duty=evil)]}],
        recent=[{"age_s": evil, "text": evil}],
        flows=[{"path": [evil, evil], "costs_s": [0.1]}],
        evaluation={"last": {"iteration": evil, "loss": evil}, "problem": evil},
        links=[{"from": evil, "to": 7, "bandwidth_bytes_per_s": evil}],
        pausing={"causes": [{"detail": evil}], "by_person": True},
    )
    for size in SIZES:
        lines = draw(hostile, size, problem=evil)
        text = "".join(lines)
        assert len(lines) == size.height
        assert not {*text} & {*"\x1b\u202e"}
        assert "[red]" in text


def test_values_of_the_wrong_type_count_as_absent() -> None:
    wrong = {name: [1] for name in status_answer(**RICH)} | {"stages": [{"nodes": 5}, 7]}
    assert len(draw(wrong)) == 24


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3 * 3600 + 125, "3 h 2 min"),
        (2 * 86_400 + 3600, "2 d 1 h"),
    ],
)
def test_a_length_of_time_has_its_two_largest_units(duration_s: float, text: str) -> None:
    assert length_of(duration_s) == text
