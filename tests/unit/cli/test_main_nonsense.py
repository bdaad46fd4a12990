"""Nonsense for every argument, option and variable of every command: one error, and what to do.

The commands are found in the tree of click, so a new option is tried without being named here.
Nothing is started: what would start nodes, or look at this host, is replaced.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click
import pytest

from decod.cli.main import COMMANDS, cli, main
from decod.cli.options import variables_of
from decod.errors import HardwareError
from decod.exit_codes import ExitCode

CPU_MAX_S = 2.0
"""Of the processor, not of the clock: other work on this host does not count."""

NONSENSE: dict[str, Callable[[Path], str]] = {
    "empty": lambda _: "",
    "negative": lambda _: "-1",
    "huge": lambda _: "9" * 40,
    "garbage": lambda _: "\x1b[31m \u2603 %s $(x) \udcff;\x07",
    "long": lambda _: "x" * 5000,
    "missing": lambda folder: str(folder / "no" / "such" / "place"),
    "folder": str,
    "file": lambda folder: str(folder / "text.txt"),
}

GIVEN: dict[str, list[str]] = {
    "join": ["decod1-v-cut"],
    "leader": ["run.toml"],
    "set": ["upload=1Mbit"],
    "why": [],
    "receipts verify": ["receipt.json"],
    "run plan": ["run.toml"],
    "run init": ["new.toml"],
    "run check": ["run.toml"],
    "data prepare": ["out", "text.txt"],
    "data show": ["--run", "run.toml", "--iteration", "1"],
    "token revoke": ["abc"],
    "node show": ["somebody"],
    "node ban": ["somebody"],
    "node unban": ["somebody"],
    "export": ["model"],
    "generate": ["once", "--model", "nowhere"],
    "evaluate": ["nowhere", "nowhere"],
    "analyse": ["nowhere"],
    "plan servers": ["nowhere.json"],
    "plan run": ["run.toml", "--hosts", "nowhere.json"],
    "plan route": ["nowhere.json"],
    "plan join": ["nowhere.json", "--candidates", "nowhere.json"],
    "simulate": ["nowhere.toml"],
    "optimizer simulate": ["--peers", "1", "--rounds", "1"],
    "service install": ["join", "decod1-v-cut"],
    "identity export": ["node.key"],
    "identity import": ["nowhere.key"],
}
"""What else is typed: enough for the command to begin, and nothing that lets it go far."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place for a value: an argument, an option, or the variable of an option."""

    words: str
    parameter: click.Parameter
    variable: str = ""

    def __str__(self) -> str:
        return f"{self.words} {self.variable or self.parameter.opts[0]}"

    def arguments(self, value: str) -> list[str]:
        """The command line with a value in this place. A variable's is not on it."""
        given = GIVEN.get(self.words, [])
        if isinstance(self.parameter, click.Option):
            put = [] if self.variable else [self.parameter.opts[0], value]
            return [*self.words.split(), *given, *put]
        index = self._index()
        return [*self.words.split(), *given[:index], value, *given[index + 1 :]]

    def _index(self) -> int:
        command = find(self.words)
        positional = [each for each in command.params if isinstance(each, click.Argument)]
        return positional.index(self.parameter)  # type: ignore[arg-type]


def find(words: str) -> click.Command:
    name, *rest = words.split()
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for each in rest:
        assert isinstance(command, click.Group)
        command = command.commands[each]
    return command


def places() -> Iterator[Place]:
    def below(command: click.Command, words: str) -> Iterator[Place]:
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                yield from below(child, f"{words} {name}")
            if not command.invoke_without_command:
                return
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                yield Place(words, parameter)
            elif isinstance(parameter, click.Option):
                if not parameter.is_flag:
                    yield Place(words, parameter)
                yield from (Place(words, parameter, name) for name in variables_of(parameter))

    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield from below(command, name)


def not_here(*_: object, **__: object) -> NoReturn:
    raise HardwareError("no node starts", why="this is a test", fix="start one yourself")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which nothing runs and nothing starts, with files that may be named."""
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    (tmp_path / "run.toml").write_text('name = "small"\n[data]\npath = "nowhere"\n')
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("STATE", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for target in (
        "decod.daemon.life.run_join",
        "decod.daemon.demands.run_dry",
        "decod.daemon.leader_daemon.run_leader",
        "decod.cli.demo_command.play",
        "decod.lab.study.study_runs.run_grid",
        "decod.insight.doctor.examine",
        "decod.cli.insight_command._collect",
    ):
        monkeypatch.setattr(target, not_here)
    return tmp_path


@pytest.mark.parametrize("place", [*places()], ids=str)
def test_nonsense_is_refused_in_words(
    place: Place,
    nowhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for kind, make in NONSENSE.items():
        value = make(nowhere)
        if place.variable:
            monkeypatch.setenv(place.variable, value)
        begun_s = time.process_time()
        code = main(place.arguments(value))
        spent_s = time.process_time() - begun_s
        said = capfd.readouterr()
        assert_told(code, said.out, said.err, where=f"{place}, {kind}: exit code {code}")
        assert spent_s < CPU_MAX_S, (kind, spent_s)


def assert_told(code: int, out: str, error: str, *, where: str) -> None:
    """Checks that a command ends as documented, and that an error is one with a remedy."""
    shown = f"{where}\n{out}{error}"
    assert code in set(ExitCode), shown
    assert code != ExitCode.UNEXPECTED, shown
    assert "Traceback" not in out + error, shown
    assert "E-INT" not in error, shown
    assert not {"\x1b", "\x07"} & {*error}, shown
    if code == ExitCode.OK:
        return
    lines = error.splitlines()
    if code == ExitCode.USAGE:
        # The way of click: the usage, where to find help, and what is wrong.
        assert sum(line.startswith("Error: ") for line in lines) == 1, shown
        assert any(line.startswith("Try 'decod ") for line in lines), shown
        return
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, shown
    assert "Try: " in errors[0], shown
    assert all(line.startswith(("error: ", "warning: ")) for line in lines), shown
