"""A home that is read-only, and a disk that is full: one error with a remedy, and no traceback."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from decod.cli.main import main
from decod.exit_codes import ExitCode
from tests.support.disk import read_only, small_disk
from tests.unit.cli.test_join import TEXT, assert_told

ON_IT: dict[str, tuple[list[str], set[ExitCode]]] = {
    "join": (
        ["join", TEXT, "--state-dir", "{disk}/state", "--listen", "127.0.0.1:0", "--no-page"],
        {ExitCode.CONFIG, ExitCode.HARDWARE},
    ),
    "leader": (
        ["leader", "{place}/run.toml", "--state-dir", "{disk}/state", "--no-page"],
        {ExitCode.CONFIG, ExitCode.HARDWARE},
    ),
    "run init": (["run", "init", "{disk}/run.toml"], {ExitCode.CONFIG}),
    "data prepare": (
        ["data", "prepare", "{disk}/corpus", "{place}/text.txt"],
        {ExitCode.DATA, ExitCode.HARDWARE},
    ),
}


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    with small_disk(folder, 64 << 10):
        with suppress(OSError), (folder / "rest").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield


@contextmanager
def read_only_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    with read_only(folder):
        yield


@pytest.mark.parametrize("disk", [read_only_disk, full_disk])
@pytest.mark.parametrize("command", ON_IT)
def test_a_disk_that_takes_nothing_is_told(
    command: str,
    disk: Callable[[Path], AbstractContextManager[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 20_000)
    assert main(["data", "prepare", str(tmp_path / "corpus"), str(tmp_path / "text.txt")]) == 0
    (tmp_path / "run.toml").write_text('[data]\npath = "corpus"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "disk"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "disk"))
    typed, codes = ON_IT[command]
    arguments = [each.format(disk=tmp_path / "disk", place=tmp_path) for each in typed]
    with disk(tmp_path / "disk"):
        capfd.readouterr()
        code = main(arguments)
        said = capfd.readouterr()
    assert code in codes, said
    assert_told(said.err, str(tmp_path / "disk"))
