"""The exact solution of the routing problem, by a solver that sees the whole graph.

It is the measure for decentralized routing, and the routing of a run whose leader knows all costs.
Each data node's flows must come home to that node. This makes an integer flow problem with one
commodity per data node, which no shortest-path method solves. HiGHS solves it by branch and bound.
Two solves run in a row, first for the number of flows and then for their cost. Otherwise, with
costs that span decades, the solver could trade a flow for a saving.

Source: GWTF (section V-A), equation (2) for `Objective.SUM` and the formula at the section's end
for `Objective.MAX`. Deviation: the paper uses the out-of-kilter method, and gives no optimum for
several data nodes (section VI, tests 5 and 6). This solution covers them.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from decod.errors import ConfigError
from decod.ids import NodeId
from decod.planner.graph import FlowGraph, Link, Objective, Route, broken_rules

_SCALE = 1000.0
"""Scaled value of the largest cost. The solver's tolerances are absolute, about 1e-9 of this."""

Limits = Mapping[Link, int]
"""Largest number of units on a link, if less than its ends can carry."""

_Arc = tuple[NodeId, Link]
"""A data node, and a link that its flows may use."""


def optimal_routes(graph: FlowGraph, objective: Objective | str = Objective.SUM) -> list[Route]:
    """Return as many routes as the graph can carry, at the least cost.

    `Objective.MAX` minimises the largest link cost first, and then the sum.

    Costs that differ by less than about 1e-9 of the largest one count as equal. Time is polynomial
    with one data node. With several it can be exponential, but seldom is: flows of different data
    nodes rarely force fractions on each other.

    Raises:
        ConfigError: The solver is not installed (E-CFG-060), or gave up on these costs (E-CFG-061).
    """
    objective = Objective(objective)
    arcs = _useful_arcs(graph)
    if not arcs:
        return []
    units = _solve(graph, arcs, {})
    num_flows = _count(units)
    limits: Limits = {}
    if objective is Objective.MAX:
        limits = _tightest_limits(graph, arcs, units)
    routes = _decompose(graph, _solve(graph, arcs, limits, num_flows=num_flows))
    assert len(routes) == num_flows, (len(routes), num_flows)
    assert not broken_rules(graph, routes), broken_rules(graph, routes)
    return routes


def largest_link_cost(graph: FlowGraph, routes: Sequence[Route]) -> float:
    """Return the largest f(i, j) x d(i, j) over all links, which `Objective.MAX` minimises."""
    units = Counter((route.data_node, link) for route in routes for link in pairwise(route.path))
    return _largest_on_a_link(graph, units)


def _useful_arcs(graph: FlowGraph) -> list[_Arc]:
    """Return, per data node, the links on a way from it through all stages and back."""
    arcs: list[_Arc] = []
    for data_node in graph.stage(0):
        home = data_node.node_id
        if data_node.capacity == 0:
            continue
        reached, layers = {home}, []
        for _ in range(graph.num_stages + 1):
            layer = [
                (begin, end)
                for begin in sorted(reached)
                for end in graph.next[begin]
                if graph.nodes[end].capacity
            ]
            layers.append(layer)
            reached = {end for _, end in layer}
        useful = {home}
        for layer in reversed(layers):
            kept = [link for link in layer if link[1] in useful]
            arcs += [(home, link) for link in kept]
            useful = {begin for begin, _ in kept}
    return arcs


def _count(units: Mapping[_Arc, int]) -> int:
    return sum(number for (home, (begin, _)), number in units.items() if begin == home)


def _tightest_limits(graph: FlowGraph, arcs: Sequence[_Arc], units: Mapping[_Arc, int]) -> Limits:
    """Return the limits for the least z at which all flows fit with f x d <= z on every link.

    The search halves the range of z. Both ends are always possible values: the least value not
    ruled out, and the largest f x d of the best flows so far.

    Args:
        graph: The nodes and links.
        arcs: The useful arcs of the graph.
        units: The largest number of flows, on any ways.
    """
    costs = {link: graph.costs[link] for _, link in arcs if graph.costs[link]}
    num_flows = _count(units)

    def limit(link: Link, largest: float) -> int:
        # A tiny margin, so that z = n x d gives n and not n - 1 by rounding.
        return math.floor(largest / costs[link] * (1 + 1e-12))

    low, high = 0.0, _largest_on_a_link(graph, units)
    while low < high:
        middle = (low + high) / 2
        if not middle < high:
            middle = low
        found = _solve(graph, arcs, {link: limit(link, middle) for link in costs})
        if _count(found) == num_flows:
            high = min(middle, _largest_on_a_link(graph, found))
        else:
            low = min((limit(link, middle) + 1) * cost for link, cost in costs.items())
    return {link: limit(link, high) for link in costs}


def _largest_on_a_link(graph: FlowGraph, units: Mapping[_Arc, int]) -> float:
    sums: dict[Link, int] = {}
    for (_, link), number in units.items():
        sums[link] = sums.get(link, 0) + number
    return max((number * graph.costs[link] for link, number in sums.items()), default=0.0)


def _solve(
    graph: FlowGraph, arcs: Sequence[_Arc], limits: Limits, *, num_flows: int | None = None
) -> dict[_Arc, int]:
    """Return the units on each arc: the most flows, or `num_flows` of them at the least cost."""
    problem = _Problem()
    largest = max(graph.costs[link] for _, link in arcs) or 1.0
    for home, (begin, end) in arcs:
        cost = -1.0 if begin == home else 0.0
        if num_flows is not None:
            cost = graph.costs[begin, end] / largest * _SCALE
        room = _room(graph, (begin, end))
        problem.add_column(cost, min(room, limits.get((begin, end), room)))
    rows: dict[tuple[str, ...], int] = {}

    def row(*key: str, low: float, high: float) -> int:
        if key not in rows:
            rows[key] = problem.add_row(low, high)
        return rows[key]

    for column, (home, (begin, end)) in enumerate(arcs):
        capacity = graph.nodes[begin].capacity
        problem.add_entry(row("capacity", begin, low=0.0, high=capacity), column, 1.0)
        if begin != home:
            problem.add_entry(row("pairing", home, begin, low=0.0, high=0.0), column, -1.0)
        elif num_flows is not None:
            problem.add_entry(row("flows", low=num_flows, high=num_flows), column, 1.0)
        if end != home:
            problem.add_entry(row("pairing", home, end, low=0.0, high=0.0), column, 1.0)
        limit = limits.get((begin, end))
        if limit is not None and limit < _room(graph, (begin, end)):
            problem.add_entry(row("limit", begin, end, low=0.0, high=limit), column, 1.0)
    return {arc: number for arc, number in zip(arcs, problem.solve(), strict=True) if number}


def _room(graph: FlowGraph, link: Link) -> int:
    return min(graph.nodes[node_id].capacity for node_id in link)


def _decompose(graph: FlowGraph, units: Mapping[_Arc, int]) -> list[Route]:
    """Return paths that use each arc as often as it has units, in the order of ids."""
    left: dict[tuple[NodeId, NodeId], dict[NodeId, int]] = {}
    for (home, (begin, end)), number in sorted(units.items()):
        left.setdefault((home, begin), {})[end] = number
    routes = []
    for data_node in graph.stage(0):
        home = data_node.node_id
        while left.get((home, home)):
            path = [home]
            while len(path) == 1 or path[-1] != home:
                following = left[home, path[-1]]
                end = next(iter(following))
                following[end] -= 1
                if not following[end]:
                    del following[end]
                path.append(end)
            routes.append(Route(tuple(path)))
    return routes


class _Problem:
    """A minimisation over integers, built column by column in the solver's sparse form."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._row_bounds: list[tuple[float, float]] = []
        self._entries: list[list[tuple[int, float]]] = []

    def add_column(self, cost: float, upper: float) -> None:
        """Add an unknown between 0 and `upper`."""
        self._costs.append(cost)
        self._uppers.append(upper)
        self._entries.append([])

    def add_row(self, low: float, high: float) -> int:
        """Add a sum that must lie between two numbers, and return its index."""
        self._row_bounds.append((low, high))
        return len(self._row_bounds) - 1

    def add_entry(self, row: int, column: int, factor: float) -> None:
        """Add `factor` times an unknown to a sum."""
        self._entries[column].append((row, factor))

    def solve(self) -> list[int]:
        """Return the optimal values of the unknowns."""
        highspy = _import_solver()
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._row_bounds)
        lp.col_cost_, lp.col_upper_ = self._costs, self._uppers
        lp.col_lower_ = [0.0] * len(self._costs)
        lp.row_lower_ = [float(low) for low, _ in self._row_bounds]
        lp.row_upper_ = [float(high) for _, high in self._row_bounds]
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(self._costs)
        starts, rows, factors = [0], [], []
        for column in self._entries:
            rows += [row for row, _ in column]
            factors += [factor for _, factor in column]
            starts.append(len(rows))
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        matrix.start_, matrix.index_, matrix.value_ = starts, rows, factors
        solver = highspy.Highs()
        for name, value in _OPTIONS.items():
            solver.setOptionValue(name, value)
        solver.passModel(lp)
        solver.run()
        status = solver.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise ConfigError(
                f"the solver ended with {solver.modelStatusToString(status)}",
                why="the exact routing is known only when it ends with an optimum",
                fix="use another algorithm, or costs that are not so many decades apart",
                code="E-CFG-061",
            )
        values = list(solver.getSolution().col_value)
        assert all(abs(value - round(value)) < 1e-4 for value in values), "fractions of a flow"
        return [round(value) for value in values]


_OPTIONS: Mapping[str, bool | int | float] = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    # Ask for a true optimum, not for a value near it.
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
    "dual_feasibility_tolerance": 1e-9,
}


def _import_solver() -> Any:
    try:
        import highspy
    except ImportError:
        raise ConfigError(
            "highspy is not installed",
            why="the exact routing is found by this solver",
            fix="install decod with the extra `lab`",
            code="E-CFG-060",
        ) from None
    return highspy
