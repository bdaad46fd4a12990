"""`decod lab plan servers`: who serves and who computes in the servers organisation."""

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from decod.cli.printing import json_text
from decod.errors import ConfigError
from decod.lab.cli.plan_options import json_option, path_type, seed_option
from decod.lab.cli.plan_words import bottleneck_text

if TYPE_CHECKING:
    from decod.lab.planner.hosts import TrainingProblem
    from decod.lab.planner.servers.advice import Advice
    from decod.lab.planner.servers.objective import IterationTime
    from decod.lab.planner.servers.servers_layout import ServersLayout

_METHODS: Final = ("decod", "paper", "local", "exact")
_NUM_IDS_SHOWN_MAX: Final = 8
"""More hosts of a stage are counted instead of named."""


@click.command()
@click.argument("hosts_path", metavar="HOSTS.json", type=path_type)
@click.option(
    "--method",
    type=click.Choice(_METHODS),
    default="decod",
    show_default=True,
    help="How the layout is found; exact is for a few hosts only.",
)
@click.option(
    "--stages", "num_stages", type=click.IntRange(1, 1000), help="The number of stages to have."
)
@click.option(
    "--layout",
    "layout_path",
    metavar="FILE",
    type=path_type,
    help="Time this layout instead of searching for one.",
)
@seed_option
@json_option
def servers(
    *,
    hosts_path: Path,
    method: str,
    num_stages: int | None,
    layout_path: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Choose servers, clients and layers of each stage, and predict the time of an iteration.

    Both files are described in docs/research/lab.md; one of them may be `-`, the standard input.

    \b
    Examples:
      decod lab plan servers hosts.json
      decod lab plan servers hosts.json --method paper --stages 3 --json
      decod lab plan servers hosts.json --layout layout.json
    """
    from decod.config.strict import STDIN
    from decod.lab.files.hosts_file import load_hosts, load_layout
    from decod.lab.planner.servers.advice import advise
    from decod.lab.planner.servers.objective import iteration_time_s

    if hosts_path == layout_path == STDIN:
        raise click.UsageError("only one of the two files can be the standard input")
    if layout_path is not None and num_stages is not None:
        raise click.UsageError("--layout has stages of its own, so it takes no --stages")
    problem = load_hosts(hosts_path)
    if layout_path is not None:
        method, layout = "given", load_layout(layout_path, problem)
    else:
        layout = _find(problem, method, num_stages=num_stages, seed=seed)
    time = iteration_time_s(problem, layout)
    if time.total_s == math.inf:
        _refuse_idle(time, method)
    advice = advise(problem, layout)
    if as_json:
        click.echo(json_text(_describe(problem, method, layout, time, advice)))
    else:
        _print_layout(layout, time)
        _print_time(problem, method, layout, time, advice)


def _find(
    problem: "TrainingProblem", method: str, *, num_stages: int | None, seed: int
) -> "ServersLayout":
    """Return the layout that a method finds."""
    from decod.lab.planner.servers import exact
    from decod.lab.planner.servers.paper_planner import paper_layout
    from decod.lab.planner.servers.servers_search import local_layout, plan_layout
    from decod.sim.kernel import seeded

    rng: random.Random = seeded(seed, "plan servers")
    if method == "exact" and not exact.is_small(problem):
        raise ConfigError(
            "there are too many hosts or layers for --method exact",
            why=f"it tries all layouts, and ends in time with at most {exact.NUM_RELIABLE_MAX} "
            f"reliable hosts, {exact.NUM_UNRELIABLE_MAX} unreliable ones and "
            f"{exact.NUM_LAYERS_MAX} layers",
            fix="choose another --method",
            code="E-CFG-063",
        )
    match method:
        case "exact":
            layout = exact.exact_layout(problem, num_stages=num_stages)
        case "paper":
            layout = paper_layout(problem, rng, num_stages=num_stages)
        case "local":
            layout = local_layout(problem, rng, num_stages=num_stages)
        case _:
            layout = plan_layout(problem, rng, num_stages=num_stages)
    if layout is None:
        stages = "" if num_stages is None else f" with --stages {num_stages}"
        raise ConfigError(
            f"--method {method} finds no layout{stages}",
            why="each stage needs a layer, a reliable host that can hold it, and a host that "
            "computes it",
            fix="add hosts or memory, or ask for another number of stages",
            code="E-CFG-063",
        )
    return layout


def _refuse_idle(time: "IterationTime", method: str) -> None:
    """Refuse a layout with a stage that nobody can compute."""
    idle = [str(index) for index, stage in enumerate(time.stages) if stage.late_s == math.inf]
    raise ConfigError(
        f"the layout has no worker for stages[{idle[0]}]" if idle else "a link is missing",
        why="no host there computes, has memory for the stage's layers and has all links",
        fix="move a client there" if method == "given" else "choose another --method",
        code="E-CFG-059" if method == "given" else "E-CFG-063",
    )


def _describe(
    problem: "TrainingProblem",
    method: str,
    layout: "ServersLayout",
    time: "IterationTime",
    advice: "Advice",
) -> dict[str, Any]:
    """Return the answer in the form of --json. docs/research/lab.md explains the keys."""
    bottleneck = time.bottleneck
    return {
        "method": method,
        "iteration_s": time.total_s,
        "pipeline_s": time.pipeline_s,
        "fill_s": time.fill_s,
        "aggregation_s": time.aggregation_s,
        "bottleneck": {
            "kind": bottleneck.kind,
            "stage": bottleneck.stage_index,
            "host": bottleneck.host_id,
            "peer": bottleneck.peer_id,
            "busy_s": bottleneck.busy_s,
        },
        "advice": {"change": advice.change, "iteration_s": advice.total_s},
        "microbatches": [
            {problem.hosts[host].host_id: count for host, count in stage.shares}
            for stage in time.stages
        ],
        "idle": _idle(problem, layout),
        "layout": {
            "stages": [
                {
                    "layers": stage.num_layers,
                    "frontal": stage.frontal,
                    "backward": stage.backward,
                    "clients": stage.clients,
                }
                for stage in layout.stages
            ]
        },
    }


def _idle(problem: "TrainingProblem", layout: "ServersLayout") -> list[str]:
    """Return the hosts that are in no stage, without data nodes."""
    used = {host for stage in layout.stages for host in (*stage.servers, *stage.clients)}
    return [
        host.host_id for host in problem.hosts if host.host_id not in used and host.kind != "data"
    ]


def _print_layout(layout: "ServersLayout", time: "IterationTime") -> None:
    from rich.table import Table

    from decod.cli.status_view import make_console

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("STAGE", "LAYERS", "BUSY", "AGGREGATION"):
        table.add_column(name, justify="right")
    for name in ("FRONTAL", "BACKWARD", "CLIENTS"):
        table.add_column(name, overflow="fold")
    for index, (stage, parts) in enumerate(zip(layout.stages, time.stages, strict=True), start=1):
        table.add_row(
            str(index),
            str(stage.num_layers),
            f"{parts.busy_s:.3g} s",
            f"{parts.aggregation_s:.3g} s",
            *(_listed(ids) for ids in (stage.frontal, stage.backward, stage.clients)),
        )
    make_console().print(table)


def _print_time(
    problem: "TrainingProblem",
    method: str,
    layout: "ServersLayout",
    time: "IterationTime",
    advice: "Advice",
) -> None:
    from decod.cli.status_view import make_console
    from decod.texts import clean_text

    console = make_console()
    console.print(
        f"{method}: {time.total_s:.4g} s an iteration: {time.pipeline_s:.4g} s pipeline "
        f"({time.fill_s:.3g} s for one microbatch), {time.aggregation_s:.3g} s aggregation"
    )
    busy_s = time.bottleneck.busy_s
    console.print(clean_text(f"bottleneck: {bottleneck_text(time.bottleneck)}, {busy_s:.4g} s"))
    console.print(clean_text(f"{advice.change}: {advice.total_s:.4g} s an iteration"))
    if idle := _idle(problem, layout):
        console.print(f"idle: {_listed(idle)}")


def _listed(ids: "tuple[str, ...] | list[str]") -> str:
    """Return some names, and the number of the others."""
    from decod.texts import clean_text

    shown = " ".join(clean_text(host_id) for host_id in ids[:_NUM_IDS_SHOWN_MAX])
    more = len(ids) - _NUM_IDS_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown
