"""Causal attention by one of torch's fused kernels, which never hold the scores of all positions.

torch has a fallback that holds them: (B, H, T, T), which are 8 GiB for one sequence of 8192 tokens
and 32 heads in float32. It takes the fallback without a word if fewer key heads than query heads
are given to a kernel that wants as many. So keys and values are repeated for those.

Legend: B sequences, T new positions, S all positions, H query heads, K key-value heads, E a head's
width.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from decod.model.cache import KeyValueCache

_GROUPED_WIDTH_MAX = 256
"""Widest heads of the kernel that takes fewer key heads."""


def causal_attention(
    query_BTHE: Tensor,
    key_BTKE: Tensor,
    value_BTKE: Tensor,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """Return what each query head reads from the positions up to its own, (B, T, H * E).

    Args:
        query_BTHE: Queries.
        key_BTKE: Keys. K divides H.
        value_BTKE: Values.
        cache: Holds the positions before. Keys and values are added to it.
    """
    query_BHTE = query_BTHE.transpose(1, 2)
    key_BKSE, value_BKSE = key_BTKE.transpose(1, 2), value_BTKE.transpose(1, 2)
    if cache is not None:
        key_BKSE, value_BKSE = cache.extend(key_BKSE, value_BKSE)
    num_groups = query_BHTE.shape[1] // key_BKSE.shape[1]
    grouped = num_groups > 1 and _takes_groups(query_BHTE)
    if num_groups > 1 and not grouped:
        key_BKSE = key_BKSE.repeat_interleave(num_groups, dim=1)
        value_BKSE = value_BKSE.repeat_interleave(num_groups, dim=1)
    mixed_BHTE = functional.scaled_dot_product_attention(
        query_BHTE,
        key_BKSE,
        value_BKSE,
        # A single new position may look at all that the cache holds.
        is_causal=cache is None or query_BHTE.shape[2] > 1,
        enable_gqa=grouped,
    )
    return mixed_BHTE.transpose(1, 2).flatten(2)


def _takes_groups(query_BHTE: Tensor) -> bool:
    """Return whether a fused kernel of this device and dtype takes fewer key heads: FlashAttention.

    Source: torch's own conditions for it, `use_flash_attention` in `sdp_utils.cpp`.
    """
    return (
        query_BHTE.is_cuda
        and query_BHTE.dtype in (torch.bfloat16, torch.float16)
        and query_BHTE.shape[-1] <= _GROUPED_WIDTH_MAX
        and _has_flash(query_BHTE.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    """Return whether a GPU is an Nvidia Ampere or newer."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
