"""All organisations for the same hosts and the same model, the fastest first."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from decod.lab.planner.hosts import HostKind
from decod.lab.planner.organisations.data_parallel_time import collaborative_forecasts
from decod.lab.planner.organisations.forecast import Forecast, OrganisationName
from decod.lab.planner.organisations.pipeline_forecast import EVERY_DEFAULT, PipelineForecasts
from decod.lab.planner.organisations.pipeline_search import SCORES_DEFAULT
from decod.lab.planner.organisations.run_work import RunProblem
from decod.lab.planner.organisations.servers_forecast import servers_forecasts
from decod.lab.planner.servers.servers_search import EVALUATIONS_DEFAULT

_NEAR = 1.02
"""A variant that takes so many times as long as the fastest one counts as equally fast. Of such
variants, the one that changes the training least is chosen."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The forecasts of all organisations that are possible."""

    chosen: tuple[Forecast, ...]
    """One variant of each organisation, the fastest organisation first."""
    variants: tuple[Forecast, ...]
    """All of them."""
    absent: dict[OrganisationName, str]
    """Why the others are impossible."""

    @property
    def best_exact(self) -> Forecast | None:
        """The fastest variant whose steps are those of one host with the whole batch."""
        exact = [each for each in self.variants if each.exact]
        return min(exact, key=lambda each: each.iteration_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long searches take."""

    scores: int = SCORES_DEFAULT
    """Arrangements of relays."""
    evaluations: int = EVALUATIONS_DEFAULT
    """Layouts of servers."""


def compare(
    problem: RunProblem,
    make_rng: Callable[[str], random.Random],
    *,
    names: Collection[OrganisationName] = tuple(OrganisationName),
    num_stages: int | None = None,
    every: Sequence[int] = EVERY_DEFAULT,
    effort: Effort = Effort(),
) -> Comparison:
    """Return forecasts of organisations.

    Args:
        problem: Hosts, links and the run.
        make_rng: Returns the source of draws for a name, so that organisations don't share one.
        names: The organisations to look at.
        num_stages: Look at so many stages only.
        every: Iterations between averages, for `diloco`.
        effort: How long searches take.
    """
    variants, absent = list[Forecast](), dict[OrganisationName, str]()

    def take(name: OrganisationName, found: Sequence[Forecast], why: str) -> None:
        variants.extend(found)
        if not found:
            absent[name] = why

    if {OrganisationName.PIPELINE, OrganisationName.DILOCO} & {*names}:
        made = PipelineForecasts(
            problem, make_rng("pipeline"), num_stages=num_stages, scores=effort.scores
        )
        why = "no cut of the model fits into the memory of the hosts that compute"
        if OrganisationName.PIPELINE in names:
            gradients = made.gradients()
            take(OrganisationName.PIPELINE, [gradients] if gradients is not None else [], why)
        if OrganisationName.DILOCO in names:
            take(OrganisationName.DILOCO, made.diloco(every), why)
    if OrganisationName.SERVERS in names:
        if problem.base.indexes(HostKind.RELIABLE):
            found = servers_forecasts(
                problem, make_rng("servers"), num_stages=num_stages, evaluations=effort.evaluations
            )
            why = "no layout has a server with memory, and a worker, for each stage"
            take(OrganisationName.SERVERS, found, why)
        else:
            take(OrganisationName.SERVERS, [], "there is no reliable host")
    if OrganisationName.COLLABORATIVE in names:
        why = "no host that computes has memory for the whole model"
        take(OrganisationName.COLLABORATIVE, collaborative_forecasts(problem), why)
    chosen = [
        _chosen([each for each in variants if each.organisation == name])
        for name in dict.fromkeys(each.organisation for each in variants)
    ]
    return Comparison(
        tuple(sorted(chosen, key=lambda each: each.iteration_s)), tuple(variants), absent
    )


def _chosen(variants: Sequence[Forecast]) -> Forecast:
    """Return the variant that changes the training least, of those that are about the fastest."""
    fastest_s = min(each.iteration_s for each in variants)
    near = [each for each in variants if each.iteration_s <= _NEAR * fastest_s]

    def changes(each: Forecast) -> tuple[bool, bool, int, bool, float]:
        settings = each.settings
        coded = settings.get("sync.compression", settings.get("compression", "none")) != "none"
        late = bool(settings.get("sync.overlap") or settings.get("overlap"))
        number = settings.get("sync.every", 1)
        assert isinstance(number, int), number
        return (not each.exact, late, number, coded, each.iteration_s)

    return min(near, key=changes)
