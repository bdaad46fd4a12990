"""Daemons of most tests are forked: they are what they would be if each were started by itself."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.cluster import DECOD, child_environment, run_decod
from tests.support.forked import ForkedProcess, fork
from tests.support.polling import wait_for

pytestmark = pytest.mark.processes


SERVER = (sys.executable, "-u", "-m", "http.server", "0")
"""Something that does not end by itself."""


def forked_in(folder: Path, *command: str) -> ForkedProcess:
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        return fork(command, child_environment(), stdout, stderr)


@pytest.mark.parametrize("arguments", [("--version",), ("join", "nonsense"), ("leader", "absent")])
def test_a_forked_command_says_what_a_started_one_says(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    started, forked = run_decod(*arguments, fork=False), forked_in(tmp_path, *DECOD, *arguments)
    assert forked.wait(60.0) == started.returncode
    assert (tmp_path / "stdout").read_text(encoding="utf-8") == started.stdout
    assert (tmp_path / "stderr").read_text(encoding="utf-8") == started.stderr


def test_a_forked_process_has_a_session_and_a_command_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forked, other = forked_in(tmp_path, *SERVER), forked_in(tmp_path, *SERVER)
    try:
        assert forked.poll() is None
        assert len({forked.pid, other.pid, os.getpid()}) == 3
        wait_for(lambda: "http.server" in command_line(forked.pid), "its module", timeout_s=60.0)
        assert os.getsid(forked.pid) == forked.pid
        assert os.readlink(f"/proc/{forked.pid}/cwd") == str(tmp_path)
    finally:
        forked.send_signal(signal.SIGTERM)
        other.kill()
    assert forked.wait(60.0) == -signal.SIGTERM
    assert other.wait(60.0) == -signal.SIGKILL
    forked.kill()  # It has ended: nobody else is struck.


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
