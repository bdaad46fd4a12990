"""`decod lab plan servers`."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main

HOSTS: dict[str, Any] = {
    "work": {
        "layers": 4,
        "microbatches": 8,
        "activation_bytes": 1_000_000,
        "layer_bytes": 1_000_000,
    },
    "hosts": [
        {"id": "d", "kind": "data"},
        {"id": "s1", "kind": "reliable", "speed": 4},
        {"id": "s2", "kind": "reliable", "computes": False},
        {"id": "c1", "kind": "unreliable", "speed": 8},
        {"id": "c2", "kind": "unreliable", "speed": 8},
    ],
    "default_link": {"latency_s": 0.001, "bandwidth_bytes_per_s": 125_000_000},
}
METHODS = ["decod", "paper", "local", "exact"]


@pytest.fixture
def hosts_path(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(HOSTS))
    return path


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "servers", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("method", METHODS)
def test_the_layout_of_an_answer_can_be_timed_again(
    hosts_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    answer = _json(capsys, str(hosts_path), "--method", method)
    assert answer["method"] == method
    assert sum(stage["layers"] for stage in answer["layout"]["stages"]) == 4
    assert answer["iteration_s"] >= answer["pipeline_s"] >= answer["fill_s"] > 0
    assert [sum(shares.values()) for shares in answer["microbatches"]] == [8] * len(
        answer["layout"]["stages"]
    )
    layout_path = tmp_path / "layout.json"
    layout_path.write_text(json.dumps(answer["layout"]))
    again = _json(capsys, str(hosts_path), "--layout", str(layout_path))
    assert again == {**answer, "method": "given"}


def test_no_method_beats_the_exact_one(
    hosts_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {
        method: _json(capsys, str(hosts_path), "--method", method)["iteration_s"]
        for method in METHODS
    }
    assert min(times.values()) == pytest.approx(times["exact"])
    assert times["decod"] <= 1.15 * times["exact"]


def test_people_get_a_table(hosts_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "servers", str(hosts_path), "--stages", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "STAGE", "LAYERS", "BUSY", "AGGREGATION", "FRONTAL", "BACKWARD", "CLIENTS",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert lines[3].startswith("decod: ")
    assert lines[3].endswith(" aggregation")
    assert lines[4].startswith("bottleneck: the workers of stage ")
    assert "twice as fast: " in lines[5]


def test_many_hosts_of_a_stage_are_counted(
    hosts_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [{"id": f"v{i}", "kind": "unreliable", "speed": 0.01} for i in range(12)]
    hosts_path.write_text(json.dumps({**HOSTS, "hosts": HOSTS["hosts"] + more}))
    assert main(["plan", "servers", str(hosts_path)]) == 0
    assert " and " in capsys.readouterr().out.splitlines()[-1]


def test_hosts_may_come_from_the_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(HOSTS).encode())))
    assert _json(capsys, "-")["layout"]
    assert main(["plan", "servers", "-", "--layout", "-"]) == 2
    assert "only one of the two files" in capsys.readouterr().err


def test_a_given_layout_takes_no_number_of_stages(
    hosts_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "servers", str(hosts_path), "--layout", "x", "--stages", "2"]) == 2
    assert "it takes no --stages" in capsys.readouterr().err


def test_errors_are_named(
    hosts_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout_path = tmp_path / "layout.json"
    idle = {"layers": 2, "frontal": ["s2"], "backward": ["s2"]}
    busy = {"layers": 2, "frontal": ["s1"], "backward": ["s1"], "clients": ["c1"]}
    layout_path.write_text(json.dumps({"stages": [busy, idle]}))
    assert main(["plan", "servers", str(hosts_path), "--layout", str(layout_path)]) == 3
    assert "E-CFG-059 the layout has no worker for stages[1]" in capsys.readouterr().err
    assert main(["plan", "servers", str(hosts_path), "--stages", "3"]) == 3
    assert "E-CFG-063 --method decod finds no layout with --stages 3" in capsys.readouterr().err
    large = {**HOSTS, "work": {**HOSTS["work"], "layers": 17}}
    hosts_path.write_text(json.dumps(large))
    assert main(["plan", "servers", str(hosts_path), "--method", "exact"]) == 3
    assert "E-CFG-063 there are too many hosts or layers" in capsys.readouterr().err
    hosts_path.write_text(json.dumps({**HOSTS, "hosts": HOSTS["hosts"][:1]}))
    assert main(["plan", "servers", str(hosts_path)]) == 3
    assert f"E-CFG-055 {hosts_path}: hosts: there is no reliable host" in capsys.readouterr().err
