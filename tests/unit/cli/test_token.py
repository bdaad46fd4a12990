"""`decod token`: what it asks the daemon, and what it prints."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.daemon import control
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.unit.daemon.nodes import make_node

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the state folder of a leader, which answers the commands."""
    answering(tmp_path, monkeypatch, leads=True)
    return tmp_path


def answering(folder: Path, monkeypatch: pytest.MonkeyPatch, *, leads: bool) -> None:
    def ask(state_dir: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        async def answer() -> dict[str, Any]:
            with make_node(folder, leads=leads) as node:
                node.address = "10.0.0.1:7700"
                return await node.answer(json.loads(json.dumps(request)))

        assert state_dir == folder
        return asyncio.run(answer())

    monkeypatch.setattr(control, "ask", ask)


def token(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["token", *map(str, arguments)]) == 0
    return capsys.readouterr().out.strip()


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[dict[str, Any]]:
    return list(json.loads(token(capsys, "list", "--json", "--state-dir", folder)))


def test_a_token_is_made_listed_and_revoked(
    leader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert token(capsys, "list", "--state-dir", leader) == "no tokens"
    where = ("--state-dir", leader)
    text = token(capsys, "create", "--ttl", "7d", "--uses", "3", "--note", "chess club", *where)
    join = JoinString.parse(text)
    assert join.addresses == ("10.0.0.1:7700",)
    assert join.token is not None
    assert join.token.role is Role.RELAY
    (record,) = listed(capsys, leader)
    assert record["id"] == join.token.id
    assert (record["role"], record["state"], record["used"], record["uses"]) == (
        "volunteer",
        "live",
        0,
        3,
    )
    assert 7 * 86_400 - 60 < record["expires_in_s"] <= 7 * 86_400
    shown = token(capsys, "list", *where)
    assert "chess club" in shown
    assert "7 d" in shown
    assert "lets nobody in" in token(capsys, "revoke", join.token.id, *where)
    assert listed(capsys, leader)[0]["state"] == "revoked"


@pytest.mark.parametrize(
    ("role", "begins"),
    [("volunteer", "decod join decod1-v-"), ("data", "decod leader RUN.toml --join decod1-d-")],
)
def test_the_whole_command_is_printed_if_asked_for(
    leader: Path, capsys: pytest.CaptureFixture[str], role: str, begins: str
) -> None:
    arguments = ("create", "--role", role, "--print-join-command", "--state-dir", leader)
    assert token(capsys, *arguments).startswith(begins)


def test_what_can_not_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(tmp_path, monkeypatch, leads=False)
    assert main(["token", "create", "--state-dir", str(tmp_path)]) == 3
    assert "E-CFG-056 this node is a volunteer's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "exit_code", "told"),
    [
        (("revoke", "aaaaaaaa"), 3, "E-CFG-058 no token 'aaaaaaaa' is known"),
        (("create", "--ttl", "31d"), 2, "is not between 1s and 720h"),
        (("create", "--uses", "0"), 2, "uses"),
        (("create", "--role", "king"), 2, "king"),
    ],
)
def test_wrong_arguments_are_told(
    leader: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    exit_code: int,
    told: str,
) -> None:
    assert main(["token", *arguments, "--state-dir", str(leader)]) == exit_code
    assert told in capsys.readouterr().err


def test_a_change_that_the_leader_does_not_know_of_yet_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has done its work: what is printed can be used by scripts."""
    answer = {"join_string": "decod1-v-x", "unshared": "no answer from h:1: nobody listens there"}
    monkeypatch.setattr(control, "ask", lambda *_, **__: answer)
    assert main(["token", "create", "--state-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == "decod1-v-x\n"
    assert said.err.startswith("warning: the leader will hear of this later (no answer from h:1")
