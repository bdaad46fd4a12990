"""What tells of lies: what stands out of an average and its contributions, and sketches of tensors.

Honest contributions of a stage come from different microbatches of the same data. Their lengths are
alike, and they point more or less in one direction: that of their median, element by element.

Each part of the average holds a part of a member's own contribution. So all parts point more or
less where the contribution points, and are longer or shorter than it by the same factor.

What stands out is no proof of a lie. It makes an audit certain
(`decod.protocol.leadership.relay_audits`).

A sketch (`decod.protocol.core.fingerprints`) tells how far a tensor is from another.

Legend: K contributions, or parts. N elements of a part. S elements that are looked at.
"""

import math
import secrets
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from decod.devices import device_of
from decod.protocol.core.fingerprints import ERROR_MAX, NUM_SUMS, Sketch

_CHUNK = 1 << 16
_CHUNK_ACCELERATOR = 1 << 22
"""Elements to sign at a time: on a CPU their signs fit into a cache, and they fill an accelerator.
Multiples of `NUM_SUMS`."""

_KEPT_MAX = 1 << 24
"""So many signs are kept, a byte each."""

_MIXERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)
"""Odd numbers with bits that look random, by which a product mixes its other factor."""


def error_between(told: Tensor, true: Tensor) -> float:
    """Return how far two tensors of the same shape are from each other; see
    `decod.protocol.core.fingerprints.error_of`."""
    told, true = (_where_float64_is(each).double() for each in (told, true))
    length = max(float(told.norm()), float(true.norm()))
    away = float((told - true).norm())
    if not math.isfinite(away) or not math.isfinite(length):
        return ERROR_MAX
    return min(away / length, ERROR_MAX) if length else 0.0


def _where_float64_is(tensor: Tensor) -> Tensor:
    return tensor.detach() if device_of(tensor).has_float64 else tensor.detach().cpu()


def sketch_of(tensor: Tensor, seed: bytes) -> Sketch:
    """Return the sketch of a tensor of any shape, on any device."""
    return Sketcher(seed).sketch(tensor)


class Sketcher:
    """Makes sketches with one seed. It keeps the signs of short tensors, which take longest.

    Args:
        seed: 16 bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self._kept: dict[tuple[int, torch.device], Tensor] = {}

    def sketch(self, tensor: Tensor) -> Sketch:
        """Return the sketch of a tensor of any shape, on any device."""
        flat = _where_float64_is(tensor).reshape(-1)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=flat.device)
        size = _CHUNK if flat.is_cpu else _CHUNK_ACCELERATOR
        for start in range(0, flat.numel(), size):
            chunk = flat[start : start + size]
            signed = chunk * self._signs(start, len(chunk), chunk.device)
            if rest := len(signed) % NUM_SUMS:
                signed = torch.nn.functional.pad(signed, (0, NUM_SUMS - rest))
            sums += signed.view(-1, NUM_SUMS).sum(0, dtype=torch.float64)
        return Sketch(self.seed, tuple(sums.tolist()))

    def _signs(self, start: int, num: int, device: torch.device) -> Tensor:
        if start >= _KEPT_MAX:
            return _signs(self.seed, start, num, device)
        key = (start, device)
        kept = self._kept.get(key)
        if kept is None or len(kept) < num:
            kept = self._kept[key] = _signs(self.seed, start, num, device)
        return kept[:num]


def _signs(seed: bytes, start: int, num: int, device: torch.device) -> Tensor:
    """Return the signs of some elements, 1 or -1 each, (num,) int8.

    They are the same on every device, since products of whole numbers are.
    """
    first, second = (int.from_bytes(half, "little", signed=True) for half in (seed[:8], seed[8:]))
    bits = torch.arange(start, start + num, device=device).mul_(_MIXERS[0]).add_(first)
    for mixer in (_MIXERS[1], second | 1):
        bits ^= bits >> 31
        bits *= mixer
    bits ^= bits >> 31
    return (bits & 1).to(torch.int8).mul_(2).sub_(1)


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
    low_K = torch.minimum(lengths_K, rooted_K)
    high_K = torch.maximum(lengths_K, rooted_K)
    usual = lengths_K.median()
    too_short_K = high_K * _LENGTH_RATIO < usual
    too_long_K = low_K > usual * _LENGTH_RATIO
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
    ratios = list[float]()
    cosines = list[float]()
    for mean_N, each_N in zip(means_N, own_N, strict=True):
        step = max(1, mean_N.numel() // _SAMPLE)
        some = slice(secrets.randbelow(step), None, step)
        mean_S, own_S = (whole_N[some].float().cpu() for whole_N in (mean_N, each_N))
        length = float(mean_S.norm())
        own_length = float(own_S.norm())
        if not own_length:
            return []
        ratios.append(length / own_length)
        cosines.append(float(mean_S @ own_S) / own_length / length if length else 0.0)
    usual = median(ratios)
    agrees = median(cosines)
    return [
        part
        for part, (ratio, cosine) in enumerate(zip(ratios, cosines, strict=True))
        if ratio * _LENGTH_RATIO < usual
        or ratio > usual * _LENGTH_RATIO
        or cosine < agrees * _AGREES_LESS
    ]
