"""Causal attention, rotary positions, and the keys and values of positions that were seen.

Attention uses one of torch's fused kernels, which never hold the scores of all positions. torch has
a fallback that holds them: (B, H, T, T), which are 8 GiB for one sequence of 8192 tokens and 32
heads in float32. It takes the fallback without a word if fewer key heads than query heads are given
to a kernel that wants as many. So keys and values are repeated for those, and for every kernel that
takes a mask.

With rotary positions, each head's query and key turn by an angle that grows with the position.
Pairs of the rotation are (i, i + E/2), as in Hugging Face checkpoints.

Legend: B sequences, T new positions, S all positions, H query heads, K key-value heads, E a head's
width.

Source: RoFormer (arXiv:2104.09864), section 3.4. Scaling: Position Interpolation
(arXiv:2306.15595), section 3.2, for `linear`; Llama 3.1's own code for `llama3`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from decod.devices import device_of
from decod.run.model_config import ModelConfig, RopeType


class KeyValueCache:
    """The memory of one block's attention. It takes one text from its beginning.

    Args:
        num_positions_max: Most positions that it will hold. Memory for all of them is taken when
            the first come.
    """

    def __init__(self, num_positions_max: int) -> None:
        self.num_positions_max = num_positions_max
        self.num_positions = 0
        self._keys_values: tuple[Tensor, Tensor] | None = None

    def extend(self, key_BKTE: Tensor, value_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions. Return the keys and values of all positions, (B, K, S, E) each.

        Args:
            key_BKTE: Keys of the positions that follow. Several at a time only at the beginning.
            value_BKTE: Their values.
        """
        start = self.num_positions
        end = self.num_positions = start + key_BKTE.shape[2]
        # Torch's causal mask is only right for a single position, or from the beginning on.
        assert start == 0 or end == start + 1, (start, end)
        assert end <= self.num_positions_max, (end, self.num_positions_max)
        if self._keys_values is None:
            self._keys_values = self._new(key_BKTE), self._new(value_BKTE)
        keys, values = self._keys_values
        keys[:, :, start:end], values[:, :, start:end] = key_BKTE, value_BKTE
        return keys[:, :, :end], values[:, :, :end]

    def _new(self, like_BKTE: Tensor) -> Tensor:
        num_sequences, num_heads, _, width = like_BKTE.shape
        shape = (num_sequences, num_heads, self.num_positions_max, width)
        return torch.empty(shape, dtype=like_BKTE.dtype, device=like_BKTE.device)


Rotary = tuple[Tensor, Tensor]
"""Cosines, and sines whose first half is negated, each (T, 1, E) in the model's dtype. (B, T, 1, E)
if documents are read apart."""


def rotary_tables(model: ModelConfig, length: int, *, dtype: torch.dtype, device: str) -> Rotary:
    """Return the tables of positions 0 .. length - 1.

    Angles are computed in float32 as Hugging Face does, in float64 for float64 models.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(torch.arange(length, dtype=wide), _frequencies(model, wide))[:, None]
    cos = angles.cos()
    sin = angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _frequencies(model: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return the growth of each angle from one position to the next, (E / 2,)."""
    exponents = torch.arange(0, model.head_width, 2, dtype=dtype) / model.head_width
    plain = 1.0 / (model.rope_theta**exponents)
    if model.rope_type is RopeType.DEFAULT:
        return plain
    slow = plain / model.rope_factor
    if model.rope_type is RopeType.LINEAR:
        return slow
    low = model.rope_low_freq_factor
    high = model.rope_high_freq_factor
    length = model.rope_original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    share = (length / wavelengths - low) / (high - low)
    # The order of operations is that of Hugging Face, because it decides the last bit.
    between = (1 - share) * plain / model.rope_factor + share * plain
    scaled = torch.where(wavelengths > length / low, slow, between)
    return torch.where(wavelengths < length / high, plain, scaled)


def rotate(heads_BTHE: Tensor, rotary: Rotary) -> Tensor:
    """Return the heads, (B, T, H, E), turned by their positions' angles."""
    cos, sin = rotary
    first, second = heads_BTHE.chunk(2, dim=-1)
    # Few operations matter here: on a CPU, four products and a concatenation take four times
    # longer.
    return torch.cat((second, first), dim=-1).mul_(sin).addcmul_(heads_BTHE, cos)


_GROUPED_WIDTH_MAX = 256
"""Widest heads of the kernel that takes fewer key heads."""


def within_documents(places_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask by which a position reads its own document, up to itself.

    Args:
        places_BT: int64, the place of each position in its document. A document begins with 0.
        dtype: The model's.

    Returns:
        (B, 1, T, T): 0 where the position of the row reads that of the column, else -infinity. All
        blocks share it. Of a mask of bool, each would keep such numbers for its backward pass.
    """
    documents_BT = (places_BT == 0).cumsum(dim=1)
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    mask_BTT = torch.zeros(same_BTT.shape, dtype=dtype, device=places_BT.device)
    return mask_BTT.masked_fill_(~same_BTT.tril_(), -math.inf)[:, None]


def causal_attention(
    query_BTHE: Tensor,
    key_BTKE: Tensor,
    value_BTKE: Tensor,
    cache: KeyValueCache | None = None,
    mask_B1TT: Tensor | None = None,
) -> Tensor:
    """Return what each query head reads from the positions up to its own, (B, T, H * E).

    Args:
        query_BTHE: Queries.
        key_BTKE: Keys. K divides H.
        value_BTKE: Values.
        cache: Holds the positions before. Keys and values are added to it.
        mask_B1TT: From `within_documents`, if documents are read apart. There is no cache then.
    """
    query_BHTE = query_BTHE.transpose(1, 2)
    key_BKSE = key_BTKE.transpose(1, 2)
    value_BKSE = value_BTKE.transpose(1, 2)
    if cache is not None:
        key_BKSE, value_BKSE = cache.extend(key_BKSE, value_BKSE)
    num_groups = query_BHTE.shape[1] // key_BKSE.shape[1]
    grouped = num_groups > 1 and mask_B1TT is None and _takes_groups(query_BHTE)
    if num_groups > 1 and not grouped:
        key_BKSE = key_BKSE.repeat_interleave(num_groups, dim=1)
        value_BKSE = value_BKSE.repeat_interleave(num_groups, dim=1)
    mixed_BHTE = functional.scaled_dot_product_attention(
        query_BHTE,
        key_BKSE,
        value_BKSE,
        attn_mask=mask_B1TT,
        # A single new position may look at all that the cache holds.
        is_causal=mask_B1TT is None and (cache is None or query_BHTE.shape[2] > 1),
        enable_gqa=grouped,
    )
    return mixed_BHTE.transpose(1, 2).flatten(2)


def _takes_groups(query_BHTE: Tensor) -> bool:
    """Return whether a fused kernel of this device and dtype takes fewer key heads: FlashAttention.

    Source: torch's own conditions for it, `use_flash_attention` in `sdp_utils.cpp`.
    """
    return (
        query_BHTE.dtype in (torch.bfloat16, torch.float16)
        and query_BHTE.shape[-1] <= _GROUPED_WIDTH_MAX
        and device_of(query_BHTE).takes_grouped_heads
    )
