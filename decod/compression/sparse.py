"""The format that keeps few elements: random candidates, and the largest of these.

Legend: N elements of a run, M candidates, B blocks of candidates, K kept of a block, C bytes.
"""

import torch
from torch import Tensor

from decod.compression.coding import BLOCK_SIZE, SCALE_BYTES, CompressionError, SparseCoding
from decod.compression.scales import check_scales, scales_of

_CODE_MAX = 7


def candidates(coding: SparseCoding, num_elements: int, seed: int, device: torch.device) -> Tensor:
    """Return the positions of the candidates, (M,) int64: one in each run of `stride` elements.

    Whole numbers alone decide, so that all devices draw the same. The last run may be shorter.
    """
    index_M = torch.arange(coding.num_candidates(num_elements), device=device)
    # A multiplicative hash. 31 bits of each factor keep products within an int64.
    mixed_M = (index_M + seed % 2**31) % 2**31
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed_M = (mixed_M ^ (mixed_M >> 16)) * factor % 2**31
    start_M = index_M * coding.stride
    length_M = torch.clamp(num_elements - start_M, max=coding.stride)
    return start_M + (mixed_M ^ (mixed_M >> 15)) % length_M


def encode(coding: SparseCoding, values_N: Tensor, seed: int) -> Tensor:
    """Return a run of numbers as bytes, (C,) uint8. See `codecs.encode`."""
    device, num_elements = values_N.device, values_N.numel()
    chosen_M = values_N[candidates(coding, num_elements, seed, device)]
    num_blocks = -(-chosen_M.numel() // BLOCK_SIZE)
    missing = num_blocks * BLOCK_SIZE - chosen_M.numel()
    blocks = torch.nn.functional.pad(chosen_M, (0, missing)).view(num_blocks, BLOCK_SIZE)
    # A stable sort, so that equal values give the same choice everywhere.
    order = torch.sort(blocks.abs(), dim=1, descending=True, stable=True).indices
    places_BK = order[:, : coding.num_kept].sort(dim=1).values
    kept_BK = torch.gather(blocks, 1, places_BK)
    scales_B = scales_of(kept_BK, _CODE_MAX)
    codes_BK = torch.round(kept_BK / scales_B[:, None]) + 8.0
    half = coding.num_kept // 2
    packed_BK = torch.add(codes_BK[:, :half], codes_BK[:, half:], alpha=16)
    return torch.cat(
        (
            scales_B.view(torch.uint8),
            places_BK.to(torch.uint8).view(-1),
            packed_BK.to(torch.uint8).view(-1),
        )
    )


def decode(coding: SparseCoding, coded_C: Tensor, num_elements: int, seed: int) -> Tensor:
    """Return the numbers that bytes stand for, (N,) float32. See `codecs.decode`."""
    device, kept = coded_C.device, coding.num_kept
    num_candidates = coding.num_candidates(num_elements)
    num_blocks = -(-num_candidates // BLOCK_SIZE)
    sizes = [num_blocks * SCALE_BYTES, num_blocks * kept, num_blocks * (kept // 2)]
    scales_C, places_C, codes_C = torch.split(coded_C, sizes)
    scales_B = scales_C.clone().view(torch.float32)
    check_scales(scales_B)
    places_BK = places_C.view(num_blocks, kept).to(torch.int64)
    if not bool((places_BK.diff(dim=1) > 0).all()):
        raise CompressionError("the positions of a block are not in ascending order")
    packed_BK = codes_C.view(num_blocks, kept // 2)
    codes_BK = torch.cat((packed_BK & 15, packed_BK >> 4), dim=1).to(torch.float32) - 8.0
    blocks = torch.zeros((num_blocks, BLOCK_SIZE), device=device)
    blocks.scatter_(1, places_BK, codes_BK * scales_B[:, None])
    if bool(blocks.view(-1)[num_candidates:].any()):
        raise CompressionError("a position lies behind the last candidate")
    values_N = torch.zeros(num_elements, device=device)
    chosen_M = blocks.view(-1)[:num_candidates]
    values_N[candidates(coding, num_elements, seed, device)] = chosen_M
    return values_N
