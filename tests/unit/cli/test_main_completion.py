"""Shells complete command lines: the shells' own scripts, and what they ask decod."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from decod.cli.main import COMMANDS, cli
from decod.cli.run_command import MODEL_PRESET_NAMES, SYNC_PRESET_NAMES
from decod.config.presets import MODEL_PRESETS, PRESETS

HEAVY = {"torch", "numpy", "grpc", "pydantic", "transformers", "tokenizers"}
"""Modules that take time to import. A shell waits for each completion."""

ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A command `decod`."""
    path = tmp_path / "decod"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m decod "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def completions(*given: str, incomplete: str) -> list[str]:
    """What may follow a command line's beginning."""
    found = ShellComplete(cli, {}, "decod", "_DECOD_COMPLETE").get_completions(
        list(given), incomplete
    )
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in found]


def ask(shell: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Ask as the shell's script does: the last word is the one to complete."""
    asked = {
        "_DECOD_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    code = (
        "import sys; sys.argv = ['decod']\nfrom decod.__main__ import run\ntry: run()\n"
        f"finally: sys.stderr.write(' '.join({HEAVY} & set(sys.modules)))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | asked,
        check=False,
    )


def test_bash_completes_with_the_script_that_decod_prints(program: Path) -> None:
    """A subcommand, an option and a choice, in a real bash."""
    lines = [
        f"PATH={program.parent}:$PATH",
        'eval "$(_DECOD_COMPLETE=bash_source decod)"',
        "complete -p decod",
    ]
    for words in (
        "decod rec",
        "decod checkpoint v",
        "decod join --dut",
        "decod run init --preset d",
    ):
        lines += [
            f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}",
            'COMPREPLY=(); _decod_completion decod; echo "${COMPREPLY[*]}"',
        ]
    result = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert not result.stderr
    assert result.stdout.splitlines() == [
        "complete -o nosort -F _decod_completion decod",
        "receipts",
        "verify",
        "--duty",
        "diloco dilocox",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_valid(shell: str, program: Path, tmp_path: Path) -> None:
    script = subprocess.run(
        [str(program)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"_DECOD_COMPLETE": f"{shell}_source"},
        check=False,
    ).stdout
    assert f"_DECOD_COMPLETE={shell}_complete" in script
    if found := shutil.which(shell):
        (tmp_path / "script").write_text(script, encoding="utf-8")
        subprocess.run([found, "--no-execute", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(
    ("shell", "words", "answer"),
    [
        ("bash", ["decod", "pau"], "plain,pause\n"),
        ("bash", ["decod", "join", "--duty", "f"], "plain,frontal\n"),
        ("zsh", ["decod", "pau"], f"plain\npause\n{COMMANDS['pause']}\n"),
        ("zsh", ["decod", "join", "--duty", "f"], "plain\nfrontal\n_\n"),
        ("fish", ["decod", "pau"], f"plain,pause\t{COMMANDS['pause']}\n"),
        ("fish", ["decod", "join", "--duty", "f"], "plain,frontal\n"),
    ],
)
def test_each_shell_gets_a_subcommand_and_a_choice(
    shell: str, words: list[str], answer: str
) -> None:
    result = ask(shell, *words)
    assert (result.stdout, result.returncode) == (answer, 0)


def groups() -> Iterator[tuple[str, ...]]:
    """Everything behind which something is completed, as words behind `decod`."""
    yield ()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        yield (name,)
        if isinstance(command, click.Group):
            yield from ((name, child) for child in command.commands)


def test_completing_imports_nothing_heavy() -> None:
    """In one process, which completes behind every command."""
    lines = [list(words) for words in groups()]
    code = (
        "import sys\nfrom click.shell_completion import ShellComplete\n"
        "from decod.cli.main import cli\n"
        f"for words in {lines}:\n"
        "    for begun in ('', '--'):\n"
        "        ShellComplete(cli, {}, 'decod', '').get_completions(words, begun)\n"
        f"sys.exit(' '.join({HEAVY} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.stderr, result.returncode) == (b"\n", 1), "an empty list of modules"


def test_a_commands_name_is_completed_without_importing_commands() -> None:
    code = (
        "import sys\nfrom click.shell_completion import ShellComplete\n"
        "from decod.cli.main import cli, COMMANDS\n"
        "found = ShellComplete(cli, {}, 'decod', '').get_completions([], '')\n"
        "assert [item.value for item in found] == list(COMMANDS), found\n"
        "assert not {f'decod.cli.{name}_command' for name in COMMANDS} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("given", "incomplete", "found"),
    [
        ("", "r", ["resume", "receipts", "run"]),
        ("", "--v", ["--version"]),
        ("token create --role", "", ["volunteer", "data"]),
        ("join --stage", "", ["auto"]),
        ("leader --capacity", "a", ["auto"]),
        ("leader --resume", "", ["latest", "auto"]),
        ("checkpoint verify", "l", ["latest"]),
        ("demo --device", "c", ["cpu", "cuda"]),
        ("leader", "ru", ["<file>"]),
        ("join --join-file", "", ["<file>"]),
        ("join --state-dir", "", ["<dir>"]),
        ("leader run.toml --export", "mo", ["<dir>"]),
        ("analyse one", "t", ["<file>"]),
        ("data prepare --tokenizer", "b", ["bytes", "<file>"]),
        ("service install", "", ["join", "leader"]),
        ("service install join --device", "cp", ["cpu"]),
        ("service install leader", "ru", ["<file>"]),
        ("join", "", []),
    ],
)
def test_values_are_completed(given: str, incomplete: str, found: list[str]) -> None:
    assert completions(*given.split(), incomplete=incomplete) == found


def test_every_preset_is_completed() -> None:
    assert tuple(PRESETS) == SYNC_PRESET_NAMES
    assert tuple(MODEL_PRESETS) == MODEL_PRESET_NAMES
