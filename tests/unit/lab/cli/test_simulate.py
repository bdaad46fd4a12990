"""`decod lab simulate`: its options, its JSON, its tables and its plots."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.installation import install_hint
from decod.lab.sim import paper, paper_churn, paper_dilocox, paper_servers, server_instances
from decod.lab.sim.paper import Progress, Row

SCENARIO = """
stages = 1
iterations = 2
microbatches = 2
activation_bytes = 1_000_000
[link]
latency_s = 0.01
bandwidth_bytes_per_s = 1e7
[[hosts]]
name = "data"
role = "data"
capacity = 2
forward_s = 0.01
backward_s = 0.02
[[hosts]]
name = "near"
role = "relay"
stage = 1
capacity = 2
forward_s = 0.1
backward_s = 0.2
"""

ROWS = [
    Row("1", "flow", "improvement", 0.25, 0.01),
    Row("1", "gwtf", "improvement", 0.125, 0.02),
    Row("1", "gwtf", "ratio_to_optimal", 0.5, 0.0, 0.75),
]


@pytest.fixture
def scenario_path(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The experiment takes no time; what it is asked for is kept."""
    numbers: list[int] = []

    def quick(num_seeds: int, progress: Progress) -> list[Row]:
        numbers.append(num_seeds)
        progress("almost nothing")
        return ROWS

    monkeypatch.setattr(paper, "joining_tests", quick)
    monkeypatch.setattr(paper_churn, "churn_tests", lambda table, *asked: quick(*asked))
    monkeypatch.setattr(paper_servers, "figure4", quick)
    return numbers


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    ("name", "num_seeds"), [("gwtf-table3", 25), ("gwtf-figure5", 10), ("servers-figure4", 30)]
)
def test_an_experiment_is_repeated_as_often_as_the_paper_s(
    asked: list[int], capsys: pytest.CaptureFixture[str], name: str, num_seeds: int
) -> None:
    run_json(capsys, "--paper", name)
    assert asked == [num_seeds]


@pytest.mark.parametrize("routing", ["flow", "greedy", "fixed", "optimal"])
def test_a_run_answers_with_its_iterations(
    scenario_path: Path, capsys: pytest.CaptureFixture[str], routing: str
) -> None:
    answer = run_json(capsys, str(scenario_path), "--routing", routing, "--seed", "3")
    assert (answer["scenario"], answer["routing"]) == (str(scenario_path), routing)
    assert (answer["seed"], answer["lost_stage"]) == (3, None)
    keys = {"duration_s", "microbatches", "time_per_microbatch_s", "communication_s", "wasted_s"}
    assert answer["mean"].keys() == keys
    assert [row["iteration"] for row in answer["iterations"]] == [1, 2]
    for row in answer["iterations"]:
        assert row.keys() == {"iteration"} | keys
        assert row["microbatches"] == 2
        assert row["duration_s"] == 2 * row["time_per_microbatch_s"] > 0.6
        # Both microbatches, there and back, twice; the second waits for the first.
        assert row["communication_s"] > 8 * 0.11


def test_a_run_is_the_same_each_time(
    scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(capsys, str(scenario_path)) == run_json(capsys, str(scenario_path))


def test_people_get_a_table_of_the_run(
    scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(scenario_path)]) == 0
    out = capsys.readouterr().out
    assert "SECONDS EACH" in out
    assert "mean" in out
    assert "routing flow, seed 0" in out


def test_a_stage_that_loses_its_last_host_ends_the_run_early(
    scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill = '[[faults]]\nkind = "kill"\nhost = "near"\nat_s = 6\n'
    longer = SCENARIO.replace("iterations = 2", "iterations = 50")
    scenario_path.write_text(longer + kill)
    answer = run_json(capsys, str(scenario_path))
    assert answer["lost_stage"] == 1
    assert 0 < len(answer["iterations"]) < 50
    assert main(["simulate", str(scenario_path)]) == 0
    assert "stage 1 lost its last host" in capsys.readouterr().out


def fault(kind: str, host: str, at_s: float) -> str:
    return f'[[faults]]\nkind = "{kind}"\nhost = "{host}"\nat_s = {at_s}\n'


@pytest.mark.parametrize(
    ("kind", "at_s"),
    [("kill", 0.01), ("kill", 0.8), ("vanish", 0.01), ("vanish", 0.8), ("freeze", 0.8)],
)
def test_a_stage_that_is_lost_before_the_first_iteration_ends_the_run(
    scenario_path: Path, capsys: pytest.CaptureFixture[str], kind: str, at_s: float
) -> None:
    """Before and after it has joined: the leader would wait for another one for ever."""
    scenario_path.write_text(SCENARIO + fault(kind, "near", at_s))
    answer = run_json(capsys, str(scenario_path))
    assert (answer["lost_stage"], answer["iterations"]) == (1, [])
    assert main(["simulate", str(scenario_path)]) == 0
    expected = "stage 1 lost its last host, before the first iteration was committed"
    assert expected in " ".join(capsys.readouterr().out.split())


def test_a_host_that_stands_still_before_it_enters_is_waited_for(
    scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no member that would have to be removed."""
    scenario_path.write_text(SCENARIO + fault("freeze", "near", 0.01))
    answer = run_json(capsys, str(scenario_path))
    assert (answer["lost_stage"], len(answer["iterations"])) == (None, 2)


@pytest.mark.parametrize("kind", ["kill", "vanish", "restart"])
@pytest.mark.parametrize("at_s", [0.5, 3.0])
def test_a_run_that_loses_its_leader_says_so(
    scenario_path: Path, capsys: pytest.CaptureFixture[str], kind: str, at_s: float
) -> None:
    scenario_path.write_text(SCENARIO + fault(kind, "data", at_s))
    assert main(["simulate", str(scenario_path)]) == 3
    error = capsys.readouterr().err
    assert f"E-CFG-070 {scenario_path}: host data was lost, the data node that leads" in error
    assert "duration_max_s" not in error


def test_a_run_whose_first_iteration_waits_in_vain_says_for_what(
    scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relay = SCENARIO[SCENARIO.rindex("[[hosts]]") :].replace("near", "far")
    restart = fault("restart", "far", 0.02)
    scenario_path.write_text(SCENARIO + relay + fault("kill", "far", 0.01) + restart)
    assert main(["simulate", str(scenario_path)]) == 3
    expected = "1 of 2 hosts are left that the first iteration waits for at stage 1"
    assert expected in capsys.readouterr().err
    scenario_path.write_text(SCENARIO + relay + fault("restart", "far", 0.5))
    assert len(run_json(capsys, str(scenario_path))["iterations"]) == 2


def test_a_run_without_an_end_is_an_error_with_a_way_out(
    scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario_path.write_text(f"duration_max_s = 1\n{SCENARIO}")
    assert main(["simulate", str(scenario_path)]) == 3
    error = capsys.readouterr().err
    assert "E-CFG-070" in error
    assert "no end of the run within 1.0 s" in error
    assert "Traceback" not in error


def test_bad_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "none.toml")]) == 3
    assert "E-CFG-066 cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either SCENARIO.toml or --paper"),
        (["a.toml", "--paper", "gwtf-table5"], "give either SCENARIO.toml or --paper"),
        (["a.toml", "--seeds", "2"], "--seeds and --plot belong to --paper"),
        (["a.toml", "--plot", "a.svg"], "--seeds and --plot belong to --paper"),
        (["--paper", "gwtf-table5", "--seed", "2"], "--routing and --seed belong to SCENARIO"),
        (["--paper", "gwtf-table9"], "is not one of"),
        (["--paper", "gwtf-table5", "--seeds", "0"], "is not in the range"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_experiment_answers_with_rows(
    asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run_json(capsys, "--paper", "gwtf-figure5", "--seeds", "4")
    assert asked == [4]
    assert answer["paper"] == "gwtf-figure5"
    keys = ["setting", "policy", "metric", "mean", "stdev", "paper"]
    assert [list(row) for row in answer["rows"]] == [keys] * len(ROWS)
    assert answer["rows"][2] == {
        "setting": "1",
        "policy": "gwtf",
        "metric": "ratio_to_optimal",
        "mean": 0.5,
        "stdev": 0.0,
        "paper": 0.75,
    }
    assert answer["rows"][0]["paper"] is None


def test_rates_of_dilocox_are_said_to_be_fitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row("1.3B", "dilocox", "tokens_per_s", 23_800.0, 0.0, 23_880.0)]
    monkeypatch.setattr(paper_dilocox, "figure4", lambda *_: rows)
    answer = run_json(capsys, "--paper", "dilocox-figure4")
    assert "fitted" in answer["note"]
    assert answer["rows"] == [asdict(row) for row in rows]


def test_table_1_of_dilocox_marks_the_losses_of_the_small_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Row("107B", "dilocox", "tokens_per_s", 3_700.0, 0.0, 3_728.0),
        Row("107B", "dilocox", "small_model_loss", 2.011, 0.0, 4.2),
    ]
    monkeypatch.setattr(paper_dilocox, "table1", lambda *_: rows)
    answer = run_json(capsys, "--paper", "dilocox-table1")
    assert "small model" in answer["note"]
    assert answer["rows"] == [asdict(row) for row in rows]
    assert main(["simulate", "--paper", "dilocox-table1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "TOKENS PER S PAPER SMALL MODEL LOSS PAPER" in out
    assert "measured on a small model" in out


@pytest.mark.slow
def test_the_experiments_of_the_paper_on_servers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = [name for name in paper_servers.TABLE_2 if name != "pipeline"]
    albert = [server_instances.ALBERT]
    small = partial(paper_servers.table2, models=albert, cases=[3], systems=quick)
    monkeypatch.setattr(paper_servers, "table2", small)
    answer = run_json(capsys, "--paper", "servers-table2", "--seeds", "2")
    assert "fitted" in answer["note"]
    assert {(row["policy"], row["paper"]) for row in answer["rows"]} >= {
        ("servers", 74.8),
        ("pipedream", 85.2),
        ("dapple", 79.1),
        ("swarm", 77.5),
    }
    for name in ("figure2", "figure4", "figure5"):
        monkeypatch.setattr(paper_servers, name, lambda *_: ROWS)
        answer = run_json(capsys, "--paper", f"servers-{name}")
        assert "fitted" in answer["note"]


def test_people_see_the_papers_figures_beside_ours(
    asked: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--paper", "gwtf-figure5"]) == 0
    assert asked == [10]
    lines = capsys.readouterr().out.splitlines()
    titles = " ".join(lines[0].split())
    assert titles == "SETTING POLICY IMPROVEMENT RATIO TO OPTIMAL PAPER"
    assert lines[1].split() == ["1", "flow", "25.00%", "±", "1.00%", "-", "-"]
    assert lines[2].split() == ["gwtf", "12.50%", "±", "2.00%", "0.500", "±", "0.000", "0.75"]


@pytest.mark.parametrize("suffix", ["png", "SVG"])
def test_figures_can_be_drawn(asked: list[int], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"figure.{suffix}"
    assert main(["simulate", "--paper", "gwtf-figure5", "--plot", str(path)]) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in content


@pytest.mark.parametrize(
    ("name", "message"),
    [("figure.pdf", ".png, .svg"), ("missing/figure.png", "there is no such folder")],
)
def test_a_plot_that_cannot_be_written_costs_no_time(
    asked: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["simulate", "--paper", "gwtf-figure5", "--plot", str(tmp_path / name)]) == 3
    error = capsys.readouterr().err
    assert "E-CFG-065" in error
    assert message in error
    assert asked == []


def test_without_matplotlib_a_plot_says_what_to_install(
    asked: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", "--paper", "gwtf-figure5", "--plot", str(tmp_path / "a.png")]) == 3
    error = capsys.readouterr().err
    assert "E-CFG-064" in error
    assert install_hint("plot") in error
    assert asked == []
