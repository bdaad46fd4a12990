"""`decod lab plan route` finds the routes of a graph; `decod lab plan join` places new nodes in it.

`decod lab plan servers` is in `lab.cli.plan_servers`, `decod lab plan run` in
`lab.cli.run_plan_command`.
"""

import importlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from decod.cli.printing import json_text
from decod.errors import ConfigError
from decod.lab.cli.plan_options import json_option, path_type, seed_option
from decod.lab.cli.plan_servers import servers
from decod.lab.cli.run_plan_command import same_command
from decod.lab.sim.layouts import LAYOUTS
from decod.planner.graph import FlowGraph, Route
from decod.protocol.flows.registry import ROUTINGS

ROUNDS_DEFAULT = 120
"""The number that GWTF's evaluation gives every algorithm."""

_NEGOTIATED: Final = tuple(name for name in ROUTINGS if name not in LAYOUTS)
_CENTRAL: Final = tuple(LAYOUTS)
_POLICIES: Final = ("utilisation", "gwtf", "capacity", "random", "optimal")
_NUM_ROUTES_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class _Routing:
    """The routes that an algorithm found, and the effort that it took."""

    routes: list[Route]
    rounds: int = 0
    rounds_min: int = 0
    """With fewer rounds no flow is found."""
    messages_mean: float = 0.0
    messages_max: int = 0


@click.group(no_args_is_help=True)
def plan() -> None:
    """Find routes, places for nodes, or the fastest organisation, without starting a run.

    \b
    Examples:
      decod lab plan route graph.json
      decod lab plan join graph.json --candidates candidates.json
      decod lab plan servers hosts.json
      decod lab plan run run.toml --hosts hosts.json
    """


plan.add_command(servers)
plan.add_command(same_command("run"))


@plan.command()
@click.argument("graph_path", metavar="GRAPH.json", type=path_type)
@click.option(
    "--algorithm",
    type=click.Choice([*_NEGOTIATED, *_CENTRAL]),
    default="flow",
    show_default=True,
    help="Who decides: the nodes among themselves (flow, gwtf, greedy) or somebody who sees all.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 10_000),
    default=ROUNDS_DEFAULT,
    show_default=True,
    help="How long nodes negotiate; flow and gwtf only.",
)
@seed_option
@click.option(
    "--objective",
    type=click.Choice(["sum", "max"]),
    default="sum",
    show_default=True,
    help="What costs least: all flows together, or the busiest link. greedy and fixed have "
    "objectives of their own.",
)
@json_option
def route(
    *, graph_path: Path, algorithm: str, rounds: int, seed: int, objective: str, as_json: bool
) -> None:
    """Route as many flows as a graph can carry, at the least cost.

    GRAPH.json holds nodes and links, as in docs/research/lab.md; `-` reads the standard input.

    \b
    Examples:
      decod lab plan route graph.json
      decod lab plan route graph.json --algorithm optimal --json
      decod lab plan route - --algorithm greedy --seed 7 < graph.json
    """
    from decod.lab.files.graph_file import check_negotiable, load_graph

    graph = load_graph(graph_path)
    if algorithm in _NEGOTIATED:
        check_negotiable(graph_path, graph)
        found = _negotiate(graph, algorithm, rounds=rounds, seed=seed, objective=objective)
    else:
        found = _Routing(_route_centrally(graph, algorithm, seed=seed, objective=objective))
    answer = _describe(graph, algorithm, found)
    if found.rounds and answer["unrouted"]:
        _say_few_rounds(rounds, found.rounds_min, graph.num_stages)
    if as_json:
        click.echo(json_text(answer))
    else:
        _print_routes(answer)


@plan.command()
@click.argument("graph_path", metavar="GRAPH.json", type=path_type)
@click.option(
    "--candidates",
    "candidates_path",
    metavar="FILE",
    type=path_type,
    required=True,
    help="The nodes that want to join, and their costs to the others.",
)
@click.option(
    "--policy",
    type=click.Choice(_POLICIES),
    default="utilisation",
    show_default=True,
    help="Who goes next, and to which stage.",
)
@seed_option
@json_option
def join(*, graph_path: Path, candidates_path: Path, policy: str, seed: int, as_json: bool) -> None:
    """Place new nodes in a graph, one after another, and show what each is worth.

    Both files are described in docs/research/lab.md; one of them may be `-`, the standard input.

    \b
    Examples:
      decod lab plan join graph.json --candidates candidates.json
      decod lab plan join graph.json --candidates candidates.json --policy optimal --json
    """
    from decod.config.strict import STDIN
    from decod.lab.files.graph_file import load_candidates, load_graph
    from decod.lab.planner.joins import plan_joins

    if graph_path == candidates_path == STDIN:
        raise click.UsageError("only one of the two files can be the standard input")
    graph = load_graph(graph_path)
    newcomers = load_candidates(candidates_path, graph)
    joins = [
        {
            "node": joined.node_id,
            "stage": joined.stage_index,
            "flows_before": joined.num_flows_before,
            "flows_after": joined.num_flows_after,
            "cost_before": joined.cost_before,
            "cost_after": joined.cost_after,
            "improvement": joined.improvement,
        }
        for joined in plan_joins(graph, newcomers, policy=policy, rng=_make_rng(seed))
    ]
    if as_json:
        click.echo(json_text({"policy": policy, "joins": joins}))
    else:
        _print_joins(policy, joins)


def _negotiate(
    graph: FlowGraph, algorithm: str, *, rounds: int, seed: int, objective: str
) -> _Routing:
    """Return the routes on which simulated nodes agree among themselves."""
    module_name = "decod.lab.sim.routing_trial"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ConfigError(
            f"this release cannot negotiate routes by {algorithm}",
            why="its simulated negotiation is not part of it",
            fix=f"choose another --algorithm: {', '.join(_CENTRAL)}",
            code="E-CFG-062",
        ) from None
    negotiate: Callable[..., Any] = module.negotiate
    found = negotiate(graph, algorithm=algorithm, rounds=rounds, seed=seed, objective=objective)
    return _Routing(
        found.routes,
        rounds=found.rounds,
        rounds_min=module.rounds_min(graph, algorithm),
        messages_mean=found.messages_per_node_mean,
        messages_max=found.messages_per_node_max,
    )


def _say_few_rounds(rounds: int, rounds_min: int, num_stages: int) -> None:
    if rounds < 2 * rounds_min:
        few = "are too few" if rounds < rounds_min else "may be too few"
        click.echo(
            f"hint: {rounds} rounds {few} for {num_stages} stages: the first flow takes at least "
            f"{rounds_min}, all flows take more; see --rounds",
            err=True,
        )


def _route_centrally(graph: FlowGraph, algorithm: str, *, seed: int, objective: str) -> list[Route]:
    if algorithm == "optimal":
        from decod.lab.planner.optimal import optimal_routes

        return optimal_routes(graph, objective)
    return LAYOUTS[algorithm].lay_out(graph, _make_rng(seed))


def _make_rng(seed: int) -> random.Random:
    from decod.sim.kernel import seeded

    return seeded(seed, "plan")


def _describe(graph: FlowGraph, algorithm: str, found: _Routing) -> dict[str, Any]:
    """Return the answer in the form of --json. docs/research/lab.md explains the keys."""
    paths = sorted(route.path for route in found.routes)
    costs = [graph.path_cost(path) for path in paths]
    flows = [
        {"data_node": path[0], "path": path, "cost": cost}
        for path, cost in zip(paths, costs, strict=True)
    ]
    total = sum(costs)
    wanted = sum(node.capacity for node in graph.stage(0))
    return {
        "algorithm": algorithm,
        "rounds": found.rounds,
        "flows": flows,
        "total_cost": total,
        "mean_cost": total / len(flows) if flows else None,
        "unrouted": wanted - len(flows),
        "messages_per_node": {"mean": found.messages_mean, "max": found.messages_max},
    }


def _print_routes(answer: Mapping[str, Any]) -> None:
    from rich.table import Table

    from decod.cli.status_view import make_console
    from decod.texts import clean_text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("FLOWS", "COST"):
        table.add_column(name, justify="right")
    table.add_column("PATH", overflow="fold")
    counts = Counter((flow["path"], flow["cost"]) for flow in answer["flows"])
    for (path, cost), number in list(counts.items())[:_NUM_ROUTES_SHOWN_MAX]:
        table.add_row(str(number), f"{cost:g}", " > ".join(clean_text(node) for node in path))
    console = make_console()
    if counts:
        console.print(table)
    if len(counts) > _NUM_ROUTES_SHOWN_MAX:
        console.print(f"and {len(counts) - _NUM_ROUTES_SHOWN_MAX} more paths; see them with --json")
    parts = [f"{answer['algorithm']}: {len(answer['flows'])} flows"]
    if answer["flows"]:
        parts.append(f"cost {answer['total_cost']:g}, {answer['mean_cost']:g} each")
    parts.append(f"{answer['unrouted']} unrouted")
    if answer["rounds"]:
        messages = answer["messages_per_node"]
        parts.append(
            f"{answer['rounds']} rounds with {messages['mean']:.1f} messages a node, "
            f"at most {messages['max']}"
        )
    console.print("; ".join(parts))


def _print_joins(policy: str, joins: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from decod.cli.status_view import make_console
    from decod.texts import clean_text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("NODE", overflow="ellipsis", max_width=32)
    for name in ("STAGE", "FLOWS", "COST BEFORE", "AFTER", "IMPROVEMENT"):
        table.add_column(name, justify="right")
    for joined in joins:
        table.add_row(
            clean_text(joined["node"]),
            str(joined["stage"]),
            f"{joined['flows_before']} > {joined['flows_after']}",
            f"{joined['cost_before']:g}",
            f"{joined['cost_after']:g}",
            f"{joined['improvement']:.2%}",
        )
    console = make_console()
    if joins:
        console.print(table)
        mean = sum(joined["improvement"] for joined in joins) / len(joins)
        console.print(f"{policy}: {len(joins)} nodes placed, {mean:.2%} better each on average")
    else:
        console.print("nobody wants to join")
