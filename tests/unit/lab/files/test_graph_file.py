"""Graph and candidate files: what is meant is read, and every mistake is named with its place."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.strict import STDIN
from decod.errors import ConfigError
from decod.lab.files.graph_file import check_negotiable, load_candidates, load_graph
from decod.planner.graph import FlowGraph
from tests.support.flow_graphs import flow_graphs
from tests.support.json_content import changed

GRAPH: dict[str, Any] = {
    "stages": 2,
    "nodes": [
        {"id": "d", "role": "data", "stage": 0, "capacity": 3},
        {"id": "a", "role": "relay", "stage": 1, "capacity": 2},
        {"id": "b", "role": "relay", "stage": 2, "capacity": 2},
    ],
    "links": [
        {"from": "d", "to": "a", "cost": 1.5},
        {"from": "a", "to": "b", "cost": 2},
        {"from": "b", "to": "d", "cost": 0},
    ],
}
CANDIDATES: dict[str, Any] = {
    "candidates": [
        {"id": "x", "capacity": 1, "links": [{"node": "d", "cost": 1}, {"node": "y", "cost": 2}]},
        {"id": "y", "capacity": 2, "links": [{"node": "a", "cost": 3.5}]},
    ]
}


def _load(folder: Path, content: object) -> FlowGraph:
    path = folder / "graph.json"
    match content:
        case bytes():
            path.write_bytes(content)
        case str():
            path.write_text(content, encoding="utf-8")
        case _:
            path.write_text(json.dumps(content), encoding="utf-8")
    return load_graph(path)


def _error(folder: Path, content: object) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(folder, content)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_graph_is_read_as_it_stands(tmp_path: Path) -> None:
    graph = _load(tmp_path, GRAPH)
    assert graph.num_stages == 2
    assert [graph.nodes[name].stage_index for name in "dab"] == [0, 1, 2]
    assert [graph.nodes[name].capacity for name in "dab"] == [3, 2, 2]
    assert graph.costs == {("d", "a"): 1.5, ("a", "b"): 2.0, ("b", "d"): 0.0}


@given(graph=flow_graphs())
def test_every_graph_survives_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, graph: FlowGraph
) -> None:
    nodes = [
        {
            "id": node.node_id,
            "role": "relay" if node.stage_index else "data",
            "stage": node.stage_index,
            "capacity": node.capacity,
        }
        for node in graph.nodes.values()
    ]
    links = [{"from": a, "to": b, "cost": cost} for (a, b), cost in graph.costs.items()]
    content = {"stages": graph.num_stages, "nodes": nodes, "links": links}
    assert _load(tmp_path_factory.mktemp("graph"), content) == graph


def test_what_carries_nothing_is_still_a_graph(tmp_path: Path) -> None:
    empty = {"stages": 2, "nodes": [{"id": "d", "role": "data", "capacity": 1}], "links": []}
    assert _load(tmp_path, empty).stage(1) == []
    assert _load(tmp_path, changed(GRAPH, "nodes", 1, "capacity", to=0)).nodes
    assert _load(tmp_path, changed(GRAPH, "links", to=[])).costs == {}


def test_the_standard_input_is_read_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, expected in ((json.dumps(GRAPH), None), ("[", "standard input:1:2")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        if expected is None:
            assert load_graph(STDIN).num_stages == 2
            continue
        with pytest.raises(ConfigError, match=expected):
            load_graph(STDIN)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "E-CFG-051 graph.json:1:1: not valid JSON: the file is empty"),
        ("  \n", "E-CFG-051 graph.json:2:1: not valid JSON: the file is empty"),
        ("{", "E-CFG-051 graph.json:1:2: not valid JSON: expecting property name"),
        ('{\n"stages": 1,,}', "E-CFG-051 graph.json:2:13: not valid JSON"),
        (b'{"stages"\n: "\xff"}', "E-CFG-051 graph.json:2: not valid JSON: byte 0xff is not UTF-8"),
        (b"\xff\xfe{\x00", "byte 0xff is not UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00", "byte 0x89 is not UTF-8"),
        ("\ufeff{}", "E-CFG-051 graph.json:1:1: not valid JSON"),
        ("[" * 100_000, "brackets are nested too deeply"),
        ('{"stages": NaN}', "NaN is no number of JSON's"),
        ('{"stages": -Infinity}', "-Infinity is no number"),
        ('{"stages": 1, "stages": 2}', "the key 'stages' stands twice in one object"),
        ('{"stages": ' + "9" * 5000 + "}", "not valid JSON: "),
        ("[]", "E-CFG-052 graph.json: is []: it must be an object {}"),
        ("null", "E-CFG-052 graph.json: is None: it must be an object {}"),
        ("{}", "E-CFG-052 graph.json: stages: missing (2 more like this in the file)"),
    ],
)
def test_a_file_that_is_no_object_is_refused(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    assert expected in _error(tmp_path, content)


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("stages",), 0, "stages: is 0: it must be at least 1"),
        (("stages",), "2", "stages: is '2': it must be an integer"),
        (("stages",), 2.0, "stages: is 2.0: it must be an integer"),
        (("stages",), True, "stages: is True: it must be an integer"),
        (("stages",), 10**6, "stages: is 1000000: it must be at most 1000"),
        (("nodes",), {}, "nodes: is {}: it must be a list []"),
        (("stagse",), 1, "stagse: unknown key"),
        (("nodes", 0), 3, "nodes[0]: is 3: it must be an object {}"),
        (("nodes", 0), {}, "nodes[0].id: missing"),
        (("nodes", 1, "capacity"), -1, "nodes[1].capacity: is -1"),
        (("nodes", 1, "capacity"), None, "nodes[1].capacity: is None: it must be an integer"),
        (("nodes", 1, "role"), "leader", "nodes[1].role: is 'leader': it must be 'data' or "),
        (("nodes", 1, "id"), "", "is '': it must be a string with at least 1 character."),
        (("nodes", 1, "id"), 7, 'nodes[1].id: is 7: it must be a string in "quotes"'),
        (("nodes", 1, "id"), "x" * 65, "it must be a string with at most 64 characters."),
        (("nodes", 1, "capacty"), 1, "nodes[1].capacty: unknown key"),
        (("links", 1, "cost"), -0.5, "links[1].cost: is -0.5: it must be at least 0"),
        (("links", 1, "cost"), "1", "links[1].cost: is '1': it must be a number"),
        (("links", 1, "cost"), False, "links[1].cost: is False: it must be a number"),
        (("links", 1, "cost"), 1e300, "links[1].cost: is 1e+300: it must be at most 10000"),
        (("links", 1, "cost"), 10**400, "links[1].cost: is an integer of 1329 bits"),
        (("links", 1), {"from": "a", "to": "b"}, "links[1].cost: missing"),
        (("links", 1, "from"), None, "links[1].from: is None"),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_named(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, expected: str
) -> None:
    message = _error(tmp_path, changed(GRAPH, *keys, to=value))
    assert message.startswith("E-CFG-052 graph.json: ")
    assert expected in message


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("nodes", 1, "id"), "b", "nodes[2].id: 'b' is taken by another node"),
        (("nodes", 1, "id"), "a\u202e", "nodes[1].id: 'a\\u202e' holds characters that do not"),
        (("nodes", 1, "id"), " a", "nodes[1].id: ' a' holds characters that do not show"),
        (("nodes", 0, "stage"), 1, "nodes[0].stage: node 'd' of role data has stage 1"),
        (("nodes", 1, "stage"), 0, "nodes[1].stage: node 'a' of role relay has stage 0"),
        (("nodes", 1, "stage"), 3, "the stage of a relay node is one of 1 to 2"),
        (("nodes",), [], "nodes: there is no data node"),
        (
            ("nodes", 1, "capacity"),
            10_001,
            "nodes[1].capacity: node 'a' has a capacity of 10001: the limit is 10000. Try: lower",
        ),
        (("nodes", 1, "capacity"), 10**30, "has a capacity of an integer of 100 bits: the limit"),
        (("links", 0, "to"), "A", "links[0].to: there is no node 'A'"),
        (("links", 3), {"from": "d", "to": "b", "cost": 1}, "runs from stage 0 to stage 2"),
        (("links", 3), {"from": "b", "to": "a", "cost": 1}, "runs from stage 2 to stage 1"),
        (("links", 3), {"from": "a", "to": "a", "cost": 1}, "runs from stage 1 to stage 1"),
        (("links", 3), {"from": "a", "to": "d", "cost": 1}, "runs from stage 1 to stage 0"),
        (("links", 3), {"from": "a", "to": "b", "cost": 2}, "links[3]: the link 'a' > 'b' stands"),
    ],
)
def test_parts_that_make_no_graph_are_named(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, expected: str
) -> None:
    message = _error(tmp_path, changed(GRAPH, *keys, to=value))
    assert message.startswith("E-CFG-053 graph.json: ")
    assert expected in message


def test_a_near_miss_is_guessed(tmp_path: Path) -> None:
    graph = changed(GRAPH, "nodes", 1, "id", to="relay-1")
    graph = changed(graph, "links", 0, "to", to="relay1")
    assert "Try: did you mean 'relay-1'?" in _error(tmp_path, graph)
    assert "did you mean capacity?" in _error(tmp_path, changed(GRAPH, "nodes", 1, "capacty", to=1))


def test_too_many_flows_to_list_are_refused(tmp_path: Path) -> None:
    graph = changed(GRAPH, "nodes", 0, "capacity", to=10_000)
    assert _load(tmp_path, graph).nodes
    more = changed(graph, "nodes", 3, to={"id": "e", "role": "data", "capacity": 1})
    expected = "the data nodes want 10001 flows in all, 10000 of them at 'd': flows are"
    assert expected in _error(tmp_path, more)


def test_too_many_flows_to_negotiate_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    check_negotiable(path, _load(tmp_path, changed(GRAPH, "nodes", 0, "capacity", to=1000)))
    expected = r"graph.json: nodes: .* 1001 of them at 'd': .* limit here is 1000\. Try: .*optimal"
    with pytest.raises(ConfigError, match=expected):
        check_negotiable(path, _load(tmp_path, changed(GRAPH, "nodes", 0, "capacity", to=1001)))


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(ConfigError, match="E-CFG-050 cannot read"):
            load_graph(path)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_no_content_ends_in_anything_but_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str
) -> None:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError):
        load_graph(path)


def test_candidates_are_read_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps(CANDIDATES))
    first, second = load_candidates(path, _load(tmp_path, GRAPH))
    assert (first.node_id, first.capacity, first.costs) == ("x", 1, {"d": 1.0, "y": 2.0})
    assert (second.node_id, second.capacity, second.costs) == ("y", 2, {"a": 3.5})


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("candidates", 0, "id"), "a", "candidates[0].id: 'a' is taken by another node"),
        (("candidates", 1, "id"), "x", "candidates[1].id: 'x' is taken by another node"),
        (("candidates", 0, "capacity"), -1, "candidates[0].capacity: is -1"),
        (("candidates", 0, "capacity"), 10_001, "candidates[0].capacity: node 'x' has a capacity"),
        (("candidates", 0, "links", 0, "node"), "z", "links[0].node: there is no node 'z'"),
        (("candidates", 0, "links", 0, "node"), "x", "'x' cannot be linked: it is the candidate"),
        (("candidates", 0, "links", 0, "node"), "y", "'y' cannot be linked: it stands there twice"),
        (("candidates", 0, "links", 0, "cost"), -1, "candidates[0].links[0].cost: is -1"),
        (("candidates", 1, "links", 1), {"node": "x", "cost": 9}, "that candidate gives 2"),
        (("candidates",), None, "candidates: is None: it must be a list []"),
    ],
)
def test_candidates_that_cannot_be_meant_are_named(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, expected: str
) -> None:
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps(changed(CANDIDATES, *keys, to=value)))
    graph = _load(tmp_path, GRAPH)
    with pytest.raises(ConfigError) as caught:
        load_candidates(path, graph)
    assert f"{path}: candidates" in str(caught.value)
    assert expected in str(caught.value)


def test_a_cost_that_both_candidates_give_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "candidates.json"
    values = changed(CANDIDATES, "candidates", 1, "links", 1, to={"node": "x", "cost": 2})
    path.write_text(json.dumps(values))
    assert len(load_candidates(path, _load(tmp_path, GRAPH))) == 2
