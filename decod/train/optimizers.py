"""Optimizers that give the same bits on every device, from old buffers into new ones.

A new one needs a name and its moments (`OptimizerName`), and its step in `OPTIMIZERS`. Muon is the
exception to what follows: it multiplies matrices, so it is only for members that step by
themselves. Its steps are torch's.

Some kernels of torch's optimizers fuse a multiplication and an addition, depending on the device.
A CPU and a GPU that took the same step would then hold different weights, but the members of a
stage compare the hashes of their weights. Here every operation is rounded once, as IEEE 754
demands. A fused step on CUDA would read and write less, but that is milliseconds of an iteration,
and its bits are its own.

The step writes into other buffers than it reads, so it can be proposed, inspected and dropped
without a copy.

Legend: P parameters of a stage, flat.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decod.run.training_config import OptimizerConfig, OptimizerName, Schedule

_CHUNK_SIZE = 1 << 16
_CHUNK_SIZE_ACCELERATOR = 1 << 24
"""Elements per pass. On a CPU, five float32 buffers of this size fit into a second-level cache. On
an accelerator, each operation fills the device, and the scratch memory stays small."""

_CLIP_EPS = 1e-6
"""Keeps a gradient of norm 0 from a division by zero. torch uses the same number."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of parameters, all with or all without weight decay."""

    start: int
    stop: int
    decayed: bool
    matrix: tuple[int, int] | None = None
    """The shape of a single matrix that is stepped as a whole, by Muon. None: it is not."""


@dataclass(slots=True)
class OptimizerState:
    """All that a step changes: flat (P,) tensors, float32 or float64, on one device."""

    weights: Tensor
    """The weights. For bfloat16 models, the float32 master weights."""
    moments: tuple[Tensor, ...]
    """What the optimizer keeps, in the order of `OptimizerName.moments`. The first is (P,). Others
    leave out matrices that are stepped as a whole, without gaps."""
    num_steps: int = 0
    """Steps since the moments were zero, for the bias correction."""

    def empty_like(self) -> "OptimizerState":
        """Return buffers of the same size with undefined content."""
        moments = tuple(map(torch.empty_like, self.moments))
        return OptimizerState(torch.empty_like(self.weights), moments)

    def copy_(self, other: "OptimizerState") -> None:
        """Become equal to another state."""
        self.weights.copy_(other.weights)
        for own, others in zip(self.moments, other.moments, strict=True):
            own.copy_(others)
        self.num_steps = other.num_steps


def zero_moments(
    optimizer: OptimizerName, weights_P: Tensor, segments: Sequence[Segment]
) -> tuple[Tensor, ...]:
    """Return the moments before the first step. Arguments as for `optimizer_step`."""
    num_others = sum(s.stop - s.start for s in segments if s.matrix is None)
    sizes = (len(weights_P), *[num_others] * (len(optimizer.moments) - 1))
    return tuple(torch.zeros_like(weights_P[:size]) for size in sizes)


def learning_rate(optimizer: OptimizerConfig, iteration: int) -> float:
    """Return the rate of an iteration, counted from 1.

    It is linear from lr / (warmup + 1) to lr, and then follows the schedule. A schedule counts as
    torch's do: it begins to fall after the first iteration with the full rate, and reaches its end
    after `decay_iterations` iterations.
    """
    assert iteration >= 1, iteration
    num_steps = optimizer.warmup_iterations + 1
    if optimizer.schedule is Schedule.CONSTANT or iteration <= num_steps:
        return optimizer.lr * min(iteration, num_steps) / num_steps
    num_done = iteration - num_steps
    progress = min(1.0, num_done / (optimizer.decay_iterations - optimizer.warmup_iterations))
    left = 1 - progress
    if optimizer.schedule is Schedule.COSINE:
        left = (1 + cosine(math.pi * progress)) / 2
    return optimizer.lr * (optimizer.lr_min_ratio + (1 - optimizer.lr_min_ratio) * left)


def cosine(angle: float) -> float:
    """Return the cosine of an angle from 0 to pi, to 1e-15.

    Not `math.cos`: the last bit of that differs between C libraries, and between processors. All
    members need the same rate.
    """
    total = term = 1.0
    for n in range(2, 40, 2):
        term *= -angle * angle / (n * (n - 1))
        total += term
    return total


def clip_factor(optimizer: OptimizerConfig, gradient_norm: float) -> float:
    """Return the factor that scales a gradient down to `clip_norm`; 1 if it is not longer.

    The formula is that of `torch.nn.utils.clip_grad_norm_`, in float64.

    Args:
        optimizer: Contains the limit.
        gradient_norm: Norm of the whole model's gradient.
    """
    if optimizer.clip_norm == 0:
        return 1.0
    return min(1.0, optimizer.clip_norm / (gradient_norm + _CLIP_EPS))


@torch.no_grad()
def optimizer_step(
    old: OptimizerState,
    new: OptimizerState,
    gradient_P: Tensor,
    *,
    segments: Sequence[Segment],
    optimizer: OptimizerConfig,
    iteration: int,
) -> None:
    """Write the result of one step from `old` into `new`.

    Weights decay apart from the gradient (arXiv:1711.05101), whatever the optimizer.

    Args:
        old: State after the previous iteration. Not changed.
        new: Overwritten.
        gradient_P: (P,), dtype and device of the state. Not changed.
        segments: Cover all P elements.
        optimizer: Contains the name and the rates.
        iteration: The iteration that this step ends, from 1. It decides on the rate.
    """
    shared = new.weights.data_ptr() == old.weights.data_ptr() and new.weights.numel()
    assert not shared, "the committed state must stay"
    assert sum(s.stop - s.start for s in segments) == gradient_P.numel(), "segments cover all"
    lr = learning_rate(optimizer, iteration)
    new.num_steps = old.num_steps + 1
    for segment in segments:
        here = slice(segment.start, segment.stop)
        factor = 1 - lr * optimizer.weight_decay if segment.decayed else 1.0
        torch.mul(old.weights[here], factor, out=new.weights[here])
    matrices = [each for each in segments if each.matrix is not None]
    _step_matrices(old.moments[0], new, gradient_P, matrices, optimizer, lr)
    step = OPTIMIZERS[optimizer.name](optimizer, lr, new.num_steps)
    # Elements are independent, so chunks change no bit.
    chunk_size = _CHUNK_SIZE if gradient_P.is_cpu else _CHUNK_SIZE_ACCELERATOR
    scratch_P = torch.empty_like(gradient_P[:chunk_size])
    num_done = 0
    for run in _runs_between(matrices, gradient_P.numel()):
        for start in range(run.start, run.stop, chunk_size):
            here = slice(start, min(start + chunk_size, run.stop))
            num = here.stop - here.start
            # Moments but the first have no gaps where matrices are.
            closed = slice(num_done, num_done + num)
            before, after = (
                [first[here], *(other[closed] for other in others)]
                for first, *others in (old.moments, new.moments)
            )
            step(gradient_P[here], before, after, scratch_P[:num])
            new.weights[here].sub_(scratch_P[:num])
            num_done += num


def _runs_between(matrices: Sequence[Segment], num_elements: int) -> list[slice]:
    """Return the runs of elements that are in no matrix that is stepped as a whole."""
    starts = [0, *(each.stop for each in matrices)]
    stops = [*(each.start for each in matrices), num_elements]
    return [slice(*ends) for ends in zip(starts, stops, strict=True)]


def _step_matrices(
    momentum_P: Tensor,
    new: OptimizerState,
    gradient_P: Tensor,
    matrices: Sequence[Segment],
    optimizer: OptimizerConfig,
    lr: float,
) -> None:
    """Take Muon's step of some matrices, whose weights have decayed already.

    A step is as long as one of AdamW would be, so that both have one rate.

    Args:
        momentum_P: Of the old state. Not changed.
        new: Its weights and first moment are overwritten there.
        gradient_P: As for `optimizer_step`.
        matrices: Segments of a matrix each.
        optimizer: Contains the momentum.
        lr: Of the iteration.
    """
    if not matrices:
        return
    new_momentum_P = new.moments[0]

    def view(flat_P: Tensor, segment: Segment) -> Tensor:
        assert segment.matrix is not None
        return flat_P[segment.start : segment.stop].view(segment.matrix)

    parameters = [view(new.weights, each) for each in matrices]
    muon = torch.optim.Muon(
        parameters,
        lr=lr,
        weight_decay=0.0,
        momentum=optimizer.beta1,
        adjust_lr_fn="match_rms_adamw",
    )
    for parameter, segment in zip(parameters, matrices, strict=True):
        momentum = view(new_momentum_P, segment)
        momentum.copy_(view(momentum_P, segment))
        parameter.grad = view(gradient_P, segment)
        muon.state[parameter]["momentum_buffer"] = momentum
    muon.step()  # type: ignore[no-untyped-call]


Update = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], Tensor], None]
"""A step over some of the parameters, from their gradient and the moments before it. It overwrites
the moments after it, and what is to be subtracted from the weights."""


def _adamw(optimizer: OptimizerConfig, lr: float, num_steps: int) -> Update:
    """Return a step of AdamW."""
    denominator_factor = 1 / math.sqrt(1 - optimizer.beta2**num_steps)
    step_size = lr / (1 - optimizer.beta1**num_steps)

    def step(
        gradient: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], update: Tensor
    ) -> None:
        mean, square = new
        torch.mul(gradient, 1 - optimizer.beta1, out=update)
        torch.mul(old[0], optimizer.beta1, out=mean)
        mean.add_(update)
        torch.mul(gradient, gradient, out=update)
        update.mul_(1 - optimizer.beta2)
        torch.mul(old[1], optimizer.beta2, out=square)
        square.add_(update)
        torch.sqrt(square, out=update)
        update.mul_(denominator_factor).add_(optimizer.eps)
        torch.div(mean, update, out=update)
        # The scaling is a separate operation, because `add_(x, alpha=y)` may be fused.
        update.mul_(step_size)

    return step


def _sgd(optimizer: OptimizerConfig, lr: float, num_steps: int) -> Update:  # noqa: ARG001
    """Return a step of SGD with momentum, as torch's without dampening."""

    def step(
        gradient: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], update: Tensor
    ) -> None:
        torch.mul(old[0], optimizer.beta1, out=new[0])
        new[0].add_(gradient)
        torch.mul(new[0], lr, out=update)

    return step


OPTIMIZERS: Mapping[OptimizerName, Callable[[OptimizerConfig, float, int], Update]] = {
    OptimizerName.ADAMW: _adamw,
    OptimizerName.SGD: _sgd,
    OptimizerName.MUON: _adamw,
}
"""The step of each optimizer, by its rates, the rate of the iteration, and the number of the step
since the moments were zero. Of Muon: that of what is no matrix."""
