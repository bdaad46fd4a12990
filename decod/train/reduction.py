"""Sums of gradients: the arithmetic that members of a stage must agree on.

Each member reduces one part for all, so that all members receive the same bytes.

Legend: P parameters of a stage, N elements of one part.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.planner.partition import part_sizes
from decod.train.copies import number

_CHUNK_SIZE = 1 << 16
_CHUNK_SIZE_ACCELERATOR = 1 << 24
"""Elements to square at a time, so that their float64 copy stays small. On a CPU, the copy fits
into the second-level cache."""


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. Waits for the work that was told before.

    NaN and infinity survive a sum, so one pass without a mask is enough. A sum of finite values
    that overflows also counts as not finite; values that large are lost anyway.
    """
    return bool(number(torch.isfinite(tensor.sum())))


def require_finite(tensor: Tensor, what: str) -> None:
    """Raise NonFiniteError, naming `what`, if an element is NaN or infinite."""
    if not is_finite(tensor):
        raise NonFiniteError(
            f"{what} is not finite",
            why="it would spread to all weights in one step",
            fix="retry the microbatch elsewhere; if every node says so, lower optimizer.lr",
        )


def cut(flat_P: Tensor, num_parts: int) -> list[Tensor]:
    """Return views of the parts, in order."""
    assert flat_P.dim() == 1, flat_P.shape
    return list(torch.split(flat_P, part_sizes(flat_P.numel(), num_parts)))


def reduce_part(
    contributions_N: Sequence[Tensor], *, weights_total: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Return the weighted mean of one part of the gradient.

    Adds in the given order and then divides once. Float addition is not associative, and a repeated
    sum must give the same bits.

    Args:
        contributions_N: Sums over each member's microbatches, (N,), in roster order. Not changed.
        weights_total: Number of microbatches in all contributions together.
        dtype: float32, or float64 for float64 models.
        device: The device that adds.

    Returns:
        (N,) in `dtype` on `device`. New memory.

    Raises:
        NonFiniteError: A contribution holds NaN or infinity. The message names its position.
        ShapeError: There is no contribution, or their lengths differ.
        TrainingError: `weights_total` is not positive.
    """
    if not contributions_N or any(
        part.shape != contributions_N[0].shape for part in contributions_N
    ):
        raise ShapeError(
            f"contributions of {[part.numel() for part in contributions_N][:8]} elements",
            why="a sum needs at least one, and all of the same length",
            fix="repeat the iteration with a new roster",
        )
    check_weights_total(weights_total)
    total_N = contributions_N[0].to(device, dtype, copy=True)
    for part_N in contributions_N[1:]:
        total_N.add_(part_N.to(device, dtype))
    total_N.div_(divisor(weights_total, total_N))
    if not is_finite(total_N):
        bad = [index for index, part in enumerate(contributions_N) if not is_finite(part)]
        raise NonFiniteError(
            f"the gradients of roster positions {bad} are not finite",
            why="they would spoil the weights of the whole stage",
            fix="repeat the iteration without those members",
        )
    return total_N


def divisor(weights_total: int, total_N: Tensor) -> Tensor:
    """Return the divisor of a mean, a scalar with the dtype and device of the sum.

    Torch 2.13 does not divide a CUDA tensor by a Python number: it multiplies by the reciprocal,
    which rounds once more. A member that repeats the sum on a CPU would get other bits.
    """
    assert weights_total >= 1, weights_total
    return torch.full((), weights_total, dtype=total_N.dtype, device=total_N.device)


def square_sum(gradient_N: Tensor) -> float:
    """Return the sum of squares of an average, for the norm of the whole gradient.

    Squares and adds in float64, whatever the gradient's dtype.

    Raises:
        NonFiniteError: The sum is NaN or infinite.
    """
    chunk_size = _CHUNK_SIZE if gradient_N.is_cpu else _CHUNK_SIZE_ACCELERATOR
    total = torch.zeros((), dtype=torch.float64, device=gradient_N.device)
    for chunk_N in torch.split(gradient_N, chunk_size):
        wide_N = chunk_N.to(torch.float64)
        total += wide_N @ wide_N
    result = number(total)
    if not math.isfinite(result):
        raise NonFiniteError(
            f"the squares of the gradient sum to {result}",
            why="a gradient of that length can't be clipped",
            fix="retry; if it happens again, lower optimizer.lr",
        )
    return result


def check_weights_total(weights_total: int) -> None:
    """Raise TrainingError unless a mean over this many microbatches is defined."""
    if weights_total < 1:
        raise TrainingError(
            f"weights_total is {weights_total}",
            why="a mean over no microbatch is not defined",
            fix="repeat the iteration",
        )
