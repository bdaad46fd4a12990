"""Scales of blocks: what a code of 1 stands for.

Legend: B blocks, K elements of a block.
"""

import torch
from torch import Tensor

from decod.compression.coding import CompressionError

SCALE_MIN = torch.finfo(torch.float32).tiny
"""The smallest scale, that of a block of zeros. Smaller numbers lose bits on some devices."""


def scales_of(blocks_BK: Tensor, code_max: int) -> Tensor:
    """Return a scale for each block, by which no element's code exceeds `code_max`, (B,).

    Args:
        blocks_BK: (B, K) float32. Not changed.
        code_max: The largest code.

    Raises:
        CompressionError: An element is NaN or infinite.
    """
    # `aminmax` needs no copy, but takes five times as long on a CPU.
    scales_B = blocks_BK.abs().amax(dim=1) / code_max
    if not torch.isfinite(scales_B.sum()):
        raise CompressionError("a value to compress is NaN, infinite or too large")
    return scales_B.clamp_(min=SCALE_MIN)


def check_scales(scales_B: Tensor) -> None:
    """Raise CompressionError if a scale from elsewhere is not a positive number.

    Args:
        scales_B: (B,) float32.
    """
    good_B = (scales_B >= SCALE_MIN) & torch.isfinite(scales_B)
    if not bool(good_B.all()):
        index = int(torch.nonzero(~good_B)[0])
        raise CompressionError(f"the scale of block {index} is {float(scales_B[index])}")
