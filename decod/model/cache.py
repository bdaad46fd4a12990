"""Keys and values of the positions that a block has seen, so that a new token costs one position.

Legend: B sequences, T new positions, S all positions so far, K key-value heads, E a head's width.
"""

import torch
from torch import Tensor


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
