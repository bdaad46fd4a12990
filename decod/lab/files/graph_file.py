"""Reading of the routing problem from JSON: a flow graph, and candidates that may join it.

docs/research/lab.md describes both files. An error names the file and the place in it. A graph may
be unable to carry flows, and still be valid: it may have a stage without relays, a node of capacity
0, or a missing link.
"""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import Field

from decod.config.strict import StrictModel, list_model_keys, name_of, read_json, show_value
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.lab.planner.joins import Newcomer
from decod.planner.graph import FlowGraph, GraphNode, Link

NUM_STAGES_MAX = 1000
CAPACITY_MAX = 10_000
"""Largest capacity of a node, and of all data nodes together: each flow is listed singly."""
NEGOTIATED_FLOWS_MAX = 1000
"""Largest capacity of all data nodes together if nodes negotiate. That takes up to half a minute,
and four times as long for twice as many flows."""
COST_MAX = 1e15
"""Largest cost of a link. A float of this size resolves 1/8 of the unit."""

_Id = Annotated[str, Field(min_length=1, max_length=64)]
_Capacity = Annotated[int, Field(ge=0)]
_Cost = Annotated[float, Field(ge=0, le=COST_MAX)]


class _NodeEntry(StrictModel):
    id: _Id
    role: Literal["data", "relay"]
    stage: Annotated[int, Field(ge=0, le=NUM_STAGES_MAX)] = 0
    """Optional for data nodes."""
    capacity: _Capacity


class _LinkEntry(StrictModel):
    # The file's key, `from`, is a keyword of Python.
    begin: _Id = Field(alias="from")
    end: _Id = Field(alias="to")
    cost: _Cost


class _GraphFile(StrictModel):
    stages: Annotated[int, Field(ge=1, le=NUM_STAGES_MAX)]
    nodes: list[_NodeEntry]
    links: list[_LinkEntry]


class _KnownEntry(StrictModel):
    node: _Id
    cost: _Cost


class _CandidateEntry(StrictModel):
    id: _Id
    capacity: _Capacity
    links: list[_KnownEntry]


class _CandidatesFile(StrictModel):
    candidates: list[_CandidateEntry]


_KEYS = list_model_keys(
    (_GraphFile, _NodeEntry, _LinkEntry, _CandidatesFile, _CandidateEntry, _KnownEntry)
)


def load_graph(path: Path) -> FlowGraph:
    """Return the graph that a file describes. `-` stands for the standard input.

    Raises:
        ConfigError: E-CFG-050 unreadable, E-CFG-051 not JSON, E-CFG-052 a key is missing, unknown
            or of a wrong type or size, E-CFG-053 the parts do not make a graph.
    """
    file = read_json(path, _GraphFile, _KEYS)
    nodes: dict[NodeId, GraphNode] = {}
    for index, entry in enumerate(file.nodes):
        place = f"nodes[{index}]"
        _check_id(path, place, entry.id, nodes)
        _check_stage(path, place, entry, file.stages)
        _check_capacity(path, place, entry.id, entry.capacity)
        nodes[NodeId(entry.id)] = GraphNode(NodeId(entry.id), entry.stage, entry.capacity)
    if not any(node.stage_index == 0 for node in nodes.values()):
        _refuse(path, "nodes", "there is no data node", "flows begin and end there", "add one")
    graph = FlowGraph(file.stages, nodes, _read_links(path, file, nodes))
    _check_wanted(path, graph, CAPACITY_MAX, "lower their capacities")
    return graph


def check_negotiable(path: Path, graph: FlowGraph) -> None:
    """Check that a graph has few enough flows for its nodes to negotiate, unit by unit.

    Raises:
        ConfigError: The data nodes want too many flows (E-CFG-053).
    """
    fix = "lower their capacities, or choose --algorithm optimal, greedy or fixed"
    _check_wanted(path, graph, NEGOTIATED_FLOWS_MAX, fix)


def load_candidates(path: Path, graph: FlowGraph) -> list[Newcomer]:
    """Return the candidates that a file describes. `-` stands for the standard input.

    A candidate's links may lead to nodes of the graph and to other candidates. A cost between two
    candidates holds for both, even if only one of them gives it.

    Raises:
        ConfigError: See `load_graph`.
    """
    file = read_json(path, _CandidatesFile, _KEYS)
    seen = dict.fromkeys(graph.nodes)
    for index, entry in enumerate(file.candidates):
        _check_id(path, f"candidates[{index}]", entry.id, seen)
        _check_capacity(path, f"candidates[{index}]", entry.id, entry.capacity)
        seen[NodeId(entry.id)] = None
    newcomers: dict[NodeId, Newcomer] = {}
    for index, entry in enumerate(file.candidates):
        costs: dict[NodeId, float] = {}
        for position, link in enumerate(entry.links):
            place, other = f"candidates[{index}].links[{position}]", NodeId(link.node)
            _check_known(path, f"{place}.node", other, seen)
            if other == entry.id or other in costs:
                why = "it is the candidate itself" if other == entry.id else "it stands there twice"
                _refuse(path, place, f"{show_value(other)} cannot be linked", why, "remove it")
            theirs = newcomers[other].costs.get(NodeId(entry.id)) if other in newcomers else None
            if theirs is not None and theirs != link.cost:
                _refuse(
                    path,
                    place,
                    f"the cost to {show_value(other)} is {link.cost:g}",
                    f"that candidate gives {theirs:g}, and the cost of a pair is one number",
                    "give it once",
                )
            costs[other] = link.cost
        newcomers[NodeId(entry.id)] = Newcomer(NodeId(entry.id), entry.capacity, costs)
    return list(newcomers.values())


def _read_links(path: Path, file: _GraphFile, nodes: dict[NodeId, GraphNode]) -> dict[Link, float]:
    costs: dict[Link, float] = {}
    for index, entry in enumerate(file.links):
        place = f"links[{index}]"
        begin, end = NodeId(entry.begin), NodeId(entry.end)
        _check_known(path, f"{place}.from", begin, nodes)
        _check_known(path, f"{place}.to", end, nodes)
        here, there = nodes[begin].stage_index, nodes[end].stage_index
        if there != (here + 1) % (file.stages + 1):
            _refuse(
                path,
                place,
                f"the link {show_value(begin)} > {show_value(end)} runs from stage {here} "
                f"to stage {there}",
                f"links lead to the next stage, and from stage {file.stages} back to a data node",
                "remove it, or correct the stages of its nodes",
            )
        if (begin, end) in costs:
            _refuse(
                path,
                place,
                f"the link {show_value(begin)} > {show_value(end)} stands there twice",
                "its cost would be in doubt",
                "remove one of them",
            )
        costs[begin, end] = entry.cost
    return costs


def _check_id(path: Path, place: str, node_id: str, seen: Collection[str]) -> None:
    if node_id in seen:
        _refuse(
            path,
            f"{place}.id",
            f"{show_value(node_id)} is taken by another node",
            "links name nodes by their ids",
            "give each node an id of its own",
        )
    if not node_id.isprintable() or node_id != node_id.strip():
        _refuse(
            path,
            f"{place}.id",
            f"{show_value(node_id)} holds characters that do not show",
            "ids are printed in tables",
            "use letters, digits and signs",
        )


def _check_stage(path: Path, place: str, entry: _NodeEntry, num_stages: int) -> None:
    if (entry.role == "data") != (entry.stage == 0) or entry.stage > num_stages:
        rule = "0" if entry.role == "data" else f"one of 1 to {num_stages}"
        _refuse(
            path,
            f"{place}.stage",
            f"node {show_value(entry.id)} of role {entry.role} has stage {entry.stage}",
            f"the stage of a {entry.role} node is {rule}",
            "correct its stage or its role",
        )


def _check_capacity(path: Path, place: str, node_id: str, capacity: int) -> None:
    if capacity > CAPACITY_MAX:
        _refuse(
            path,
            f"{place}.capacity",
            f"node {show_value(node_id)} has a capacity of {show_value(capacity)}",
            f"the limit is {CAPACITY_MAX}",
            "lower it: one that is higher than the flows of all data nodes changes nothing",
        )


def _check_wanted(path: Path, graph: FlowGraph, limit: int, fix: str) -> None:
    wanted = sum(node.capacity for node in graph.stage(0))
    if wanted > limit:
        most = max(graph.stage(0), key=lambda node: node.capacity)
        _refuse(
            path,
            "nodes",
            f"the data nodes want {wanted} flows in all, {most.capacity} of them at "
            f"{show_value(most.node_id)}",
            f"flows are handled one by one, and the limit here is {limit}",
            fix,
        )


def _check_known(path: Path, place: str, node_id: NodeId, known: Collection[str]) -> None:
    if node_id not in known:
        near = difflib.get_close_matches(node_id, list(known), n=1)
        _refuse(
            path,
            place,
            f"there is no node {show_value(node_id)}",
            "a link needs both its ends",
            f"did you mean {show_value(near[0])}?" if near else "add the node, or remove the link",
        )


def _refuse(path: Path, place: str, what: str, why: str, fix: str) -> NoReturn:
    raise ConfigError(f"{name_of(path)}: {place}: {what}", why=why, fix=fix, code="E-CFG-053")
