"""Hosts and forecasts for `decod run plan`: which organisation trains a run fastest on them."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decod.errors import ConfigError

if TYPE_CHECKING:
    from decod.lab.planner.organisations.compare import Comparison
    from decod.lab.planner.organisations.run_work import RunProblem
    from decod.run.run_config import RunConfig

ANSWER_TIMEOUT_S = 5.0


def ask_hosts(
    state_dir: Path, run: "RunConfig", reliable: tuple[str, ...]
) -> "tuple[RunProblem, dict[str, Any]]":
    """Return what a running leader has measured, and what it has not."""
    from decod.daemon.control import ask
    from decod.lab.files.hosts_file import run_hosts_of

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
    from decod.lab.planner.organisations.compare import compare
    from decod.lab.planner.organisations.forecast import OrganisationName
    from decod.lab.planner.organisations.pipeline_forecast import EVERY_DEFAULT
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
