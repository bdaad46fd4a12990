"""Jobs of a rank that is not the first: its rows of microbatches, and its part in collectives."""

import os
from pathlib import Path

from typing_extensions import override

from decod.train.mirror import Mirror
from decod.worker.arena import Arena
from decod.worker.configure import make_mirror
from decod.worker.job import Job, Result, malformed
from decod.worker.pass_runner import PassRunner
from decod.worker.ranks.group import add_up, join_group, spread

_COLLECTIVES = ("join", "add_up", "spread")
"""Kinds of jobs in which the ranks wait for each other, whether a stage is spread or not."""


class MirrorRunner(PassRunner):
    """The runner of jobs that rank 0 passes on.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._mirror: Mirror | None = None
        self._kinds |= {
            "configure": self._configure,
            "join": self._join,
            "measure_free": self._measure_free,
            "build": self._build,
            "reset": self._reset,
            "make_ready": self._make_own_ready,
            "settle": self._settle,
            "add_up": self._add_up,
            "spread": self._spread,
            "replay": self._replay,
        }

    @property
    @override
    def _computing(self) -> Mirror | None:
        return self._mirror

    @property
    @override
    def _ends_with_others(self) -> bool:
        return self._kind in _COLLECTIVES or super()._ends_with_others

    @property
    def _ready(self) -> Mirror:
        if self._mirror is None:
            raise malformed("no configure came before")
        return self._mirror

    def _configure(self, job: Job) -> Result:
        device, facts = self._use_device(job.message)
        self._mirror = make_mirror(job.message, device, self._watch)
        return {**facts, "pid": os.getpid()}

    def _join(self, job: Job) -> Result:
        file = Path(str(job.message["file"]))
        device = self._ready.config.device
        join_group(file, job.number("rank", 1), job.number("num_ranks", 2), device)
        return {}

    def _measure_free(self, job: Job) -> Result:  # noqa: ARG002
        return {"memory_bytes": self._free_bytes()}

    def _build(self, job: Job) -> Result:
        self._ready.build(job.number("stage_index"))
        return {}

    def _reset(self, job: Job) -> Result:  # noqa: ARG002
        self._ready.reset()
        return {}

    def _make_own_ready(self, job: Job) -> Result:
        self._ready.passes.make_ready(job.microbatch())
        return {}

    def _settle(self, job: Job) -> Result:  # noqa: ARG002
        """Finish the sum of gradients, before all ranks add theirs up."""
        return {"spoiled": self._ready.settle()}

    def _add_up(self, job: Job) -> Result:  # noqa: ARG002
        mirror = self._ready
        if mirror.shards is not None:
            mirror.shards.add_up(None)
            return {}
        add_up(mirror.gradients)
        mirror.gradients.zero_()
        return {}

    def _spread(self, job: Job) -> Result:  # noqa: ARG002
        mirror = self._ready
        spread(mirror.weights) if mirror.shards is None else mirror.shards.spread(None)
        return {}

    def _replay(self, job: Job) -> Result:
        """Take part in rank 0's replay of a microbatch, where the stage is spread."""
        entry, gradient = (self._activation(region) for region in job.inputs[:2])
        self._ready.passes.replay(job.microbatch(), entry, gradient, counts=False)
        return {}
