"""Hosts and forecasts for `decod run plan`: which organisation trains a run fastest on them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decod.errors import ConfigError

if TYPE_CHECKING:
    from decod.lab.planner.organisations.compare import Comparison
    from decod.lab.planner.organisations.forecast import Forecast
    from decod.lab.planner.organisations.run_work import RunProblem
    from decod.run.run_config import RunConfig

ANSWER_TIMEOUT_S = 5.0

_KINDS_MAX = 3
"""Kinds of hosts of which it is said what one more would bring."""


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


def one_more(
    problem: "RunProblem", run: "RunConfig", options: dict[str, Any], best: "Forecast"
) -> list[tuple[str, float]]:
    """Return what one more host like some of these would bring to the best organisation.

    Returns:
        The ids of relays of different kinds, and by how much more tokens a second the run would
        train: 0.25 for a quarter. The most frequent kinds come first.
    """
    from collections import Counter

    from decod.lab.planner.hosts import HostKind

    hosts = problem.hosts
    kinds = {
        index: (host.kind, host.speed_layers_per_s, host.memory_bytes)
        for index, host in enumerate(hosts)
        if host.kind is not HostKind.DATA
    }
    counts = Counter(kinds.values())
    firsts = {kind: index for index, kind in reversed(kinds.items())}
    found = []
    for kind, _ in counts.most_common(_KINDS_MAX):
        more = replace(problem, base=problem.base.with_another(firsts[kind]))
        only = options | {"organisation": best.organisation.value}
        other = compare_organisations(more, run, only).chosen[0]
        gain = max(0.0, best.iteration_s / other.iteration_s - 1)
        found.append((str(hosts[firsts[kind]].host_id), gain))
    return found


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
