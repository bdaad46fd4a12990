"""`decod run init` and `decod run check`."""

from pathlib import Path

import pytest

from decod.cli.main import main
from decod.config import RunConfig, load_run_file


def test_init_writes_a_file_that_check_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["run", "init", str(path)]) == 0
    assert load_run_file(path).run == RunConfig()
    assert main(["run", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert "is valid" in text
    assert "parameters         918,912" in text
    assert "stage 2            blocks 2 to 3" in text


def test_init_writes_to_the_terminal_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init", "-"]) == 0
    assert "[optimizer]" in capsys.readouterr().out


def test_init_replaces_a_file_only_when_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine" * 10_000)
    assert main(["run", "init", str(path)]) == 3
    assert "E-CFG-007" in capsys.readouterr().err
    assert path.read_text().startswith("mine")
    assert main(["run", "init", "--force", str(path)]) == 0
    assert load_run_file(path).run == RunConfig()


def test_init_says_why_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init", str(tmp_path / "no" / "run.toml")]) == 3
    assert "No such file or directory" in capsys.readouterr().err


def test_check_names_the_line_of_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nhiden_size = 1\n")
    assert main(["run", "check", str(path)]) == 3
    assert "run.toml:2: unknown key model.hiden_size" in capsys.readouterr().err
