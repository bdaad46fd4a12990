"""Forecasts of the pipeline: with gradients averaged in each iteration, or seldom (DiLoCo).

With DiLoCo, each member steps by itself, and every H iterations the members average. Without
overlap, all wait for the average. With overlap, it travels during the next H iterations. It then
takes time of the same links as activations: an iteration is no shorter than both together.

The time says nothing about what is learnt from a token. More iterations between averages, overlap
and compression all cost some of that.
"""

import math
import random
from collections.abc import Sequence
from functools import partial

from decod.lab.planner.bottleneck import Bottleneck, ResourceKind
from decod.lab.planner.organisations.exchange_time import ButterflyTime
from decod.lab.planner.organisations.forecast import (
    Forecast,
    OrganisationName,
    PlacedHost,
    PlacedStage,
    TimeParts,
)
from decod.lab.planner.organisations.pipeline_search import SCORES_DEFAULT, StagePlan, plan_stages
from decod.lab.planner.organisations.pipeline_time import Limit, PipelineClock, TimeOfPasses
from decod.lab.planner.organisations.run_work import WHOLE, RunProblem
from decod.run.stages_config import blocks_text

EVERY_DEFAULT = (1, 10, 50, 100, 500)
"""Iterations between averages that are tried."""

Settings = dict[str, str | int | bool]


def gradients_s(clock: PipelineClock, time: TimeOfPasses) -> float:
    """Return the seconds of an iteration that averages gradients."""
    return time.total_s + clock.average(time).time_s + clock.step_s(time)


def _local_score(clock: PipelineClock, time: TimeOfPasses) -> float:
    """Return what a search for seldom averages minimises."""
    return time.score + clock.step_s(time) + 0.01 * clock.average(time).time_s


def _gradients_score(clock: PipelineClock, time: TimeOfPasses) -> float:
    return gradients_s(clock, time) + time.score - time.total_s


class PipelineForecasts:
    """Plans stages once, and makes the forecasts of both organisations from them.

    Args:
        problem: Hosts, links and the run.
        rng: Source of the search's draws.
        num_stages: Look at so many stages only.
        scores: About the number of arrangements that a search looks at.
    """

    def __init__(
        self,
        problem: RunProblem,
        rng: random.Random,
        *,
        num_stages: int | None = None,
        scores: int = SCORES_DEFAULT,
    ) -> None:
        search = partial(plan_stages, rng=rng, num_stages=num_stages, scores=scores)
        self._problem = problem
        self._clock = PipelineClock(problem)
        self._local = PipelineClock(problem, local=True)
        self._plan = search(self._clock, score=_gradients_score)
        seldom = search(self._local, score=_local_score)
        self._local_plans = [plan for plan in (seldom, self._refitted()) if plan is not None]

    def _refitted(self) -> StagePlan | None:
        """Return the stages for gradients, if members that step by themselves fit there."""
        if self._plan is None:
            return None
        time = self._local.passes(self._plan.stages, self._plan.time.layers)
        return StagePlan(self._plan.stages, time, 0.0) if time.total_s < math.inf else None

    def gradients(self) -> Forecast | None:
        """Return the forecast with gradients; None if the hosts cannot hold the model."""
        if self._plan is None:
            return None
        time, clock = self._plan.time, self._clock
        average = clock.average(time)
        return Forecast(
            organisation=OrganisationName.PIPELINE,
            variant="",
            parts=_parts(time, average.time_s + clock.step_s(time)),
            bottleneck=self._bottleneck(time, average, average.time_s),
            stages=self._placed(time),
            exact=True,
            settings=self._settings(time),
        )

    def diloco(self, every: Sequence[int] = EVERY_DEFAULT) -> list[Forecast]:
        """Return a forecast for each format, with and without overlap, and each H.

        Args:
            every: Iterations between averages.
        """
        return [
            min(
                (self._seldom(plan, name, number, overlap) for plan in self._local_plans),
                key=lambda forecast: forecast.iteration_s,
            )
            for overlap in (False, True)
            for name in self._problem.run.formats
            for number in every
            if self._local_plans
        ]

    def _seldom(self, plan: StagePlan, name: str, every: int, overlap: bool) -> Forecast:  # noqa: FBT001
        time, clock = plan.time, self._local
        average, step_s = clock.average(time, name), clock.step_s(time)
        each_s = average.time_s / every
        waits_s = max(0.0, time.access_s + each_s - time.total_s - step_s) if overlap else each_s
        words = [f"every {every}", name if name != WHOLE else "", "overlap" if overlap else ""]
        settings = self._settings(time) | {"sync.method": "diloco", "sync.every": every}
        settings |= {"sync.overlap": overlap, "sync.compression": name}
        remarks = [f"members average every {every} iterations, and differ in between"]
        if overlap:
            remarks.append("an average counts when all members have it")
        if name != WHOLE:
            remarks.append("averages are compressed; coding and decoding count as no time")
        return Forecast(
            organisation=OrganisationName.DILOCO,
            variant=", ".join(filter(None, words)),
            parts=_parts(time, waits_s + step_s),
            bottleneck=self._bottleneck(time, average, waits_s),
            stages=self._placed(time),
            exact=False,
            settings=settings,
            remarks=tuple(remarks),
        )

    # --- parts of forecasts -------------------------------------------------------------------

    def _bottleneck(self, time: TimeOfPasses, average: ButterflyTime, waits_s: float) -> Bottleneck:
        limit = time.limit
        if waits_s > time.total_s:
            limit = Limit(ResourceKind.AVERAGE, waits_s, None, average.host)
        host, peer = (
            None if i is None else self._problem.hosts[i].host_id for i in (limit.host, limit.peer)
        )
        return Bottleneck(limit.kind, limit.stage_index, host, peer, limit.busy_s)

    def _placed(self, time: TimeOfPasses) -> tuple[PlacedStage, ...]:
        hosts = self._problem.hosts
        return tuple(
            PlacedStage(
                num_layers=num_layers,
                hosts=tuple(
                    PlacedHost(host_id=hosts[host].host_id, duty="relay", num_microbatches=count)
                    for host, count in sorted(share.items())
                ),
            )
            for share, num_layers in zip(time.shares, time.layers, strict=True)
        )

    def _settings(self, time: TimeOfPasses) -> Settings:
        return {
            "organisation": "pipeline",
            "stages.num_relay_stages": len(time.shares),
            "stages.blocks": blocks_text(time.layers),
            "batch.num_data_nodes": len(self._clock.data_nodes),
            "sync.method": "gradients",
            "sync.every": 1,
            "sync.overlap": False,
            "sync.compression": WHOLE,
        }


def _parts(time: TimeOfPasses, aggregation_s: float) -> TimeParts:
    return TimeParts(
        compute_s=time.compute_s,
        communication_s=time.communication_s,
        fill_s=time.fill_s,
        aggregation_s=aggregation_s,
    )
