"""Which contributions to an average stand out from the others, and which parts of the average.

Honest contributions of a stage come from different microbatches of the same data. Their lengths are
alike, and they point more or less in one direction: that of their median, element by element.

Each part of the average holds a part of a member's own contribution. So all parts point more or
less where the contribution points, and are longer or shorter than it by the same factor.

What stands out is no proof of a lie. It makes an audit certain
(`decod.protocol.leadership.relay_audits`).

Legend: K contributions, or parts. N elements of a part. S elements that are looked at.
"""

import secrets
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

_NUM_MIN = 3
"""With fewer contributions, none stands out from the others."""

_SAMPLE = 1 << 16
"""So many elements are looked at. Nobody knows which."""

_LENGTH_RATIO = 4.0
"""A length that so many times differs from the median stands out. A sum of more microbatches is
longer: by their number, if their gradients agree, and by its root, if they are noise."""

_AGREES_LESS = 1 / 3
"""A cosine to the median that is so many times the usual one stands out."""


def standing_out(contributions_N: Sequence[Tensor], weights: Sequence[int]) -> list[int]:
    """Return the positions of contributions to a part that stand out from the others.

    Args:
        contributions_N: Of each member, (N,), finite.
        weights: Microbatches in each.
    """
    if len(contributions_N) < _NUM_MIN:
        return []
    step = max(1, contributions_N[0].numel() // _SAMPLE)
    some = slice(secrets.randbelow(step), None, step)
    sampled = [each[some].float().cpu() for each in contributions_N]
    mean_KS = torch.stack([s / weight for s, weight in zip(sampled, weights, strict=True)])
    lengths_K = mean_KS.norm(dim=1)
    median_S = mean_KS.median(dim=0).values
    ones_K = lengths_K.clamp_min(torch.finfo(lengths_K.dtype).tiny)
    cosines_K = mean_KS @ median_S / ones_K / median_S.norm().clamp_min(1e-30)
    weights_K = torch.tensor(weights, dtype=lengths_K.dtype)
    # A mean over more microbatches is shorter, by at most the root of their number.
    rooted_K = lengths_K * (weights_K / weights_K.median()).sqrt()
    low_K, high_K = torch.minimum(lengths_K, rooted_K), torch.maximum(lengths_K, rooted_K)
    usual = lengths_K.median()
    too_short_K, too_long_K = high_K * _LENGTH_RATIO < usual, low_K > usual * _LENGTH_RATIO
    agrees_less_K = cosines_K < cosines_K.median() * _AGREES_LESS
    odd_K = too_short_K | too_long_K | agrees_less_K
    return [position for position, odd in enumerate(odd_K.tolist()) if odd]


def means_standing_out(means_N: Sequence[Tensor], own_N: Sequence[Tensor]) -> list[int]:
    """Return the positions of parts of an average that stand out from the other parts.

    Args:
        means_N: All parts, (N,) each.
        own_N: What this member has contributed to each, at any scale, (N,) each.
    """
    if len(means_N) < _NUM_MIN:
        return []
    ratios, cosines = list[float](), list[float]()
    for mean_N, each_N in zip(means_N, own_N, strict=True):
        step = max(1, mean_N.numel() // _SAMPLE)
        some = slice(secrets.randbelow(step), None, step)
        mean_S, own_S = (whole_N[some].float().cpu() for whole_N in (mean_N, each_N))
        length, own_length = float(mean_S.norm()), float(own_S.norm())
        if not own_length:
            return []
        ratios.append(length / own_length)
        cosines.append(float(mean_S @ own_S) / own_length / length if length else 0.0)
    usual, agrees = median(ratios), median(cosines)
    return [
        part
        for part, (ratio, cosine) in enumerate(zip(ratios, cosines, strict=True))
        if ratio * _LENGTH_RATIO < usual
        or ratio > usual * _LENGTH_RATIO
        or cosine < agrees * _AGREES_LESS
    ]
