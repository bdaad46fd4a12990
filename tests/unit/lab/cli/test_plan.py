"""`decod lab plan route` and `decod lab plan join`."""

import io
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.lab.planner.optimal import optimal_routes
from decod.planner.graph import FlowGraph, Route

GRAPH = {
    "stages": 1,
    "nodes": [
        {"id": "d", "role": "data", "stage": 0, "capacity": 3},
        {"id": "near", "role": "relay", "stage": 1, "capacity": 1},
        {"id": "far", "role": "relay", "stage": 1, "capacity": 1},
    ],
    "links": [
        {"from": "d", "to": "near", "cost": 1},
        {"from": "near", "to": "d", "cost": 1},
        {"from": "d", "to": "far", "cost": 4},
        {"from": "far", "to": "d", "cost": 4},
    ],
}
CANDIDATES = {"candidates": [{"id": "new", "capacity": 1, "links": [{"node": "d", "cost": 2}]}]}


@pytest.fixture
def graph_path(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    return path


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("algorithm", ["greedy", "fixed", "optimal"])
def test_an_answer_lists_every_flow(
    graph_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    answer = _json(capsys, "route", str(graph_path), "--algorithm", algorithm)
    assert answer == {
        "algorithm": algorithm,
        "rounds": 0,
        "flows": [
            {"data_node": "d", "path": ["d", "far", "d"], "cost": 8},
            {"data_node": "d", "path": ["d", "near", "d"], "cost": 2},
        ],
        "total_cost": 10,
        "mean_cost": 5,
        "unrouted": 1,
        "messages_per_node": {"mean": 0, "max": 0},
    }


@pytest.mark.parametrize("algorithm", ["greedy", "fixed", "optimal"])
def test_a_stage_without_relays_leaves_all_flows_unrouted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**GRAPH, "nodes": GRAPH["nodes"][:1], "links": []}))
    answer = _json(capsys, "route", str(path), "--algorithm", algorithm)
    assert (answer["flows"], answer["unrouted"]) == ([], 3)
    assert (answer["total_cost"], answer["mean_cost"]) == (0, None)
    assert main(["plan", "route", str(path), "--algorithm", algorithm]) == 0
    assert f"{algorithm}: 0 flows; 3 unrouted" in capsys.readouterr().out


def test_people_get_a_table(graph_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "route", str(graph_path), "--algorithm", "optimal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["FLOWS", "COST", "PATH"]
    assert lines[2].split() == ["1", "2", "d", ">", "near", ">", "d"]
    assert lines[-1] == "optimal: 2 flows; cost 10, 5 each; 1 unrouted"


def test_a_graph_may_come_from_the_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(GRAPH).encode())))
    assert _json(capsys, "route", "-", "--algorithm", "optimal")["total_cost"] == 10


def test_the_busiest_link_is_relieved_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{**node, "capacity": 2} for node in GRAPH["nodes"]]
    links = [{**link, "cost": min(link["cost"], 1.5)} for link in GRAPH["links"]]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**GRAPH, "nodes": nodes, "links": links}))
    by_objective = {
        objective: _json(
            capsys, "route", str(path), "--algorithm", "optimal", "--objective", objective
        )
        for objective in ("sum", "max")
    }
    assert by_objective["sum"]["total_cost"] == 4
    assert [flow["path"][1] for flow in by_objective["max"]["flows"]] == ["far", "near"]


def test_negotiated_routes_show_what_they_took(
    graph_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's side of the agreement with the simulated negotiation."""

    def negotiate(
        graph: FlowGraph, *, algorithm: str, rounds: int, seed: int, objective: str
    ) -> object:
        assert (algorithm, rounds, seed, objective) == ("gwtf", 9, 4, "max")
        routes: list[Route] = optimal_routes(graph)
        return types.SimpleNamespace(
            routes=routes, rounds=7, messages_per_node_mean=2.5, messages_per_node_max=6
        )

    fake = types.SimpleNamespace(negotiate=negotiate, rounds_min=lambda *_: 8)
    monkeypatch.setitem(sys.modules, "decod.lab.sim.routing_trial", fake)
    options = ["--algorithm", "gwtf", "--rounds", "9", "--seed", "4", "--objective", "max"]
    answer = _json(capsys, "route", str(graph_path), *options)
    assert (answer["algorithm"], answer["rounds"]) == ("gwtf", 7)
    assert answer["messages_per_node"] == {"mean": 2.5, "max": 6}
    assert main(["plan", "route", str(graph_path), *options]) == 0
    assert "7 rounds with 2.5 messages a node, at most 6" in capsys.readouterr().out


def _chain(path: Path, num_stages: int, capacity: int = 2) -> Path:
    """A graph with one node in each stage."""
    names = [str(index) for index in range(num_stages + 1)]
    nodes = [
        {"id": name, "role": "relay" if stage else "data", "stage": stage, "capacity": capacity}
        for stage, name in enumerate(names)
    ]
    hops = itertools.pairwise([*names, names[0]])
    links = [{"from": begin, "to": end, "cost": 1} for begin, end in hops]
    path.write_text(json.dumps({"stages": num_stages, "nodes": nodes, "links": links}))
    return path


@pytest.mark.parametrize("algorithm", ["flow", "gwtf"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_too_few_rounds_are_told_with_how_many_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, num_stages: int
) -> None:
    """What the hint says is exact where nobody is in anybody's way."""
    command = ["route", str(_chain(tmp_path / "graph.json", num_stages)), "--algorithm", algorithm]
    assert main(["plan", *command, "--rounds", "3", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["unrouted"] == 2
    assert f"hint: 3 rounds are too few for {num_stages} stages: " in captured.err
    least = int(captured.err.split("at least ")[1].split(",")[0])
    assert _json(capsys, *command, "--rounds", str(least - 1))["flows"] == []
    assert _json(capsys, *command, "--rounds", str(least))["flows"]
    assert main(["plan", *command]) == 0
    assert capsys.readouterr().err == ""


def test_the_hint_is_careful_where_rounds_may_suffice(
    graph_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here a flow finds no room in any number of rounds."""
    command = ["plan", "route", str(graph_path), "--rounds"]
    assert main([*command, "12"]) == 0
    assert capsys.readouterr().err.startswith("hint: 12 rounds may be too few for 1 stages")
    assert main([*command, "60"]) == 0
    assert capsys.readouterr().err == ""


def test_more_flows_than_can_be_negotiated_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _chain(tmp_path / "graph.json", 1, capacity=1001)
    for algorithm in ("flow", "gwtf"):
        assert main(["plan", "route", str(path), "--algorithm", algorithm]) == 3
        assert f"E-CFG-053 {path}: nodes: the data nodes want 1001" in capsys.readouterr().err
    assert len(_json(capsys, "route", str(path), "--algorithm", "greedy")["flows"]) == 1001


@pytest.mark.parametrize("policy", ["utilisation", "gwtf", "capacity", "random", "optimal"])
def test_joins_give_place_and_cost(
    graph_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    candidates = graph_path.with_name("candidates.json")
    candidates.write_text(json.dumps(CANDIDATES))
    arguments = ["join", str(graph_path), "--candidates", str(candidates), "--policy", policy]
    answer = _json(capsys, *arguments)
    assert answer["policy"] == policy
    assert answer["joins"] == [
        {
            "node": "new",
            "stage": 1,
            "flows_before": 2,
            "flows_after": 3,
            "cost_before": 10,
            "cost_after": 14,
            "improvement": pytest.approx(1 - (14 / 3) / 5),
        }
    ]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "2 > 3" in text
    assert f"{policy}: 1 nodes placed" in text


def test_both_files_cannot_be_the_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "join", "-", "--candidates", "-"]) == 2
    assert "only one of the two files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--algorithm", "best"], 2),
        (["--rounds", "0"], 2),
        (["--rounds", "10001"], 2),
        (["--seed", "-1"], 2),
        (["--seed", "x"], 2),
        (["--objective", "min"], 2),
    ],
)
def test_wrong_options_are_usage_errors(graph_path: Path, options: list[str], code: int) -> None:
    assert main(["plan", "route", str(graph_path), *options]) == code


def test_a_bad_graph_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    path.write_text('{"stages": 1}')
    assert main(["plan", "route", str(path), "--algorithm", "greedy", "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: E-CFG-052 {path}: nodes: missing")
    assert main(["plan", "route", str(tmp_path / "none.json")]) == 3


def test_an_empty_list_of_candidates_places_nobody(
    graph_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = graph_path.with_name("candidates.json")
    candidates.write_text('{"candidates": []}')
    assert main(["plan", "join", str(graph_path), "--candidates", str(candidates)]) == 0
    assert "nobody wants to join" in capsys.readouterr().out
