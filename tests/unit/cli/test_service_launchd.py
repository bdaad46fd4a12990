"""`decod service` on macOS: the agent that it writes, and what it has launchd do (a stand-in)."""

import os
import plistlib
import sys
from pathlib import Path

import pytest

from decod.cli.main import main
from decod.cli.service_manager import state_in
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role

JOIN = str(
    JoinString(root=bytes(32), addresses=("127.0.0.1:7700",), token=Token(Role.RELAY, bytes(20)))
)

LAUNCHCTL = """#!/bin/sh
# Knows one agent at a time, as launchctl does: `loaded` holds its file.
at=$(dirname "$0")
echo "$@" >> "$at/calls"
case "$1" in
bootstrap) [ -f "$3" ] || { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; }
    echo "$3" > "$at/loaded" ;;
bootout) rm "$at/loaded" ;;
print) [ -f "$at/loaded" ] || exit 113
    echo "$2 = {"
    echo "	state = running"
    echo "	last exit code = (never exited)" ;;
esac
"""


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of a user of a Mac."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "launchctl").write_text(LAUNCHCTL)
    (programs / "launchctl").chmod(0o755)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def calls(mac: Path) -> list[str]:
    done = (mac / "programs" / "calls").read_text().splitlines()
    return [line.split()[0] for line in done]


def install(mac: Path, *arguments: str) -> int:
    (mac / "join.txt").write_text(JOIN)
    state = ("--state-dir", str(mac / "state"))
    node = ("join", "--join-file", str(mac / "join.txt"), *state)
    return main(["service", "install", *arguments, *node])


def test_a_node_becomes_an_agent_that_starts_again(mac: Path) -> None:
    assert install(mac) == 0
    path = mac / "Library/LaunchAgents/org.decod.decod.plist"
    agent = plistlib.loads(path.read_bytes())
    command = agent["ProgramArguments"]
    assert command[:4] == [sys.executable, "-m", "decod", "join"]
    assert command[-2:] == ["--state-dir", str(mac / "state")]
    assert JOIN not in path.read_text(), "other users can read it"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] >= 60
    assert calls(mac) == ["print", "print", "bootstrap"]
    assert (mac / "programs/loaded").read_text().strip() == str(path)


def test_it_is_stopped_started_shown_and_removed(
    mac: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(mac, "--no-start") == 0
    assert main(["service", "status"]) == 7
    assert "not loaded" in capsys.readouterr().out
    assert main(["service", "start"]) == 0
    assert main(["service", "status"]) == 0
    assert "decod: running" in capsys.readouterr().out
    assert main(["service", "stop"]) == 0
    assert main(["service", "status"]) == 7
    assert main(["service", "uninstall"]) == 0
    assert not list((mac / "Library/LaunchAgents").iterdir())


def test_what_launchd_refuses_is_told(mac: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install(mac, "--no-start") == 0
    (mac / "programs/launchctl").write_text("#!/bin/sh\necho no such domain >&2\nexit 125\n")
    assert main(["service", "start"]) == 1
    assert "no such domain" in capsys.readouterr().err


def test_a_service_of_the_machine_is_refused(mac: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install(mac, "--system") == 2
    assert "leave out --system" in capsys.readouterr().err


def test_states_are_read_from_what_launchctl_prints() -> None:
    ended = "gui/501/x = {\n\tstate = not running\n\tlast exit code = 6\n}\n"
    assert state_in(ended) == (False, "not running, last exit code 6")
    assert state_in("") == (False, "unknown")
