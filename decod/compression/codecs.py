"""Numbers to bytes and back, in every format of `decod.compression.coding`.

All arithmetic is elementwise and rounds each operation once, so every device computes the same
bits. Values are handled in chunks that fit into a CPU's second-level cache.

Legend: N elements of a run, B blocks, K codes of a block, C bytes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from decod.compression import sparse
from decod.compression.coding import (
    SCALE_BYTES,
    BlockCoding,
    Coding,
    CompressionError,
    FloatCoding,
    SparseCoding,
)
from decod.compression.scales import check_scales, scales_of

_CHUNK_SIZE, _CHUNK_SIZE_CUDA = 1 << 18, 1 << 24
"""Elements that are handled at a time."""

_ROUNDER = 1.5 * 2**23
"""Adding and subtracting it rounds a small float32 to a whole number, half to even."""


@torch.no_grad()
def encode(coding: Coding, values_N: Tensor, *, seed: int = 0) -> Tensor:
    """Return a run of numbers as bytes.

    Args:
        coding: The format.
        values_N: (N,) float32 or float64. Not changed.
        seed: Draws the candidates of a sparse format. Common to all members.

    Returns:
        (C,) uint8 on the device of the values, `coding.num_bytes(N)` long. New memory.

    Raises:
        CompressionError: A value is NaN, infinite or too large for the format.
    """
    match coding:
        case FloatCoding(dtype):
            coded_N = values_N.to(_dtype(dtype), copy=True)
            wide = torch.float64 if dtype == "float64" else torch.float32
            # NaN and infinity survive a sum.
            if not bool(torch.isfinite(coded_N.sum(dtype=wide))):
                raise CompressionError(f"a value is NaN, infinite or too large for {dtype}")
            return coded_N.view(torch.uint8)
        case BlockCoding():
            return _encode_blockwise(coding, values_N.to(torch.float32))
        case SparseCoding():
            return sparse.encode(coding, values_N.to(torch.float32), seed)


@torch.no_grad()
def decode(coding: Coding, coded_C: Tensor, num_elements: int, *, seed: int = 0) -> Tensor:
    """Return the numbers that bytes stand for.

    Args:
        coding: The format.
        coded_C: (C,) uint8. Not changed.
        num_elements: N.
        seed: As for `encode`.

    Returns:
        (N,) float64 if that is the format, or else float32. New memory on the same device.

    Raises:
        CompressionError: The bytes have the wrong length, or a scale or a position is impossible.
    """
    expected = coding.num_bytes(num_elements)
    if coded_C.dtype != torch.uint8 or coded_C.shape != (expected,):
        raise CompressionError(
            f"{coded_C.numel()} bytes came for {num_elements} elements, not {expected}"
        )
    match coding:
        case FloatCoding(dtype):
            wide = torch.float64 if dtype == "float64" else torch.float32
            return _aligned(coded_C).view(_dtype(dtype)).to(wide, copy=True)
        case BlockCoding():
            return _decode_blockwise(coding, coded_C, num_elements)
        case SparseCoding():
            return sparse.decode(coding, coded_C, num_elements, seed)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _aligned(coded_C: Tensor) -> Tensor:
    """Return the same bytes at an address that any element may have."""
    return coded_C if coded_C.data_ptr() % 8 == 0 else coded_C.clone()


def _chunks(blocks: Tensor) -> Iterator[slice]:
    num_blocks, block_size = blocks.shape
    step = (_CHUNK_SIZE_CUDA if blocks.is_cuda else _CHUNK_SIZE) // block_size
    for start in range(0, num_blocks, step):
        yield slice(start, min(start + step, num_blocks))


def _padded(values_N: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Return the values as blocks, with zeros at the end."""
    missing = num_blocks * block_size - values_N.numel()
    filled = torch.nn.functional.pad(values_N, (0, missing)) if missing else values_N
    return filled.view(num_blocks, block_size)


def _encode_blockwise(coding: BlockCoding, values_N: Tensor) -> Tensor:
    num_blocks, half = coding.num_blocks(values_N.numel()), coding.block_size // 2
    coded_C = torch.empty(
        coding.num_bytes(values_N.numel()), dtype=torch.uint8, device=values_N.device
    )
    scales_B = coded_C[: num_blocks * SCALE_BYTES].view(torch.float32)
    codes_BK = coded_C[num_blocks * SCALE_BYTES :].view(num_blocks, coding.code_bytes)
    blocks = _padded(values_N, num_blocks, coding.block_size)
    for here in _chunks(blocks):
        scales_B[here] = scales_of(blocks[here], coding.code_max)
        whole = blocks[here] / scales_B[here, None]
        whole.add_(_ROUNDER).sub_(_ROUNDER)
        if coding.bits == 8:
            codes_BK[here].view(torch.int8).copy_(whole)
        else:
            whole.add_(8.0)
            codes_BK[here].copy_(torch.add(whole[:, :half], whole[:, half:], alpha=16))
    return coded_C


def _decode_blockwise(coding: BlockCoding, coded_C: Tensor, num_elements: int) -> Tensor:
    num_blocks, half = coding.num_blocks(num_elements), coding.block_size // 2
    coded_C = _aligned(coded_C)
    scales_B = coded_C[: num_blocks * SCALE_BYTES].view(torch.float32)
    check_scales(scales_B)
    codes_BK = coded_C[num_blocks * SCALE_BYTES :].view(num_blocks, coding.code_bytes)
    blocks = torch.empty((num_blocks, coding.block_size), device=coded_C.device)
    for here in _chunks(blocks):
        # New memory is slow to write, so each block is written once.
        whole = torch.empty_like(blocks[here])
        if coding.bits == 8:
            whole.copy_(codes_BK[here].view(torch.int8))
        else:
            whole[:, :half] = codes_BK[here] & 15
            whole[:, half:] = codes_BK[here] >> 4
            whole.sub_(8.0)
        torch.mul(whole, scales_B[here, None], out=blocks[here])
    return blocks.view(-1)[:num_elements]
