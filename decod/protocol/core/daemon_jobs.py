"""What a daemon itself asks of its compute process, beside the core. As in `core/jobs.py`, a class
describes a job; it needs a method marked `@runs` in `worker/`."""

from dataclasses import dataclass
from typing import Any

from decod.protocol.core.jobs import BaseJob, Positive


@dataclass(frozen=True, slots=True)
class Configured:
    """The process is ready for other jobs."""

    facts: dict[str, Any]
    """Of the device and of torch, for the daemon."""


@dataclass(frozen=True, slots=True)
class Configure(BaseJob):
    """The first job of each process: it describes the run and the device."""

    result = Configured

    settings: dict[str, Any]
    """See `decod.worker.configure`, which checks them."""


@dataclass(frozen=True, slots=True)
class DoNothing(BaseJob):
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class SetThreads(BaseJob):
    """Compute with so many threads from now on."""

    num_threads: Positive | None
    """None: as many as torch takes by itself."""


@dataclass(frozen=True, slots=True)
class SetRecompute(BaseJob):
    """Recompute forward passes, or not, in the stages that are built from now on."""

    recompute: bool


@dataclass(frozen=True, slots=True)
class SpreadStage(BaseJob):
    """Spread the stages that are built from now on over the devices, or copy them."""

    sharded: bool


@dataclass(frozen=True, slots=True)
class GiveBlock(BaseJob):
    """Take in a block of the data (input 0) whose file on this host is damaged."""

    shard_index: int
    offset: int


@dataclass(frozen=True, slots=True)
class Guide(BaseJob):
    """Of an averaging process: start low-rank factors from the newest average (input 0), or from
    none."""
