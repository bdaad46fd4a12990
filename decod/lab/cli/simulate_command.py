"""`decod lab simulate`: experiments of the paper, and runs of a scenario file, in virtual time."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from decod.cli.printing import json_text
from decod.lab.sim.layouts import ROUTING_NAMES

if TYPE_CHECKING:
    from decod.lab.sim.paper import Row

_PAPERS: Final = (
    "gwtf-table2",
    "gwtf-table3",
    "gwtf-table5",
    "gwtf-figure5",
    "gwtf-table6",
    "dilocox-figure4",
    "dilocox-table1",
    "servers-table2",
    "servers-figure2",
    "servers-figure4",
    "servers-figure5",
)
_NUM_SEEDS: Final = {
    "gwtf-table2": 25,
    "gwtf-table3": 25,
    "dilocox-figure4": 1,
    "dilocox-table1": 1,
    "servers-figure4": 30,
}
"""The numbers that the papers' authors ran, where they say so. In DiLoCoX's experiments, a seed
draws nothing but the nodes' ids."""
_NUM_SEEDS_DEFAULT: Final = 10
_PERCENT: Final = ("improvement",)
"""Metrics that are shown as a percentage."""


@click.command()
@click.argument(
    "scenario_path", metavar="[SCENARIO.toml]", required=False, type=click.Path(path_type=Path)
)
@click.option("--paper", type=click.Choice(_PAPERS), help="Repeat an experiment of a paper.")
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, 1000),
    help="Instances of each setting; the default is 25 for GWTF's tables II and III, 1 for DiLoCoX,"
    " 30 for servers-figure4, else 10.",
)
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the figures, as PNG or SVG by the file's suffix.",
)
@click.option(
    "--routing",
    type=click.Choice(ROUTING_NAMES),
    help="How a scenario's flows come about, in place of what its file says.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Of a scenario, in place of its file's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(scenario_path: Path | None, paper: str | None, **options: Any) -> None:
    """Train in virtual time, or repeat what a paper's authors measured, beside their figures.

    SCENARIO.toml describes hosts and links, as in docs/research/lab.md. The protocol is that of
    real nodes; compute and links are simulated.

    \b
    Examples:
      decod lab simulate docs/scenario.toml --routing optimal
      decod lab simulate --paper gwtf-table5 --seeds 3
      decod lab simulate --paper gwtf-table6
      decod lab simulate --paper gwtf-table2 --seeds 2
      decod lab simulate --paper gwtf-figure5 --json --plot figure5.svg
      decod lab simulate --paper dilocox-table1
      decod lab simulate --paper servers-table2 --seeds 3
    """
    num_seeds, plot_path, as_json = (options[k] for k in ("num_seeds", "plot_path", "as_json"))
    routing, seed = options["routing"], options["seed"]
    if (paper is None) == (scenario_path is None):
        raise click.UsageError("give either SCENARIO.toml or --paper")
    if paper is not None:
        if routing is not None or seed is not None:
            raise click.UsageError("--routing and --seed belong to SCENARIO.toml")
        num_seeds = num_seeds or _NUM_SEEDS.get(paper, _NUM_SEEDS_DEFAULT)
        _simulate_paper(paper, num_seeds, plot_path, as_json=as_json)
        return
    if num_seeds is not None or plot_path is not None:
        raise click.UsageError("--seeds and --plot belong to --paper")
    from decod.lab.cli.simulate_run import simulate_run

    assert scenario_path is not None
    simulate_run(scenario_path, routing=routing, seed=seed, as_json=as_json)


def _simulate_paper(paper: str, num_seeds: int, plot_path: Path | None, *, as_json: bool) -> None:
    if plot_path is not None:
        from decod.lab.cli.simulate_plot import check_plot

        # Fail before minutes of work are spent.
        check_plot(plot_path)
    rows = _experiment(paper)(num_seeds, _show_progress)
    if as_json:
        found = [dataclasses.asdict(row) for row in rows]
        click.echo(json_text({"paper": paper, "note": _NOTES[paper], "rows": found}))
    else:
        _print_rows(paper, rows)
    if plot_path is not None:
        from decod.lab.cli.simulate_plot import draw_plot

        draw_plot(paper, rows, plot_path)


def _experiment(paper: str) -> Callable[[int, Callable[[str], None]], list["Row"]]:
    from decod.lab.sim import paper_servers
    from decod.lab.sim.paper import Row, flow_tests, joining_tests
    from decod.lab.sim.paper_churn import churn_tests
    from decod.lab.sim.paper_dilocox import figure4, table1
    from decod.lab.sim.paper_training import training_tests

    experiments: dict[str, Callable[[int, Callable[[str], None]], list[Row]]] = {
        "gwtf-table2": partial(churn_tests, 2),
        "gwtf-table3": partial(churn_tests, 3),
        "gwtf-table5": flow_tests,
        "gwtf-figure5": joining_tests,
        "gwtf-table6": training_tests,
        "dilocox-figure4": figure4,
        "dilocox-table1": table1,
        "servers-table2": paper_servers.table2,
        "servers-figure2": paper_servers.figure2,
        "servers-figure4": paper_servers.figure4,
        "servers-figure5": paper_servers.figure5,
    }
    return experiments[paper]


def _show_progress(text: str) -> None:
    """Show on a terminal which part is being computed."""
    if sys.stderr.isatty():
        click.echo(f"{text} ...", err=True)


def _print_rows(paper: str, rows: Sequence["Row"]) -> None:
    from rich.table import Table

    from decod.cli.status_view import make_console

    metrics = list(dict.fromkeys(row.metric for row in rows))
    printed = {row.metric for row in rows if row.paper is not None}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("SETTING")
    table.add_column("POLICY")
    for metric in metrics:
        table.add_column(metric.replace("_", " ").upper(), justify="right")
        if metric in printed:
            table.add_column("PAPER", justify="right")
    by_place = {(row.setting, row.policy, row.metric): row for row in rows}
    before = ""
    for setting, policy in dict.fromkeys((row.setting, row.policy) for row in rows):
        cells = [setting if setting != before else "", policy]
        before = setting
        for metric in metrics:
            row = by_place.get((setting, policy, metric))
            cells.append("-" if row is None else _show_spread(row))
            if metric in printed:
                given = row is not None and row.paper is not None
                cells.append(f"{row.paper:g}" if row is not None and given else "-")
        table.add_row(*cells)
    console = make_console()
    console.print(table)
    console.print(_NOTES[paper])


_CHURN_NOTE: Final = (
    "2 data nodes, 16 relays that crash and come back. The paper's GWTF stands beside `flow`, its"
    " SWARM beside `restart`, `closest` and `stateless`; what it leaves open is drawn, so compare"
    " ratios."
)
_FITTED_NOTE: Final = (
    "Tokens of an iteration and the speed of devices are fitted to the paper's `all-reduce` and"
    " `dilocox` at each size; the other throughputs follow."
)
_SERVERS_NOTE: Final = (
    "The speed of a V100 is fitted to the paper's fastest baseline in case 1, for each model. The"
    " baselines are cost models; compare ratios."
)
_NOTES: Final = {
    "dilocox-figure4": f"{_FITTED_NOTE} Memory is not modelled.",
    "dilocox-table1": f"{_FITTED_NOTE} The loss is not simulated: it was measured on a small model"
    " of 0.27 M parameters after 1,500 iterations, in nats a byte (docs/research/benchmarks.md,"
    " Convergence). The paper's loss beside it is that of 107 B parameters.",
    "gwtf-table2": _CHURN_NOTE,
    "gwtf-table3": _CHURN_NOTE,
    "gwtf-table5": "Settings of table V. The paper draws figure 7 without giving numbers.",
    "gwtf-figure5": "Settings of table IV. The paper's figure is a bound: its rule is never more"
    " than 25 % slower than the optimal one.",
    "servers-table2": f"{_SERVERS_NOTE} With `once`, only the first loss of a batch interrupts it.",
    "servers-figure2": f"{_SERVERS_NOTE} Settings: share of unreliable hosts, and chance that one"
    " of them disconnects during a batch.",
    "servers-figure4": f"{_SERVERS_NOTE} Efficiency is the throughput of a host, relative to that"
    " with 16 hosts.",
    "servers-figure5": f"{_SERVERS_NOTE} The paper found 3 stages to be the best."
    " `as planned` has the stages that decod's planner chooses.",
    "gwtf-table6": "3 data nodes, 15 relays, 4 microbatches each. The paper's DT-FM stands beside"
    " `fixed`, its GWTF beside `flow`; what it leaves open is drawn, so compare ratios.",
}


def _show_spread(row: "Row") -> str:
    if row.metric in _PERCENT:
        return f"{row.mean:.2%} ± {row.stdev:.2%}"
    digits = 3 if "ratio" in row.metric else 2
    return f"{row.mean:.{digits}f} ± {row.stdev:.{digits}f}"
