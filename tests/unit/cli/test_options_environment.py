"""Every option has an environment variable, and an error names the one that has set a value."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from decod.cli import demo_nodes
from decod.cli.main import COMMANDS, cli, main
from decod.cli.node_options import node_config
from decod.cli.options import environment_of_nodes, variables_of
from decod.cli.service_command import _parsed
from decod.cli.service_manager import Systemd
from tests.support.machines import ROOT

SECRETS = {("leader", "--join")}
"""Options without a variable."""

SAME_MEANING = {"DECOD_DRAIN_TIMEOUT"}
"""Of `decod drain --timeout`, and the short one of a node's `--drain-timeout`."""


def all_options() -> Iterator[tuple[str, click.Option]]:
    """Each option, with the command that takes it."""

    def below(command: click.Command, words: str) -> Iterator[tuple[str, click.Option]]:
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield words, parameter
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                yield from below(child, f"{words} {name}")

    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield from below(command, name)


def parsed(*arguments: str) -> click.Context:
    """The context of a command with its values, without running it."""
    name, *rest = arguments
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    return command.make_context(name, rest)


def test_every_option_has_a_variable_of_its_own() -> None:
    seen: dict[str, str] = {}
    for words, option in all_options():
        spelling = next(text for text in option.opts if text.startswith("--"))
        if (words, spelling) in SECRETS:
            assert not variables_of(option)
            continue
        own, *short = variables_of(option)
        assert own == f"decod {words} {spelling[2:]}".upper().replace(" ", "_").replace("-", "_")
        assert own not in seen, (words, seen[own])
        seen[own] = words
        assert set(short) <= {f"DECOD_{spelling[2:]}".upper().replace("-", "_")}
    shared = {name for _, option in all_options() for name in variables_of(option)[1:]}
    assert shared & set(seen) == SAME_MEANING


def test_variables_are_named_once_however_often_a_command_is_looked_up() -> None:
    for _ in range(2):
        device = next(p for p in parsed("join").command.params if p.name == "device")
    assert variables_of(device) == ["DECOD_JOIN_DEVICE", "DECOD_DEVICE"]


def test_the_reference_lists_the_short_variables() -> None:
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    part = text.partition("\n## Environment variables\n")[2]
    listed = set(re.findall(r"`(DECOD_[A-Z_]+)`", part.partition("\n### ")[2]))
    listed = {name for name in listed if f"| `{name}` |" in part}
    assert listed == {name for _, option in all_options() for name in variables_of(option)[1:]}


def test_the_command_line_wins_over_the_own_variable_and_that_over_the_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DECOD_DEVICE", "cuda:1")
    assert parsed("join", "J").params["device"] == "cuda:1"
    assert parsed("leader", "run.toml").params["device"] == "cuda:1"
    monkeypatch.setenv("DECOD_JOIN_DEVICE", "cuda:2")
    assert parsed("join", "J").params["device"] == "cuda:2"
    assert parsed("leader", "run.toml").params["device"] == "cuda:1"
    assert parsed("join", "J", "--device", "cpu").params["device"] == "cpu"


def test_all_kinds_of_options_take_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "DECOD_STATE_DIR": "/tmp/one",
        "DECOD_LISTEN": "[::1]:7701",
        "DECOD_CAPACITY": "8",
        "DECOD_UPLOAD_MAX": "20Mbit",
        "DECOD_DRAIN_TIMEOUT": "5m",
        "DECOD_NO_REJOIN": "1",
        "DECOD_NAME": "brave-otter",
        "DECOD_JOIN_STAGE": "3",
        "DECOD_JOIN_DUTY": "frontal",
        "DECOD_STATUS_WATCH": "5s",
        "DECOD_STATUS_JSON": "yes",
        "DECOD_SERVICE_STOP_SYSTEM": "true",
        "DECOD_RUN_INIT_PRESET": "diloco",
        "DECOD_THREADS": "",
    }.items():
        monkeypatch.setenv(name, text)
    joined = parsed("join", "J")
    node = node_config(joined.params)
    assert (node.state_dir, node.listen_host, node.listen_port) == (Path("/tmp/one"), "::1", 7701)
    assert (node.capacity, node.upload_max_mbit, node.drain_timeout_s) == (8, 20.0, 300.0)
    assert (node.rejoins, node.name, node.num_threads) == (False, "brave-otter", None)
    assert (joined.params["stage"], joined.params["duty"]) == (3, "frontal")
    status = parsed("status").params
    assert (status["interval_s"], status["as_json"]) == (5.0, True)
    assert status["state_dir"] == Path("/tmp/one")
    assert parsed("service", "stop").params["of_system"] is True
    assert parsed("run", "init").params["presets"] == ("diloco",)


@pytest.mark.parametrize(
    ("variable", "text", "arguments", "code"),
    [
        ("DECOD_JOIN_STAGE", "first", ["join", "J"], 2),
        ("DECOD_CAPACITY", "many", ["join", "J"], 2),
        ("DECOD_THREADS", "0", ["join", "J"], 2),
        ("DECOD_DRAIN_TIMEOUT", "60", ["join", "J"], 2),
        ("DECOD_LISTEN", "a b", ["join", "J"], 2),
        ("DECOD_NO_REJOIN", "perhaps", ["join", "J"], 2),
        ("DECOD_JOIN_DUTY", "all", ["join", "J"], 2),
        ("DECOD_RUN_INIT_PRESET", "best", ["run", "init", "-"], 2),
        ("DECOD_STATUS_WATCH", "2s", ["status", "--check"], 2),
        ("DECOD_DEVICE", "gpu", ["join", "J"], 3),
        ("DECOD_UPLOAD_MAX", "1kbit", ["join", "J"], 3),
        ("DECOD_ADVERTISE", "a:b", ["join", "J"], 3),
        ("DECOD_NAME", "a b", ["join", "J"], 3),
        ("DECOD_JOIN_FILE", "/no/such/file", ["join"], 3),
        ("DECOD_STATE_DIR", "/no/such/folder", ["status"], 7),
    ],
)
def test_an_error_names_the_variable_that_has_set_the_value(
    variable: str,
    text: str,
    arguments: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert error.count(f"(set by {variable})") == 1, error
    assert "Traceback" not in error


def test_an_error_names_no_variable_that_has_nothing_to_do_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECOD_CAPACITY", "4096")
    monkeypatch.setenv("DECOD_NAME", "otter")
    assert main(["join", "J", "--device", "gpu"]) == 3
    assert main(["join", "J", "--nonsense"]) == 2
    assert main(["join", "J", "--stage", "4096x"]) == 2
    assert "set by" not in capsys.readouterr().err


def test_a_join_string_on_the_command_line_wins_over_the_variable_with_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DECOD_JOIN_FILE", "/no/such/file")
    assert parsed("join", "J").params["join_file"] is None
    assert parsed("join").params["join_file"] == Path("/no/such/file")
    assert parsed("leader", "run.toml").params["join_file"] is None
    monkeypatch.setenv("DECOD_LEADER_JOIN_FILE", "/no/such/file")
    assert parsed("leader", "run.toml").params["join_file"] == Path("/no/such/file")
    assert parsed("leader", "run.toml", "--join", "J").params["join_file"] is None


def test_a_service_keeps_what_variables_say_when_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").touch()
    monkeypatch.setenv("DECOD_DEVICE", "cuda:1")
    monkeypatch.setenv("DECOD_NO_REJOIN", "0")
    monkeypatch.setenv("DECOD_LEADER_RESUME", "latest")
    monkeypatch.setenv("DECOD_STATE_DIR", str(tmp_path / "state"))
    command = ["leader", str(tmp_path / "run.toml"), "--capacity", "8"]
    asked = _parsed(command, Systemd(of_system=False), "decod")
    words = " ".join(asked.arguments)
    assert {"--device cuda:1", "--capacity 8", "--resume latest"} <= {
        " ".join(pair) for pair in zip(asked.arguments, asked.arguments[1:], strict=False)
    }, words
    assert "--no-rejoin" not in words
    assert asked.state_dir_given
    assert asked.node.state_dir == tmp_path / "state"
    monkeypatch.setenv("DECOD_JOIN_DRY_RUN", "1")
    with pytest.raises(click.UsageError, match="dry run"):
        _parsed(["join", "J"], Systemd(of_system=False), "decod")


def test_the_demos_nodes_see_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A join string in one, say, would make its leader a data node of another run."""
    monkeypatch.setenv("DECOD_LEADER_JOIN_FILE", "/no/such/file")
    monkeypatch.setenv("OTHER", "kept")
    assert not [name for name in environment_of_nodes() if name.startswith("DECOD_")]
    assert environment_of_nodes()["OTHER"] == "kept"
    assert demo_nodes.environment_of_nodes is environment_of_nodes


def test_the_help_of_a_command_shows_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.endswith("set options, too: --name is DECOD_JOIN_NAME or DECOD_NAME.")
    assert main(["status", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.endswith("--state-dir is DECOD_STATUS_STATE_DIR or DECOD_STATE_DIR.")
