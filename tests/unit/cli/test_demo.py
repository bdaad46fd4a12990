"""The demo's story, told with stand-ins for the daemons; the real ones take minutes."""

import math
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.cli import demo_nodes
from decod.cli.demo_command import (
    NUM_RELAYS,
    DemoPlan,
    Story,
    check_learnt,
    next_steps,
    play,
    run_config,
    show_page,
    spare_relays,
    summary,
)
from decod.cli.demo_nodes import (
    Child,
    DemoCommit,
    DemoError,
    Fleet,
    PlainDisplay,
    interrupted_by_signals,
    parse_progress,
)
from decod.config.run_file import render_run_file

FAKE = Path(__file__).with_name("fake_decod.py")
NUM_ITERATIONS = 8


class Recorder:
    """A display that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[DemoCommit] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, progress: DemoCommit) -> None:
        self.seen.append(progress)


@pytest.fixture(autouse=True)
def corpus_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("decod.data.corpus.default_corpus", lambda: tmp_path)
    monkeypatch.setattr(demo_nodes, "_END_TIMEOUT_S", 0.2)


@pytest.fixture
def plan(tmp_path: Path) -> DemoPlan:
    (tmp_path / "num_iterations").write_text(str(NUM_ITERATIONS))
    return DemoPlan(
        folder=tmp_path,
        model_dir=tmp_path / "model",
        num_iterations=NUM_ITERATIONS,
        device="cuda:3",
        program=(sys.executable, "-S", str(FAKE)),
    )


def two_stages(state_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    rosters = (["leader"], ["relay-1", "relay-3"], ["relay-2", "relay-4"])
    return {
        "stages": [
            {"index": index, "nodes": [{"name": name} for name in names]}
            for index, names in enumerate(rosters)
        ]
    }


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Child]]:
    """All daemons that a test starts; none may live when it ends."""
    started: list[Child] = []
    start = Fleet.start

    def remember(self: Fleet, *args: Any, **kwargs: Any) -> Child:
        started.append(start(self, *args, **kwargs))
        return started[-1]

    monkeypatch.setattr(Fleet, "start", remember)
    yield started
    assert all(child.process.returncode is not None for child in started)


def test_a_relay_is_killed_half_way_and_the_rest_goes_on(
    plan: DemoPlan, children: list[Child]
) -> None:
    display = Recorder()
    story = play(plan, display, ask=two_stages)
    assert story.num_done == NUM_ITERATIONS
    assert story.killed is not None
    assert story.killed.name == "relay-4"
    assert story.recovery_s is not None
    assert [seen.iteration for seen in display.seen] == list(range(1, NUM_ITERATIONS + 1))
    text = "\n".join(display.notes)
    assert "the leader's device: cuda:3" in text
    assert "killing relay-4" in text
    assert "SIGKILL after iteration 4" in text
    assert "training goes on without relay-4: iteration 5" in text
    assert len(children) == 1 + NUM_RELAYS
    check_learnt(story, plan.folder)
    assert summary(story).startswith("loss 5.125 -> 2.500 (-51%) in 8 iterations")


def test_the_page_is_shown_once_or_its_address_printed(
    plan: DemoPlan, children: list[Child]
) -> None:
    for opens, said in ((True, "opens in your browser"), (False, "can be opened in a browser")):
        display, shown = Recorder(), list[str]()

        def show(url: str, *, opens: bool = opens, shown: list[str] = shown) -> bool:
            shown.append(url)
            return opens

        play(replace(plan, show_page=show), display, ask=two_stages)
        assert shown == ["http://127.0.0.1:7780/"]
        (note,) = [note for note in display.notes if "the page of the run" in note]
        assert said in note
        assert note.endswith("http://127.0.0.1:7780/")
    assert children


class Browser:
    """A desktop's browser that remembers what it was to open."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def open(self, url: str) -> None:
        assert url == "http://127.0.0.1:7780/"
        self.opened.set()


@pytest.mark.parametrize(
    ("terminal", "variables", "opens"),
    [
        (True, {"DISPLAY": ":0"}, True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (True, {}, False),
        (False, {"DISPLAY": ":0"}, False),
        (True, {"DISPLAY": ":10", "SSH_CONNECTION": "a 1 b 2"}, False),
    ],
)
def test_a_browser_opens_only_on_a_terminal_with_a_desktop(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], opens: bool
) -> None:
    browser = Browser()
    monkeypatch.setattr("webbrowser.get", lambda: browser)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert show_page("http://127.0.0.1:7780/") is opens
    assert browser.opened.wait(5.0 if opens else 0.0) is opens


def test_a_browser_for_terminals_does_not_hide_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.get", lambda: webbrowser.GenericBrowser("lynx"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert not show_page("http://127.0.0.1:7780/")


def test_the_next_steps_are_commands_that_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/decod")
    steps = next_steps(tmp_path / "my model")
    assert f"decod generate --model '{tmp_path}/my model' 'def '" in steps
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert f"{sys.executable} -m decod run init run.toml" in next_steps(tmp_path)


def test_nobody_is_killed_whose_stage_has_no_other(plan: DemoPlan, children: list[Child]) -> None:
    story = play(plan, Recorder(), ask=lambda *_: {})
    assert story.killed is None
    with pytest.raises(DemoError, match="no relay was killed"):
        check_learnt(story, plan.folder)


def test_only_relays_with_a_companion_are_spare() -> None:
    status = two_stages(Path(), {})
    status["stages"][0]["nodes"].append({"name": "data-2"})
    status["stages"][2]["nodes"].pop()
    assert spare_relays(status) == {"relay-1", "relay-3"}
    assert spare_relays({}) == set()


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("leader-dies", "leader ended with exit code 4"),
        ("leader-ends", "leader ended with exit code 0"),
    ],
)
def test_a_leader_that_ends_early_is_named_with_its_last_lines(
    plan: DemoPlan, children: list[Child], behaviour: str, expected: str
) -> None:
    (plan.folder / behaviour).touch()
    with pytest.raises(DemoError, match=expected) as caught:
        play(plan, Recorder(), ask=two_stages)
    assert caught.value.exit_code == 1
    assert caught.value.log_tail == ["leader: port 7700 is taken"]
    assert str(plan.folder / "logs" / "leader.log") in str(caught.value)


def test_a_relay_that_dies_early_is_named_with_its_last_lines(
    plan: DemoPlan, children: list[Child]
) -> None:
    (plan.folder / "leader-hangs").touch()
    (plan.folder / "relay-2-dies").touch()
    with pytest.raises(DemoError, match="relay-2 ended with exit code 6") as caught:
        play(plan, Recorder(), ask=two_stages)
    assert caught.value.log_tail == ["relay-2: E-HW-001 too little memory?[2J"]


def test_a_signal_ends_all_daemons_even_stubborn_ones(
    plan: DemoPlan, children: list[Child]
) -> None:
    (plan.folder / "leader-hangs").touch()
    display = Recorder()

    def hang_up(text: str) -> None:
        if text.startswith("started"):
            os.kill(os.getpid(), signal.SIGTERM)

    display.note = hang_up  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        play(plan, display, ask=two_stages)
    assert len(children) == 1 + NUM_RELAYS
    assert signal.getsignal(signal.SIGTERM) is before


def test_each_daemon_gets_its_own_folder_log_and_free_port(
    plan: DemoPlan, children: list[Child]
) -> None:
    play(plan, Recorder(), ask=two_stages)
    for child in children:
        arguments = child.process.args
        assert isinstance(arguments, list)
        at = arguments.index("--listen")
        assert arguments[at + 1] == "127.0.0.1:0"
        assert child.log_path.is_file()
    assert len({child.state_dir for child in children}) == 1 + NUM_RELAYS
    assert "join string" in children[0].log_path.read_text()


@pytest.mark.parametrize("last", [3.4, math.nan, math.inf])
def test_a_loss_that_falls_too_little_is_an_error(last: float, tmp_path: Path) -> None:
    story = Story(losses=[5.5, last], num_done=2)
    with pytest.raises(DemoError, match="loss went from") as caught:
        check_learnt(story, tmp_path)
    assert caught.value.exit_code == 1


def test_a_run_without_any_iteration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no loss"):
        check_learnt(Story(), tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "iteration 12  loss 2.9130  1830 tokens/s",
            DemoCommit(iteration=12, loss=2.913, tokens_per_s=1830.0),
        ),
        (
            "12:03:41 leader  iteration 12 of 40  loss 2.9130 (-0.0412)  1830 tokens/s  9 s left",
            DemoCommit(iteration=12, loss=2.913, tokens_per_s=1830.0),
        ),
        ("iteration 1  loss 5.5  -", DemoCommit(iteration=1, loss=5.5, tokens_per_s=None)),
        ("iteration 1", None),
        ("iteration x  loss 1", None),
        ("model of iteration 3: /x", None),
        ("", None),
    ],
)
def test_lines_of_progress_are_understood(line: str, expected: DemoCommit | None) -> None:
    assert parse_progress(line) == expected


def test_plain_progress_is_the_first_the_last_and_every_fifth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with PlainDisplay(12) as display:
        for index in range(1, 13):
            display.progress(DemoCommit(iteration=index, loss=1.0, tokens_per_s=None))
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["1/12", "5/12", "10/12", "12/12"]


def test_the_demos_run_file_is_read_back_as_it_was_meant(tmp_path: Path) -> None:
    from decod.config import load_run_file

    path = tmp_path / "run.toml"
    path.write_text(render_run_file(run_config(60)))
    assert load_run_file(path).run == run_config(60)


def test_a_daemon_that_the_demo_killed_counts_as_no_death(
    plan: DemoPlan, children: list[Child]
) -> None:
    (plan.folder / "relays-stay").touch()
    with Fleet(plan.folder, program=plan.program) as fleet:
        child = fleet.start("relay-1", ["join", "decod1-fake@127.0.0.1:1"])
        fleet.kill(child)
        fleet.refuse_deaths()
    assert child.process.returncode == -signal.SIGKILL
