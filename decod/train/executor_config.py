"""A compute process's knowledge of the run and its host, and its sequences of a microbatch.

Several devices of a host divide the sequences of each microbatch. All formats of activations keep
sequences apart: no block of a format belongs to two of them. So a device finds its sequences in a
tensor on its way, and writes its own part of a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decod.compression.plan import Coding
from decod.devices import CPU, device_named
from decod.model.stage import TORCH_DTYPES
from decod.planner.partition import part_sizes
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.train.checkpoint.base import BaseSource
from decod.train.exchange import ExchangeConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Some sequences of a microbatch, one after another."""

    first: int
    num: int
    num_all: int
    """Sequences of the microbatch."""

    @property
    def share(self) -> float:
        """Part of the microbatch, and so of its mean loss."""
        return self.num / self.num_all

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of these rows of a tensor, (num_all, ...)."""
        return whole[self.first : self.first + self.num]

    def pieces(self, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return views of what a tensor on its way holds of these sequences.

        Args:
            whole: With `ExecutorConfig.activation_wire`'s dtype and shape, for all sequences.
            sizes: `ExecutorConfig.activation_runs`.

        Returns:
            Put one after another, flat, they are these sequences in the same format.
        """
        if not sizes:
            return [self.of(whole)]
        runs = torch.split(whole, list(sizes))
        return [self.of(run_C.view(self.num_all, -1)).view(-1) for run_C in runs]


def rows_of_devices(batch: BatchConfig, num_devices: int) -> list[Rows]:
    """Return which sequences each of several devices computes.

    Raises:
        ConfigError: There are more devices than sequences.
    """
    batch.require_devices(num_devices)
    num_rows = batch.microbatch_size
    found = list[Rows]()
    first = 0
    for num in part_sizes(num_rows, num_devices):
        found.append(Rows(first, num, num_rows))
        first += num
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """The settings of a run, what a host has decided, and what follows from both."""

    run: RunConfig
    is_client: bool = False
    """This host holds parameters and gradients, and nothing of the optimizer's."""
    steps_on_host: bool = False
    """The whole state lies in the host's memory, where averages are made and steps taken. The
    device only has what microbatches are computed with."""
    device: str = "cpu"
    """A torch device: `cpu` or `cuda:0`."""
    recompute: bool = False
    """Keep only the input of a forward pass, and compute the pass again when its gradient comes."""
    sharded: bool = False
    """The stage is spread over the devices of the host, which have no room for it each. Then the
    whole state lies in the host's memory, too. See `decod.train.weight_shards`."""
    base: BaseSource | None = None
    """Where this host has the weights that are not trained. None: they are zeros."""
    rows: Rows | None = None
    """Which sequences of each microbatch this device computes. None: all."""

    @property
    def whole(self) -> "ExecutorConfig":
        """This configuration for all sequences of a microbatch."""
        return replace(self, rows=None)

    @property
    def own_rows(self) -> Rows:
        """Which sequences of each microbatch this device computes."""
        num_rows = self.run.batch.microbatch_size
        return self.rows or Rows(0, num_rows, num_rows)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the module and of the activations, except on their way."""
        return TORCH_DTYPES[self.run.model.dtype]

    @property
    def wide(self) -> torch.dtype:
        """Dtype of sums, moments and master weights."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def state_device(self) -> str:
        """Where averages are made, and steps taken: some of that in float64."""
        beside = self.steps_on_host or self.sharded or not device_named(self.device).has_float64
        return CPU if beside else self.device

    @property
    def sum_device(self) -> str:
        """Where the sum of gradients of the whole stage lies."""
        return CPU if self.sharded else self.device

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of a contribution to an average on its way."""
        if self.dtype == torch.float64:
            return torch.float64
        wire_dtype: torch.dtype = getattr(torch, self.run.reduction.wire_dtype.value)
        return wire_dtype

    @property
    def exchange(self) -> ExchangeConfig:
        """Dtypes and device of averages."""
        return ExchangeConfig(
            wide=self.wide,
            wire_dtype=self.wire_dtype,
            device=self.state_device,
            adapts=self.run.sync.adapts,
        )

    @property
    def activation_shape(self) -> torch.Size:
        """Shape of one microbatch's activation between stages, (B, T, D): of this device's rows."""
        size = self.own_rows.num, self.run.batch.sequence_length, self.run.model.hidden_size
        return torch.Size(size)

    @property
    def activation_coding(self) -> Coding | None:
        """Format of activations and their gradients on their way. None: as they are computed."""
        run = self.run
        return run.activations.coding(run.model.hidden_size, run.batch.sequence_length)

    def with_blocks(self, stages: StagesConfig, blocks: Sequence[int]) -> "ExecutorConfig":
        """Return the settings in another cut.

        Args:
            stages: How the run file cuts the model.
            blocks: The number of blocks of each relay stage. None: as in `stages`.
        """
        return replace(self, run=replace(self.run, stages=stages).with_blocks(blocks))

    @property
    def activation_bytes(self) -> int:
        """Size of a whole microbatch's activation on its way."""
        dtype, shape = self.whole.activation_wire
        return shape.numel() * dtype.itemsize

    @property
    def activation_runs(self) -> tuple[int, ...]:
        """Bytes of the runs of an activation on its way, each of which has equal parts of all
        sequences. None: it travels as it is computed.

        The last run tells which positions begin a document, a byte for each, if documents are read
        apart. A gradient has one of the same size, which tells nothing.
        """
        coding = self.activation_coding
        shape = self.activation_shape
        num_elements = shape.numel()
        marks = (shape[:2].numel(),) if self.run.batch.reads_apart else ()
        if coding is None:
            return (num_elements * self.dtype.itemsize, *marks) if marks else ()
        return *coding.runs(num_elements), *marks

    @property
    def activation_wire(self) -> tuple[torch.dtype, torch.Size]:
        """Dtype and shape of an activation on its way."""
        runs = self.activation_runs
        return (
            (torch.uint8, torch.Size((sum(runs),))) if runs else (self.dtype, self.activation_shape)
        )
