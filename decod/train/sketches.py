"""Makes sketches of tensors (`decod.protocol.core.fingerprints`)."""

import math

import torch
from torch import Tensor

from decod.protocol.core.fingerprints import ERROR_MAX, NUM_SUMS, Sketch

_CHUNK, _CHUNK_CUDA = 1 << 16, 1 << 22
"""Elements to sign at a time: on a CPU their signs fit into a cache, and on CUDA they fill the
device. Multiples of `NUM_SUMS`."""

_KEPT_MAX = 1 << 24
"""So many signs are kept, a byte each."""

_MIXERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)
"""Odd numbers with bits that look random, by which a product mixes its other factor."""


def error_between(told: Tensor, true: Tensor) -> float:
    """Return how far two tensors of the same shape are from each other; see
    `decod.protocol.core.fingerprints.error_of`."""
    told, true = (each.detach().double() for each in (told, true))
    length = max(float(told.norm()), float(true.norm()))
    away = float((told - true).norm())
    if not math.isfinite(away) or not math.isfinite(length):
        return ERROR_MAX
    return min(away / length, ERROR_MAX) if length else 0.0


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
        flat = tensor.detach().reshape(-1)
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=flat.device)
        size = _CHUNK_CUDA if flat.is_cuda else _CHUNK
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
