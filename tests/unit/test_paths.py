"""Folders of the home, and relative paths, on hosts that have neither."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from decod.cli.main import COMMANDS
from decod.errors import ConfigError
from decod.paths import absolute_path, current_folder, full_path, user_folder

DECOD = (sys.executable, "-m", "decod")
NOBODY = ("unshare", "-U", "--map-user=12345", "--map-group=12345")
"""Begins a command as a user who has no entry in the list of users."""


def can_be_nobody() -> bool:
    try:
        return subprocess.run([*NOBODY, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_home_that_is_known_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert full_path(Path("~/x")) == tmp_path / "x"
    assert user_folder("state") == tmp_path / ".local/state/decod"
    assert user_folder("cache") == tmp_path / ".cache/decod"
    assert user_folder("config", "systemd") == tmp_path / ".config/systemd"
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert user_folder("state") == Path("/elsewhere/decod")


def test_a_home_that_is_not_known_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def has_no_entry(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    for kind, remedy in (
        ("state", "set HOME, XDG_STATE_HOME or --state-dir"),
        ("cache", "set HOME, XDG_CACHE_HOME"),
    ):
        with pytest.raises(ConfigError, match="E-CFG-100") as caught:
            user_folder(kind)
        assert caught.value.fix == remedy
    with pytest.raises(ConfigError, match=r"E-CFG-100 can't find the home in ~no-such-user/x"):
        full_path(Path("~no-such-user/x"))


def test_a_folder_that_is_gone_is_an_error_for_relative_paths_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert absolute_path(Path("x")) == gone / "x"
    gone.rmdir()
    assert absolute_path(tmp_path) == tmp_path
    for attempt in (current_folder, lambda: full_path(Path("x"))):
        with pytest.raises(ConfigError, match="E-CFG-101"):
            attempt()


@pytest.mark.skipif(not can_be_nobody(), reason="needs namespaces of users")
@pytest.mark.parametrize(
    "command", [("status",), ("doctor",), ("leader", "x.toml"), ("generate", "a"), ("set",)]
)
def test_without_a_home_a_command_ends_with_one_line(command: tuple[str, ...]) -> None:
    bare = (*NOBODY, "env", "-i", f"PATH={os.environ['PATH']}")
    done = subprocess.run([*bare, *DECOD, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: E-CFG-100 ")
    assert line.endswith("Try: set HOME, XDG_STATE_HOME or --state-dir")


@pytest.mark.skipif(not can_be_nobody(), reason="needs namespaces of users")
def test_without_a_home_every_command_explains_itself() -> None:
    bare = (*NOBODY, "env", "-i", f"PATH={os.environ['PATH']}")
    code = (
        "import sys; from decod.cli.main import main\n"
        "for name in sys.argv[1:]: assert main([name, '--help']) == 0, name"
    )
    subprocess.run([*bare, sys.executable, "-c", code, *COMMANDS], check=True, capture_output=True)
