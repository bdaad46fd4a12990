"""What the ranks of one host do together: jobs of rank 0 for the others, and collectives.

The jobs are what `crew` asks beside the jobs that it passes on. Collectives are those of
torch.distributed, with NCCL on CUDA and gloo on CPUs. The ranks find each other by a file that only
this user can read. They listen on the loopback alone. What they send are plain numbers, and nothing
is unpickled.

Legend: P parameters of a stage.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from decod.devices import CPU, device_named
from decod.ids import MicrobatchId
from decod.limits import COUNT_MAX, within
from decod.protocol.core.jobs import BaseJob, Positive
from decod.system import LOOPBACK


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory that is free on the rank's device."""

    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SumSettled:
    """The rank's sum of gradients is whole."""

    spoiled: str
    """Why it can't be used; empty if it can."""


class Collective(BaseJob):
    """A job in which the ranks wait for each other, whether a stage is spread or not."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JoinRanks(Collective):
    """Join the group of ranks, who find each other by a file."""

    file: str
    rank: Positive
    num_ranks: Annotated[int, within(2, COUNT_MAX)]


@dataclass(frozen=True, slots=True)
class AddUp(Collective):
    """Take part in the sum of gradients."""


@dataclass(frozen=True, slots=True)
class SpreadWeights(Collective):
    """Get the weights of rank 0."""


@dataclass(frozen=True, slots=True)
class MeasureFree(BaseJob):
    """Measure the free memory."""

    result = FreeMemory


@dataclass(frozen=True, slots=True)
class MakeReady(BaseJob):
    """Read a microbatch's tokens, before a pass in which the ranks wait for each other."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class SettleSum(BaseJob):
    """Finish the sum of gradients, before all ranks add theirs up."""

    result = SumSettled


_TIMEOUT = timedelta(hours=1)
"""Longer than any collective takes. A rank that ends or hangs ends the others earlier."""


def join_group(file: Path, rank: int, num_ranks: int, device: str) -> None:
    """Join the ranks of this host, and wait until all have joined.

    Tiny collectives make the library take its memory of the device, which then no longer counts as
    free.

    Args:
        file: Private to this user, and empty at first.
        rank: Of this process.
        num_ranks: How many there are.
        device: Of this process, as torch calls it.
    """
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = LOOPBACK
    own = device_named(device)
    dist.init_process_group(
        own.collectives,
        init_method=file.as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
        device_id=None if device == CPU else torch.device(device),
    )
    one = torch.ones(1, device=device)
    add_up(one)
    spread(one)
    own.synchronize()


def leave_group() -> None:
    """Leave the ranks, if this process has joined them and goes on."""
    # NCCL's end might wait for ranks that have ended. Its process ends, too.
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def add_up(sum_P: Tensor) -> None:
    """Add the sums of all ranks to that of rank 0. Those of the others are undefined then.

    Args:
        sum_P: (P,), contiguous, on this rank's device. Changed.
    """
    dist.reduce(sum_P, dst=0)


def spread(weights_P: Tensor) -> None:
    """Give all ranks the weights of rank 0, bit for bit.

    Args:
        weights_P: (P,), contiguous, on this rank's device. Overwritten, but on rank 0.
    """
    # As bytes, since not every backend knows every dtype.
    dist.broadcast(weights_P.view(torch.uint8), src=0)
