"""The install script: what it refuses, and that it installs from nothing and leaves nothing."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "install.sh"


def run(home: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script for a user whose home is a folder of the test."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("XDG_")}
    return subprocess.run(
        ["sh", str(SCRIPT), *options],
        env={**kept, "HOME": str(home), "PYTHONPATH": "", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # Without a terminal there is nobody to ask.
    )


def left_in(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["install.sh", "release", "test", "demo", "docs"])
def test_scripts_are_as_shellcheck_wants_them(name: str) -> None:
    command = ["shellcheck", "-x", "-P", "SCRIPTDIR", str(ROOT / "scripts" / name)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--torch", "tpu"], "--torch is auto, cpu, cuda, rocm or pypi"),
        (["--nonsense"], "there is no option --nonsense"),
        (["--dir"], "--dir needs a value"),
        (["--uninstall"], "nothing of this script is in"),
    ],
)
def test_wrong_options_change_nothing(options: list[str], why: str, tmp_path: Path) -> None:
    result = run(tmp_path, *options)
    assert result.returncode == 1
    assert why in result.stderr
    assert not left_in(tmp_path)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for options in (["--yes"], ["--uninstall"]):
        result = run(tmp_path, *options, "--dir", str(tmp_path / "mine"))
        assert result.returncode == 1
        assert left_in(tmp_path) == ["mine", "mine/file"]


def test_it_explains_itself_first(tmp_path: Path) -> None:
    result = run(tmp_path, "--help")
    assert result.returncode == 0
    assert "--uninstall" in result.stdout


def has_index() -> bool:
    try:
        socket.create_connection(("pypi.org", 443), timeout=5.0).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_index(), reason="no package index can be reached")
def test_it_installs_from_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """With a torch that is on this host, where pip is told of one."""
    constraint = tmp_path / "torch.txt"
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    constraint.write_text(f"torch=={found.stdout.strip()}\n")
    home = tmp_path / "home"
    home.mkdir()
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    options = ["--yes", "--torch", "pypi", "--from", str(ROOT), "--python", python]
    result = run(home, *options, UV_CONSTRAINT=str(constraint))
    assert result.returncode == 0, result.stderr
    assert "Nothing else is changed" in result.stdout
    command = home / ".local/bin/decod"
    told = subprocess.run([command, "version"], capture_output=True, text=True, check=True)
    assert "installed by script" in told.stdout
    again = run(home, *options, UV_CONSTRAINT=str(constraint))
    assert again.returncode == 0, again.stderr
    removed = run(home, "--uninstall")
    assert removed.returncode == 0, removed.stderr
    # pip asks rustc for its release, and rustup makes a folder for that.
    assert not [path for path in left_in(home) if not path.startswith(".rustup")]
