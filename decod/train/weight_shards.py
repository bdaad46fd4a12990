"""A stage whose weights and gradients are spread over the devices of a host: torch's FSDP2.

No device holds the whole stage. Each has a part of every parameter, and of the sum of its
gradients. For a block's pass FSDP2 gathers the block's weights on all devices, and frees them after
it. After its backward pass it adds up the devices' gradients, and each keeps its part of the sum.

The stage's state stays whole, in the memory of the host (`ExecutorConfig.state_device`). One
parameter after another goes from there to the devices after a step, and the sum of its gradients
comes back before one.

Source: torch.distributed.fsdp.fully_shard. Legend: P parameters of the stage, Q elements of the
parts that one device has.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from decod.model.stage import FirstStage, Stage
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import Layout

_ROWS = [Shard(0)]
"""How a parameter is divided: each device has some of its rows."""


class Shards:
    """One device's part of a stage. All devices call its methods in the same order.

    Args:
        config: The run, and the device.
        stage: The module, without memory.
        layout: Positions of the parameters.
    """

    def __init__(self, config: ExecutorConfig, stage: Stage, layout: Layout) -> None:
        self._device = config.device
        self._dtype = config.dtype
        self._layout = layout
        kind = torch.device(config.device).type
        self._mesh = init_device_mesh(kind, (dist.get_world_size(),))
        # Blocks return views of new memory, and nothing is added to these in place.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
        stage.to(config.dtype)
        # Sums over devices of bfloat16 gradients are float32's.
        policy = MixedPrecisionPolicy(reduce_dtype=config.wide)
        for module in (*stage.layers.values(), stage):
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        # Losses are parts of a mean already, so gradients are added and not averaged.
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(enable=True)
        for method in ("embed", "loss") if isinstance(stage, FirstStage) else ("run_blocks",):
            register_fsdp_forward_method(stage, method)
        stage.to_empty(device=config.device)
        self._parameters = stage.parameters_by_name()
        sizes = [self.own(parameter).numel() for parameter in self._parameters.values()]
        self.sum_Q = torch.zeros(sum(sizes), dtype=config.wide, device=config.device)
        """The sum of gradients, as far as it is on this device and not added up."""
        parts = torch.split(self.sum_Q, sizes)
        self.sums = {
            name: part_Q.view(self.own(parameter).shape)
            for (name, parameter), part_Q in zip(self._parameters.items(), parts, strict=True)
        }
        """The parts of that sum for each parameter."""

    @torch.no_grad()
    def spread(self, weights_P: Tensor | None) -> None:
        """Give each device its part of the weights.

        Args:
            weights_P: Rank 0's, (P,), of any dtype and on any device. None: this is another rank.
        """
        whole = {} if weights_P is None else dict(self._layout.views(weights_P))
        for name, shape in self._layout.shapes.items():
            if weights_P is None:
                here = torch.empty(shape, dtype=self._dtype, device=self._device)
            else:
                here = whole[name].to(self._device, self._dtype)
            part = distribute_tensor(here, self._mesh, _ROWS)
            self.own(self._parameters[name]).copy_(part.to_local())

    @torch.no_grad()
    def add_up(self, sum_P: Tensor | None) -> None:
        """Add what all devices have summed up to a sum, and make their own sums zero.

        Args:
            sum_P: Rank 0's, (P,), on any device. Changed. None: this is another rank.
        """
        whole = {} if sum_P is None else dict(self._layout.views(sum_P))
        for name, shape in self._layout.shapes.items():
            strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
            spread = DTensor.from_local(
                self.sums[name],
                self._mesh,
                _ROWS,
                run_check=False,
                shape=torch.Size(shape),
                stride=strides,
            )
            added = spread.full_tensor()
            if sum_P is not None:
                whole[name].add_(added.to(sum_P.device))
        self.sum_Q.zero_()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Lend the sums, which are zero within the block. Afterwards they are as before."""
        kept_Q = self.sum_Q.clone()
        self.sum_Q.zero_()
        try:
            yield
        finally:
            self.sum_Q.copy_(kept_Q)

    @staticmethod
    def total(part: Tensor) -> Tensor:
        """Return the sum of a number that each device has a part of."""
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def own(tensor: Tensor) -> Tensor:
        """Return this device's part of a parameter or its gradient. Copies nothing."""
        spread = tensor.detach()
        assert isinstance(spread, DTensor)
        part: Tensor = spread.to_local()
        return part
