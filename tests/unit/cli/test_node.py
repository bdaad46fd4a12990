"""`decod node`: what it asks the daemon, what it prints, and what can't be done."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.membership.ban_list import BanBook
from decod.membership.identity import name_of
from decod.membership.papers import membership_folder
from tests.support.members import ROOT, data_node, host_key
from tests.unit.cli.test_token import answering
from tests.unit.daemon.nodes import make_node

LIAR = host_key("liar").node_id
FOUNDER = data_node("leader").node_id


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the state folder of a leader, which answers the commands."""
    answering(tmp_path, monkeypatch, leads=True)
    return tmp_path


def decod_node(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    assert main(["node", *arguments, "--state-dir", str(folder)]) == 0
    return capsys.readouterr().out.strip()


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[dict[str, Any]]:
    return list(json.loads(decod_node(capsys, folder, "list", "--json")))


def book(folder: Path) -> BanBook:
    return BanBook(ROOT.public, membership_folder(folder, ROOT.public))


def test_a_node_is_banned_listed_and_let_in_again(
    leader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It need not be there. The leader's core has not started here either."""
    assert decod_node(capsys, leader, "list") == "no nodes yet"
    asked = ("ban", LIAR, "--for", "7d", "--reason", "its gradients are noise")
    text = decod_node(capsys, leader, *asked)
    assert f"{name_of(LIAR)} ({LIAR}) is banned by " in text
    assert text.endswith(": its gradients are noise")
    (found,) = listed(capsys, leader)
    assert (found["id"], found["name"], found["state"]) == (LIAR, name_of(LIAR), "gone")
    assert 7 * 86_400 - 60 < found["ban"]["ends_in_s"] <= 7 * 86_400
    assert not book(leader).allowed(LIAR), "it is on disk"
    shown = decod_node(capsys, leader, "list")
    assert LIAR[:12] in shown
    assert "its gradients are noise" in shown
    assert "its gradients are noise" in decod_node(capsys, leader, "show", name_of(LIAR))
    assert "may join again" in decod_node(capsys, leader, "unban", LIAR[:8])
    assert book(leader).allowed(LIAR)
    assert listed(capsys, leader) == []


def test_a_ban_lasts_a_day_or_for_ever_if_that_is_said(
    leader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decod_node(capsys, leader, "ban", LIAR)
    (found,) = listed(capsys, leader)
    assert 86_400 - 60 < found["ban"]["ends_in_s"] <= 86_400
    assert "for ever" in decod_node(capsys, leader, "ban", LIAR, "--forever")
    (found,) = listed(capsys, leader)
    assert found["ban"]["ends_in_s"] is None
    shown = json.loads(decod_node(capsys, leader, "show", LIAR, "--json"))
    assert shown["ban"] == found["ban"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "told"),
    [
        (("ban", "brave-otter"), 3, "E-CFG-087 'brave-otter' names no node"),
        (("ban", FOUNDER), 3, "E-CFG-083 .* its host has started"),
        (("ban", LIAR, "--reason", "x" * 201), 3, "E-CFG-085 a reason of 201 characters"),
        (("ban", LIAR, "--reason", "a\x1b[31m"), 3, "E-CFG-085 .*printable"),
        (("ban", LIAR, "--for", "11000d"), 2, "is not between"),
        (("unban", LIAR), 3, "E-CFG-086 .* is not banned"),
        (("show", "abc"), 3, "E-CFG-087 'abc' names no node"),
    ],
)
def test_what_can_not_be_done_is_told(
    leader: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    exit_code: int,
    told: str,
) -> None:
    assert main(["node", *arguments, "--state-dir", str(leader)]) == exit_code
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("command", [("list",), ("show", LIAR), ("ban", LIAR), ("unban", LIAR)])
def test_only_the_leader_answers_and_others_say_where_it_is(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    answering(tmp_path, monkeypatch, leads=False)
    assert main(["node", *command, "--state-dir", str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert "E-RUN-003 this node does not lead the run" in error
    assert "127.0.0.1:1" in error


def test_the_leader_can_not_ban_itself(leader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def own_id() -> str:
        with make_node(leader) as node:
            return node.node_id

    assert main(["node", "ban", asyncio.run(own_id()), "--state-dir", str(leader)]) == 3
    assert "it leads the run" in capsys.readouterr().err
