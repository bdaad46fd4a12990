"""`decod analyse` as it is typed: text, JSON, plots, and what it says of bad input."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.exit_codes import ExitCode
from decod.installation import install_hint
from decod.journal.records import line_of
from tests.support.timed_rounds import SimulatedOptimizer, SimulatedPeer

PEERS = tuple(SimulatedPeer(name=name, uplink_bytes_per_s=2e6) for name in ("ant", "bee"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(line_of, SimulatedOptimizer(peers=PEERS).rows())))
    return path


def test_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", str(file)]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "Averaging holds the run back" in said
    assert 'set compression="int4"' in said
    assert "ant" in said


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", str(file), "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert report["main_cause"] == "averaging"
    assert report["changes"][0]["gain"] > 0.5
    assert [peer["name"] for peer in report["peers"]] == ["ant", "bee"]


def test_plots(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "plots"
    assert main(["analyse", str(file), "--plots", str(folder)]) == ExitCode.OK
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["causes.png", "changes.png", "peers.png", "rounds.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    assert "causes.png" in capsys.readouterr().err


def test_without_matplotlib_the_error_says_how_to_get_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main(["analyse", str(file), "--plots", str(tmp_path / "plots")]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "E-CFG-064" in said
    assert install_hint("plot") in said


def test_plots_need_a_folder(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", str(file), "--plots", str(file / "plots")]) == ExitCode.CONFIG
    assert "E-CFG-065" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere"], "E-DAT-040"),
        (["FILE", "--run", "another"], "E-DAT-042"),
    ],
)
def test_bad_input(
    file: Path, arguments: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(file) if each == "FILE" else each for each in arguments]
    assert main(["analyse", *given]) == ExitCode.DATA
    assert code in capsys.readouterr().err
