"""Factors of matrices: a matrix U becomes P Q^T, with few columns in P and Q.

Source: PowerSGD (arXiv:1905.13727), algorithm 1, as DiLoCoX (arXiv:2506.21263), section 2.4.2, uses
it. Deviations:

- The power iteration does not start from the last Q. It starts from a matrix that all members hold
  anyway, the *guide*: a decayed mean of the averages so far, such as the outer momentum. A member
  that has just joined then starts as all others do.
- P is orthonormalised by a Cholesky factor with a small ridge, in float64. The ridge keeps
  directions of noise small, so that different devices come to the same result.
- What all members must agree on must not depend on the order in which a device adds. The product of
  the factors is therefore one of whole numbers, which float64 adds exactly in any order. The
  agreed P is rounded to 12 bits instead: the devices' float64 results differ in the last bits, and
  these are then cut off. Where a result lies within that difference of a rounding boundary, devices
  still disagree (docs/decisions.md says how often).

Legend: X rows of a matrix, Y columns, R rank.
"""

import math

import torch
from torch import Tensor

_RIDGE = 1e-7
"""Added to a Gram matrix, as a share of its mean eigenvalue."""

_DROPPED_BITS = 12
"""Of a float32's 24."""

_LEFT_BITS, _RIGHT_BITS_MAX = 18, 24
"""Of the whole numbers that an agreed product has in place of its factors."""

_EXACT_BITS = 53
"""Whole numbers of so many bits are exact in float64, and so are their sums."""


def agreed(values: Tensor) -> Tensor:
    """Return values rounded to float32 with 12 significant bits.

    Args:
        values: float64, computed in the same way by every member. Not changed.
    """
    bits = values.to(torch.float32).view(torch.int32)
    half, mask = 1 << (_DROPPED_BITS - 1), -1 << _DROPPED_BITS
    return ((bits + half) & mask).view(torch.float32)


def orthonormal(factor_XR: Tensor) -> Tensor:
    """Return nearly orthonormal columns that span the same space, (X, R) float64.

    Columns that are mere noise become short. A factor of zeros stays zero.

    Args:
        factor_XR: (X, R) of any float dtype. Not changed.
    """
    wide_XR = factor_XR.to(torch.float64)
    # Columns of length 1 keep the Gram matrix well scaled.
    lengths_R = wide_XR.norm(dim=0)
    wide_XR = wide_XR / torch.where(lengths_R > 0, lengths_R, 1.0)
    gram_RR = wide_XR.T @ wide_XR
    gram_RR.diagonal().add_(_RIDGE)
    root_RR = torch.linalg.cholesky(gram_RR)
    columns_RX: Tensor = torch.linalg.solve_triangular(root_RR, wide_XR.T, upper=False)
    return columns_RX.T


def first_right_factor(guide_XY: Tensor, rank: int) -> Tensor:
    """Return where the power iteration starts: orthonormal columns, (Y, R) float32.

    Args:
        guide_XY: What the members have in common. Zeros before the first average.
        rank: R.
    """
    start_YR = _noise(guide_XY.shape[1], rank).to(guide_XY.device)
    if bool(guide_XY.any()):
        wide_XY = guide_XY.to(torch.float32)
        noise_YR = start_YR * (1e-3 * wide_XY.norm() ** 2 / wide_XY.numel())
        start_YR = wide_XY.T @ (wide_XY @ start_YR) + noise_YR
    return orthonormal(start_YR).to(torch.float32)


def _noise(num_rows: int, num_columns: int) -> Tensor:
    """Return whole numbers that are the same on every host, (num_rows, num_columns) float32."""
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + num_columns)
    shape = (num_rows, num_columns)
    return torch.randint(-1000, 1001, shape, generator=generator).to(torch.float32)


def left_factor(matrix_XY: Tensor, right_YR: Tensor) -> Tensor:
    """Return a member's P = U Q, (X, R)."""
    return matrix_XY @ right_YR.to(matrix_XY.dtype)


def right_factor(matrix_XY: Tensor, left_XR: Tensor) -> Tensor:
    """Return a member's Q = U^T P, (Y, R), for the agreed P."""
    return matrix_XY.T @ left_XR.to(matrix_XY.dtype)


def agreed_left(mean_XR: Tensor) -> Tensor:
    """Return the P that all members use, (X, R) float32, from the average of theirs."""
    return agreed(orthonormal(mean_XR))


def product(left_XR: Tensor, right_YR: Tensor) -> Tensor:
    """Return P Q^T, (X, Y), in the dtype of Q."""
    return left_XR.to(right_YR.dtype) @ right_YR.T


def agreed_product(left_XR: Tensor, right_YR: Tensor) -> Tensor:
    """Return the P Q^T that all members come to, (X, Y) float32, to 18 bits of the largest P.

    Every product and sum in it is exact, so neither the device nor its order of adding matters.
    """
    rank_bits = (left_XR.shape[1] - 1).bit_length()
    right_bits = min(_RIGHT_BITS_MAX, _EXACT_BITS - _LEFT_BITS - rank_bits)
    left_XR, left_unit = _whole(left_XR, _LEFT_BITS)
    right_YR, right_unit = _whole(right_YR, right_bits)
    return (left_XR @ right_YR.T).mul_(left_unit * right_unit).to(torch.float32)


def _whole(values: Tensor, bits: int) -> tuple[Tensor, float]:
    """Return values as whole numbers of so many bits, float64, and the power of two they count."""
    _, exponent = math.frexp(float(values.abs().amax()))
    unit = 2.0 ** (exponent - bits)
    return (values.to(torch.float64) / unit).round_(), unit


def effective_rank(left_XR: Tensor, right_YR: Tensor) -> float:
    """Return how many directions P Q^T really has: the exponential of its spectrum's entropy.

    Args:
        left_XR: Nearly orthonormal.
        right_YR: Any.

    Source: The effective rank (Roy and Vetterli, EUSIPCO 2007). The paper names none.
    """
    # Singular values of P Q^T are those of L^T Q^T, where L L^T = P^T P.
    wide_XR, wide_YR = left_XR.to(torch.float64), right_YR.to(torch.float64)
    gram_RR = wide_XR.T @ wide_XR
    gram_RR.diagonal().add_(_RIDGE)
    root_RR = torch.linalg.cholesky(gram_RR)
    small_RR = root_RR.T @ (wide_YR.T @ wide_YR) @ root_RR
    values_R = torch.linalg.eigvalsh(small_RR).clamp(min=0).sqrt()
    total = values_R.sum()
    if not bool(total > 0):
        return 0.0
    shares_R = values_R[values_R > 0] / total
    return float(torch.exp(-(shares_R * shares_R.log()).sum()))
