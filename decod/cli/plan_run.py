"""`decod plan run`: which organisation trains a run fastest on given hosts."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.output import json_text
from decod.cli.plan_options import json_option, path_type, seed_option
from decod.errors import ConfigError

if TYPE_CHECKING:
    from decod.config.schema import RunConfig
    from decod.planner.organisations.compare import Comparison
    from decod.planner.organisations.run_work import RunProblem

ANSWER_TIMEOUT_S = 5.0

_NAMES = ("pipeline", "servers", "diloco", "collaborative")


@click.command("run")
@click.argument("run_path", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.option(
    "--hosts",
    "hosts_path",
    metavar="FILE",
    type=path_type,
    help="The hosts and links, as for `decod plan servers`; - reads the standard input.",
)
@click.option(
    "--running",
    "state_dir",
    metavar="STATE_DIR",
    type=click.Path(path_type=Path),
    help="Take hosts and links as the leader with this folder has measured them.",
)
@click.option(
    "--reliable",
    "reliable",
    metavar="NAME",
    multiple=True,
    help="A host that stays, with --running, which cannot know that. May be repeated.",
)
@click.option("--organisation", type=click.Choice(_NAMES), help="Look at this one only.")
@click.option(
    "--stages", "num_stages", type=click.IntRange(1, 1000), help="The number of stages to have."
)
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw the times and the best layout to this PNG or SVG.",
)
@seed_option
@json_option
def run_plan(
    *,
    run_path: Path,
    hosts_path: Path | None,
    state_dir: Path | None,
    plot_path: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the time of an iteration for every organisation, and choose stages of hosts.

    \b
    Examples:
      decod plan run run.toml --hosts hosts.json
      decod plan run run.toml --hosts hosts.json --organisation diloco --json
      decod plan run run.toml --hosts hosts.json --plot plan.svg
      decod plan run run.toml --running ~/.local/state/decod
    """
    from decod.cli import plan_run_plot, plan_run_view
    from decod.config.run_file import load_run_file

    if (hosts_path is None) == (state_dir is None):
        raise click.UsageError("give either --hosts or --running")
    if options["reliable"] and state_dir is None:
        raise click.UsageError("--reliable goes with --running: a file of hosts says it itself")
    if plot_path is not None:
        plan_run_plot.check_plot(plot_path)
    run = load_run_file(run_path).run
    gaps = None
    if state_dir is not None:
        problem, gaps = _ask_hosts(state_dir, run, options["reliable"])
    else:
        problem = _load_hosts(hosts_path, run)
    comparison = compare_organisations(problem, run, options)
    answer = plan_run_view.describe(comparison, problem, gaps)
    if plot_path is not None:
        plan_run_plot.draw_comparison(comparison, plot_path)
    if as_json:
        click.echo(json_text(answer))
    else:
        plan_run_view.print_comparison(comparison, answer)


def _load_hosts(path: Path | None, run: "RunConfig") -> "RunProblem":
    from decod.config.hosts_file import load_run_hosts

    assert path is not None, "checked before"
    return load_run_hosts(path, run)


def _ask_hosts(
    state_dir: Path, run: "RunConfig", reliable: tuple[str, ...]
) -> "tuple[RunProblem, dict[str, Any]]":
    """Return what a running leader has measured, and what it has not."""
    from decod.config.hosts_file import run_hosts_of
    from decod.daemon.control import ask

    answer = ask(state_dir, {"command": "plan"}, timeout_s=ANSWER_TIMEOUT_S)
    described = answer["hosts"]
    relays = {host["id"]: host for host in described["hosts"] if host["kind"] != "data"}
    for name in reliable:
        if name not in relays:
            raise ConfigError(
                f"--reliable is {name!r}",
                why="the run has no relay of that name",
                fix=f"give one of {', '.join(list(relays)[:8])}",
                code="E-CFG-055",
            )
        relays[name]["kind"] = "reliable"
    return run_hosts_of(state_dir, described, run), {
        "num_links": answer["num_links"],
        "num_links_measured": answer["num_links_measured"],
        "speeds_unknown": answer["speeds_unknown"],
    }


def compare_organisations(
    problem: "RunProblem", run: "RunConfig", options: dict[str, Any]
) -> "Comparison":
    """Return the forecasts for a run.

    Args:
        problem: Hosts, links and the run.
        run: The same run, as its file says it.
        options: `organisation` and `num_stages`, or None for all of them, and `seed`.

    Raises:
        ConfigError: No organisation fits onto the hosts (E-CFG-063).
    """
    from decod.planner.organisations.compare import compare
    from decod.planner.organisations.forecast import OrganisationName
    from decod.planner.organisations.pipeline_forecast import EVERY_DEFAULT
    from decod.sim.kernel import seeded

    def make_rng(name: str) -> random.Random:
        rng: random.Random = seeded(options["seed"], "plan run", name)
        return rng

    wanted, every = options["organisation"], {*EVERY_DEFAULT}
    if run.sync.steps_locally:
        every.add(run.sync.every)
    comparison = compare(
        problem,
        make_rng,
        names=[OrganisationName(wanted)] if wanted else list(OrganisationName),
        num_stages=options["num_stages"],
        every=sorted(every),
    )
    if not comparison.chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in comparison.absent.items())
        raise ConfigError(
            "the run fits into no organisation of these hosts"
            if wanted is None
            else f"the run cannot be organised as {wanted} on these hosts",
            why=reasons,
            fix="add hosts or memory, make the model smaller, or leave --stages and --organisation"
            " out",
            code="E-CFG-063",
        )
    return comparison
