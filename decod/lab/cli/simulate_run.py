"""A run of a scenario file in virtual time, as `decod lab simulate` shows it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from decod.cli.printing import json_text
from decod.errors import ConfigError
from decod.lab.sim.layouts import with_routing

_COLUMNS: Final = {
    "iteration": "ITERATION",
    "duration_s": "SECONDS",
    "microbatches": "MICROBATCHES",
    "time_per_microbatch_s": "SECONDS EACH",
    "communication_s": "COMMUNICATION",
    "wasted_s": "WASTED",
}
"""Keys of the answer, and their column titles on a terminal."""


def simulate_run(path: Path, *, routing: str | None, seed: int | None, as_json: bool) -> None:
    """Run a scenario to its end and print the times of its iterations.

    Args:
        path: The scenario file.
        routing: Replaces the file's way of routing, if given.
        seed: Replaces the file's seed, if given.
        as_json: Print one JSON object instead of a table.

    Raises:
        ConfigError: The file is no scenario, or its run does not come to an end (E-CFG-070).
    """
    answer = _simulate(path, routing=routing, seed=seed)
    if as_json:
        click.echo(json_text(answer))
    else:
        _print_run(answer)


def _simulate(path: Path, *, routing: str | None, seed: int | None) -> dict[str, Any]:
    """Return the answer in the form of --json. docs/research/lab.md explains the keys."""
    from dataclasses import replace

    from decod.lab.files.scenario_file import load_scenario
    from decod.sim.invariants import InvariantViolation
    from decod.sim.meter import mean_figures
    from decod.sim.simulation import Simulation

    scenario = load_scenario(path)
    if routing is not None:
        scenario = with_routing(scenario, routing)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    simulation = Simulation(scenario)
    try:
        result = simulation.run()
    except InvariantViolation as violation:
        if violation.invariant != "I7":
            raise
        raise ConfigError(
            f"{path}: the run does not end well",
            why=violation.what,
            fix="raise duration_max_s, give stages more hosts, or look at faults and timeouts",
            code="E-CFG-070",
        ) from None
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error.what}", why=error.why, fix=error.fix, code=error.code
        ) from None
    figures = simulation.meter.figures
    return {
        "scenario": str(path),
        "routing": scenario.routing,
        "seed": scenario.seed,
        "iterations": [
            {
                "iteration": f.iteration,
                "duration_s": f.duration_s,
                "microbatches": f.num_microbatches,
                "time_per_microbatch_s": f.time_per_microbatch_s,
                "communication_s": f.communication_s,
                "wasted_s": f.wasted_s,
            }
            for f in figures
        ],
        "mean": mean_figures(figures),
        "lost_stage": result.lost_stage,
    }


def _print_run(answer: Mapping[str, Any]) -> None:
    from rich.table import Table

    from decod.cli.status_view import make_console

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in _COLUMNS.values():
        table.add_column(title, justify="right")
    rows: Sequence[Mapping[str, Any]] = [*answer["iterations"], {"iteration": "mean"}]
    for row in rows:
        values = row if len(row) > 1 else row | answer["mean"]
        table.add_row(*(_show(values[key]) for key in _COLUMNS))
    console = make_console()
    console.print(table)
    parts = [f"routing {answer['routing']}, seed {answer['seed']}"]
    if answer["lost_stage"] is not None:
        when = "" if answer["iterations"] else ", before the first iteration was committed"
        lost = answer["lost_stage"]
        parts.append(f"the run ended early: stage {lost} lost its last host{when}")
    console.print("; ".join(parts))


def _show(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
