"""Jobs of a rank that is not the first: its rows of microbatches, and its part in collectives."""

import os
from pathlib import Path

from typing_extensions import override

from decod.protocol.core.job_codec import Request, runs
from decod.protocol.core.jobs import (
    Build,
    Built,
    Configure,
    Configured,
    Replayed,
    ReplayPasses,
    Reset,
)
from decod.train.ranks import Mirror
from decod.worker.configure import make_mirror
from decod.worker.job_methods import PassRunner
from decod.worker.ranks.group import (
    AddUp,
    Collective,
    FreeMemory,
    JoinRanks,
    MakeReady,
    MeasureFree,
    SettleSum,
    SpreadWeights,
    SumSettled,
    add_up,
    join_group,
    spread,
)


class MirrorRunner(PassRunner[Mirror]):
    """The runner of jobs that rank 0 passes on."""

    @property
    @override
    def _ends_with_others(self) -> bool:
        collective = issubclass(self._kinds[self._kind][0], Collective)
        return collective or super()._ends_with_others

    @runs(Configure)
    def _configure(self, request: Request[Configure]) -> Configured:
        settings = request.job.settings
        device, facts = self._use_device(settings)
        self._configured = make_mirror(settings, device, self._watch)
        return Configured({**facts, "pid": os.getpid()})

    @runs(JoinRanks)
    def _join(self, request: Request[JoinRanks]) -> None:
        job = request.job
        join_group(Path(job.file), job.rank, job.num_ranks, self._ready.config.device)

    @runs(MeasureFree)
    def _measure_free(self, _: Request[MeasureFree]) -> FreeMemory:
        return FreeMemory(self._free_bytes())

    @runs(Build)
    def _build(self, request: Request[Build]) -> Built:
        job = request.job
        self._ready.build(job.stage_index, trial=job.trial, blocks=job.cut)
        return Built("")  # Rank 0 knows the weights.

    @runs(Reset)
    def _reset(self, _: Request[Reset]) -> None:
        self._ready.reset()

    @runs(MakeReady)
    def _make_own_ready(self, request: Request[MakeReady]) -> None:
        self._ready.passes.make_ready(request.job.microbatch)

    @runs(SettleSum)
    def _settle(self, _: Request[SettleSum]) -> SumSettled:
        return SumSettled(self._ready.settle())

    @runs(AddUp)
    def _add_up(self, _: Request[AddUp]) -> None:
        mirror = self._ready
        if mirror.shards is not None:
            mirror.shards.add_up(None)
            return
        add_up(mirror.gradients)
        mirror.gradients.zero_()

    @runs(SpreadWeights)
    def _spread(self, _: Request[SpreadWeights]) -> None:
        mirror = self._ready
        spread(mirror.weights) if mirror.shards is None else mirror.shards.spread(None)

    @runs(ReplayPasses)
    def _replay(self, request: Request[ReplayPasses]) -> Replayed:
        """Take part in rank 0's replay of a microbatch, where the stage is spread."""
        entry, gradient = (self._activation(region) for region in request.inputs[:2])
        self._ready.passes.replay(request.job.microbatch, entry, gradient, counts=False)
        return Replayed(0.0, 0.0, ())  # Rank 0 compares.
