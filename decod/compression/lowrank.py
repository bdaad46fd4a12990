"""Factors of matrices: a matrix U becomes P Q^T, with few columns in P and Q.

Source: PowerSGD (arXiv:1905.13727), algorithm 1, as DiLoCoX (arXiv:2506.21263), section 2.4.2, uses
it. Deviations:

- The power iteration does not start from the last Q. It starts from a matrix that all members hold
  anyway, the *guide*: a decayed mean of the averages so far, such as the outer momentum. A member
  that has just joined then starts as all others do.
- P is orthonormalised by a Cholesky factor with a small ridge, in float64. The ridge keeps
  directions of noise small.

What all members must agree on must not depend on the order in which a device adds, nor on its
libraries. Matrix products are therefore products of whole numbers, which float64 adds exactly in
any order. All else is elementwise, and IEEE 754 rounds each operation in one way.

Legend: X rows of a matrix, Y columns, R rank.
"""

import torch
from torch import Tensor

_RIDGE = 1e-7
"""Added to a Gram matrix, as a share of its mean eigenvalue."""

_LEFT_BITS = 18
_RIGHT_BITS = 24
"""Bits of the whole numbers in place of the factors of a product, at most."""

_EXACT_BITS = 53
"""Whole numbers of so many bits are exact in float64, and so are their sums."""

_EXPONENT_BIAS = 1023
_MANTISSA_BITS = 52
"""Parts of a float64."""


def _whole(values_XR: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return each column as whole numbers of so many bits, and the powers of two that these count.

    Both are float64: (X, R) and (R,).
    """
    _, exponents_R = torch.frexp(values_XR.abs().amax(dim=0).to(torch.float64))
    biased_R = exponents_R.to(torch.int64) - bits + _EXPONENT_BIAS
    # A power of two by its bits, since a device's own may be wrong in the last one.
    units_R = (biased_R << _MANTISSA_BITS).view(torch.float64)
    return (values_XR.to(torch.float64) / units_R).round_(), units_R


def _left_bits(num_terms: int) -> int:
    """Return how long the numbers may be whose squares are added exactly, so many at a time."""
    return min(_LEFT_BITS, (_EXACT_BITS - num_terms.bit_length()) // 2)


def orthonormal(factor_XR: Tensor) -> Tensor:
    """Return nearly orthonormal columns that span the same space, (X, R) float64.

    Columns that are mere noise become short. A factor of zeros stays zero. The result has the same
    bits on every device.

    Args:
        factor_XR: (X, R) of any float dtype. Not changed.
    """
    num_rows, rank = factor_XR.shape
    bits = _left_bits(max(num_rows, rank))
    whole_XR, _ = _whole(factor_XR, bits)
    gram_RR = whole_XR.T @ whole_XR
    # Columns of length 1 keep the Gram matrix well scaled.
    lengths_R = gram_RR.diagonal().sqrt()
    lengths_R = torch.where(lengths_R > 0, lengths_R, 1.0)
    gram_RR = gram_RR / lengths_R / lengths_R[:, None]
    gram_RR.diagonal().add_(_RIDGE)
    # The columns of P L^-T are orthonormal, where L L^T is the Gram matrix.
    mixing_RR = (_inverse_root(gram_RR) / lengths_R).T
    right_bits = min(_RIGHT_BITS, _EXACT_BITS - bits - rank.bit_length())
    mixing_RR, units_R = _whole(mixing_RR, right_bits)
    return (whole_XR @ mixing_RR).mul_(units_R)


def _inverse_root(gram_RR: Tensor) -> Tensor:
    """Return L^-1, where L L^T is a positive matrix and L is lower triangular, (R, R).

    Elimination turns (G, 1) into (L^T, L^-1). Products and differences are rounded one by one.
    """
    rank = len(gram_RR)
    rows_RS = torch.cat((gram_RR, torch.eye(rank, dtype=gram_RR.dtype).to(gram_RR.device)), dim=1)
    for k in range(rank):
        row_S = rows_RS[k]
        row_S.div_(row_S[k].sqrt())
        below_RS = rows_RS[k + 1 :]
        # Symmetry: the column below the diagonal is the row beside it.
        below_RS.sub_(row_S[k + 1 : rank, None] * row_S)
    return rows_RS[:, rank:]


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
    return orthonormal(mean_XR).to(torch.float32)


def product(left_XR: Tensor, right_YR: Tensor) -> Tensor:
    """Return P Q^T, (X, Y), in the dtype of Q."""
    return left_XR.to(right_YR.dtype) @ right_YR.T


def agreed_product(left_XR: Tensor, right_YR: Tensor) -> Tensor:
    """Return the P Q^T that all members come to, (X, Y) float32."""
    rank = left_XR.shape[1]
    right_bits = min(_RIGHT_BITS, _EXACT_BITS - _LEFT_BITS - rank.bit_length())
    left_XR, left_units_X = _whole_rows(left_XR, _LEFT_BITS)
    right_YR, right_units_Y = _whole_rows(right_YR, right_bits)
    found_XY = left_XR @ right_YR.T
    return found_XY.mul_(left_units_X[:, None]).mul_(right_units_Y).to(torch.float32)


def _whole_rows(values_XR: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return `_whole` of rows: (X, R) and (X,)."""
    whole_RX, units_X = _whole(values_XR.T, bits)
    return whole_RX.T, units_X


def effective_rank(left_XR: Tensor, right_YR: Tensor) -> float:
    """Return how many directions P Q^T really has: the exponential of its spectrum's entropy.

    Args:
        left_XR: Nearly orthonormal.
        right_YR: Any.

    Source: The effective rank (Roy and Vetterli, EUSIPCO 2007). The paper names none.
    """
    # Singular values of P Q^T are those of L^T Q^T, where L L^T = P^T P.
    wide_XR = left_XR.to(torch.float64)
    wide_YR = right_YR.to(torch.float64)
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
