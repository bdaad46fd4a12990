"""The README and the recipes of docs/recipes/ as programs: what they say, typed into real shells.

A comment before a block of a page says what becomes of it in the tests. It shows on no page:

    <!-- recipe: run at HOST -->                the block is run, in a folder that stands for HOST
    <!-- recipe: run at HOST when training -->  the same, once all nodes have trained
    <!-- recipe: run at HOST in the background -->  the same, beside what follows
    <!-- recipe: kill NAME at HOST -->          the node with this state folder is killed
    <!-- recipe: edit FILE at HOST -->          the keys of this TOML replace those of the run file
    <!-- recipe: options, REASON -->            it can't run here; the parser looks at its options
    <!-- recipe: not run, REASON -->            it is no command of decod, and needs the world
"""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

from decod.cli.main import cli
from decod.net.join_string import DATA_LABEL, LABEL
from tests.support.cluster import child_environment
from tests.support.polling import wait_for

_BLOCK = re.compile(
    r"(?:^<!-- recipe: (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_NODE_COMMANDS = ("decod leader ", "decod join ", "python ")
_TRAINED = re.compile(r"iteration \d+ .*loss|^round \d+: ", re.MULTILINE)

_START_TIMEOUT_S = 120.0
_COMMAND_TIMEOUT_S = 900.0
"""An installation takes minutes."""
_END_TIMEOUT_S = 30.0


class Kind(Enum):
    """What a test does with a block."""

    RUN = "run"
    KILL = "kill"
    EDIT = "edit"
    OPTIONS = "options"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Block:
    """A marked block of a page."""

    kind: Kind
    text: str
    host: str = ""
    file: str = ""
    when_training: bool = False
    in_background: bool = False
    node: str = ""

    def stays(self) -> bool:
        """Return whether what follows is typed while its last command, such as a node, runs."""
        last = logical_lines(self.text)[-1]
        is_node = last.startswith(_NODE_COMMANDS) and "--dry-run" not in last
        return self.in_background or is_node


def blocks_of(page: str) -> list[Block]:
    """Return the marked blocks of a page, in order.

    Raises:
        AssertionError: Commands for a shell have no mark, or a mark is none of the known ones.
    """
    found = []
    for mark, language, text in _BLOCK.findall(page):
        if mark:
            found.append(_block(mark, text))
        else:
            assert language != "sh", f"say in a comment what a test does with this:\n{text}"
    assert page.count("<!-- recipe:") == len(found), "a mark stands before no block"
    return found


def _block(mark: str, text: str) -> Block:
    if asked := re.fullmatch(r"run at ([\w-]+)( in the background)?( when training)?", mark):
        when = {"in_background": bool(asked[2]), "when_training": bool(asked[3])}
        return Block(Kind.RUN, text, host=asked[1], **when)
    if asked := re.fullmatch(r"kill ([\w-]+) at ([\w-]+)", mark):
        return Block(Kind.KILL, text, host=asked[2], node=asked[1])
    if asked := re.fullmatch(r"edit (\S+) at ([\w-]+)", mark):
        return Block(Kind.EDIT, text, host=asked[2], file=asked[1])
    if asked := re.fullmatch(r"(options|not run), .+", mark):
        return Block(Kind(asked[1]), text)
    raise AssertionError(f"unknown mark: {mark}")


def logical_lines(text: str) -> list[str]:
    """Return the lines of a shell's input, continued ones as one."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def decod_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `decod` in a block, as a shell would split them."""
    for line in logical_lines(text):
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("();<>|&"):
                if command[:1] == ["decod"]:
                    yield command[1:]
                command = []
            else:
                command.append(word)


def check_options(arguments: list[str]) -> None:
    """Have the command line's own parser read a command, without running it.

    Raises:
        click.UsageError: There is no such command or option, or a value is impossible.
    """
    command: click.Command = cli
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        context = click.Context(command)
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, f"there is no {name}"
        command = found
    context = command.make_context(" ".join(arguments), rest)
    if arguments[:2] == ["service", "install"]:
        # What follows is a command line of its own.
        check_options(list(context.params["command"]))


def edited(run_file: str, values: Mapping[str, Any]) -> str:
    """Return a run file with other values: of its top level, and of sections, as TOML has them.

    A key that is there as a comment, since its value depends on others, is no comment any more.
    """
    section = ""
    lines = []
    left = {("", key) for key, value in values.items() if not isinstance(value, dict)}
    left |= {(name, key) for name, part in values.items() if isinstance(part, dict) for key in part}
    for line in run_file.splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        key = line.removeprefix("# ").partition(" = ")[0]
        if (section, key) in left:
            left.remove((section, key))
            value = values[section][key] if section else values[key]
            line = f"{key} = {json.dumps(value)}"  # noqa: PLW2901 - the same line, edited.
        lines.append(line)
    assert not left, f"the run file has no {left}"
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Node:
    """A node that a block has started."""

    host: str
    process: "subprocess.Popen[bytes]"
    output: Path
    command: str = ""
    leads: bool = False

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def has_ended(self) -> bool:
        """Return whether it has ended in order.

        Raises:
            AssertionError: It has ended otherwise.
        """
        code = self.process.poll()
        assert code in (None, 0), f"the node at {self.host} ended with {code}\n{self.text()}"
        return code is not None

    def has_trained(self) -> bool:
        return self.has_ended() or _TRAINED.search(self.text()) is not None

    def is_up(self) -> bool:
        return self.has_ended() or self.joins(LABEL) is not None or self.has_trained()

    def joins(self, label: str) -> str | None:
        """Return the last join string behind a label of its output, or None if there is none."""
        found = re.findall(rf"^{label} (\S+)\n", self.text(), re.MULTILINE)
        return found[-1] if found else None

    def end(self) -> None:
        """Ask it to leave; then end it."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_END_TIMEOUT_S / 2)
        self.process.kill()
        self.process.wait()


class Rehearsal:
    """Plays blocks at hosts. Leaving the `with` block ends all nodes.

    Args:
        folder: Holds a folder for each host, which is its home.
        adapt: Changes the text of a block of commands.
        resize: Changes the values of an edit.
        python: Runs decod.
    """

    def __init__(
        self,
        folder: Path,
        *,
        adapt: Callable[[str], str],
        resize: Callable[[dict[str, Any]], dict[str, Any]],
        python: Path = Path(sys.executable),
    ) -> None:
        self.folder = folder
        self.adapt = adapt
        self.resize = resize
        self.nodes: list[Node] = []
        self.output = ""
        """What all commands have printed that have ended."""
        self._ended: list[Node] = []
        """Those that were killed."""
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name, words in {"decod": "-u -m decod", "python": "-u"}.items():
            path = self._programs / name
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} {words} "$@"\n')
            path.chmod(stat.S_IRWXU)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in reversed(self.nodes):
            node.end()
        if error is None:
            assert "Traceback" not in self.output, self.output
            for node in (*self._ended, *self.nodes):
                assert "Traceback" not in node.text(), node.text()

    def home(self, host: str) -> Path:
        path = self.folder / host
        path.mkdir(exist_ok=True)
        return path

    def play(self, blocks: list[Block]) -> None:
        """Play blocks in order.

        Raises:
            AssertionError: A command fails, or a node does not come up.
        """
        for block in blocks:
            self.home(block.host)
        for block in blocks:
            if block.kind is Kind.EDIT:
                path = self.home(block.host) / block.file
                values = self.resize(tomllib.loads(block.text))
                path.write_text(edited(path.read_text("utf-8"), values), encoding="utf-8")
            elif block.kind is Kind.RUN:
                self._run(block)
            elif block.kind is Kind.KILL:
                self._kill(block)

    def _kill(self, block: Block) -> None:
        """Kill a node as a power cut would, with its compute process."""
        (node,) = (each for each in self.nodes if f"--state-dir {block.node}" in each.command)
        os.killpg(node.process.pid, signal.SIGKILL)
        node.process.wait()
        self.nodes.remove(node)
        self._ended.append(node)

    def _run(self, block: Block) -> None:
        if block.when_training:
            self._wait(lambda: all(node.has_trained() for node in self.nodes), "training")
        text = self._with_join_strings(self.adapt(block.text))
        # Commands ask the leader, so it must be there.
        self._wait(lambda: all(node.is_up() for node in self.nodes if node.leads), "the leaders")
        if block.stays():
            *before, last = logical_lines(text)
            self._start(block.host, "\n".join([*before, f"exec {last}"]))
            self.nodes[-1].command = last
            self.nodes[-1].leads = last.startswith("decod leader ") and "--join" not in last
            return
        result = subprocess.run(
            self._shell(text), cwd=self.home(block.host), env=self._environment(block.host),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        said = result.stdout.decode(errors="replace")
        self.output += said
        assert result.returncode == 0, f"{text}exit code {result.returncode}\n{said}{self.tails()}"

    def _start(self, host: str, text: str) -> None:
        number = len(self.nodes) + len(self._ended)
        output = self.folder / f"node-{number}-{host}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._shell(text), cwd=self.home(host), env=self._environment(host),
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.nodes.append(Node(host, process, output))

    def _with_join_strings(self, text: str) -> str:
        """Put the newest join string in, as soon as there is one."""
        for word, label in (("DATA_JOINSTRING", DATA_LABEL), ("JOINSTRING", LABEL)):
            if re.search(rf"\b{word}\b", text):
                found = self._wait(lambda label=label: self._newest(label), label)
                text = re.sub(rf"\b{word}\b", found, text)
        return text

    def _newest(self, label: str) -> str | None:
        living = [node for node in self.nodes if not node.has_ended()]
        return next((said for node in reversed(living) if (said := node.joins(label))), None)

    def _wait(self, look: Callable[[], Any], what: str) -> Any:
        return wait_for(look, what, timeout_s=_START_TIMEOUT_S, describe=self.tails)

    def _shell(self, text: str) -> list[str]:
        return ["bash", "-e", "-u", "-o", "pipefail", "-c", text]

    def _environment(self, host: str) -> dict[str, str]:
        """Return the environment of a host's shell: its own home, loopback, one processor."""
        kept = {
            name: value
            for name, value in child_environment().items()
            if name == "DECOD_PORTABLE" or not name.startswith(("DECOD_", "XDG_"))
        }
        return kept | {
            "HOME": str(self.home(host)),
            "PATH": os.pathsep.join((str(self._programs), kept.get("PATH", ""))),
            "DECOD_LISTEN": "127.0.0.1:0",
            "DECOD_PAGE": "127.0.0.1:0",
            "DECOD_DEVICE": "cpu",
            "DECOD_THREADS": "1",
            # A laptop on battery runs the tests, too.
            "DECOD_PAUSE_WHEN": "none",
        }

    def shown(self) -> str:
        """Return all that commands and nodes have printed so far."""
        return "\n".join([self.output, *(node.text() for node in (*self._ended, *self.nodes))])

    def tails(self) -> str:
        """Return what each node has said last."""
        return "\n".join(f"== {node.host}\n{node.text()[-2000:]}" for node in self.nodes)
