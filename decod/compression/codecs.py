"""Numbers to bytes and back, in every format of `decod.compression.plan`.

All arithmetic is elementwise and rounds each operation once, so every device computes the same
bits. Values are handled in chunks that fit into a CPU's second-level cache. A block of numbers has
a scale: what a code of 1 stands for. The sparse format keeps few elements: the largest of random
candidates.

The rotated format is for activations and their gradients. All tokens of a sequence have much in
common, and a few elements are far larger than the others. So the mean of the sequence travels by
itself, and a rotation spreads large elements over all of a tile:

    values - mean -> signs -> Walsh-Hadamard transform -> a scale for each tile -> codes, -7 to 7

Both ends know signs and transform, so a receiver turns the codes back. It may read other last bits
on another device. Activations are rounded to the nearest code. Gradients are rounded up or down at
random, so that they are right on average, and sums over many microbatches lose little. The noise
depends on nothing but a seed and the place of an element: whoever repeats a pass sends the same.

Source of the rotation: QuaRot (arXiv:2404.00456), which computes with rotated activations. Here
they are rotated for their way alone. The constants of `_mix` are those of two rounds of Chris
Wellons's hash function `triple32`.

Legend: N elements of a run, B blocks or tiles, K codes of a block or elements kept of it, M
candidates, C bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from decod.compression.plan import (
    BLOCK_SIZE,
    SCALE_BYTES,
    BlockCoding,
    Coding,
    CompressionError,
    FloatCoding,
    RotatedCoding,
    SparseCoding,
)

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


_SPARSE_CODE_MAX = 7


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


def encode_sparse(coding: SparseCoding, values_N: Tensor, seed: int) -> Tensor:
    """Return a run of numbers as bytes, (C,) uint8. See `encode`."""
    device = values_N.device
    num_elements = values_N.numel()
    chosen_M = values_N[candidates(coding, num_elements, seed, device)]
    num_blocks = -(-chosen_M.numel() // BLOCK_SIZE)
    missing = num_blocks * BLOCK_SIZE - chosen_M.numel()
    blocks = torch.nn.functional.pad(chosen_M, (0, missing)).view(num_blocks, BLOCK_SIZE)
    # A stable sort, so that equal values give the same choice everywhere.
    order = torch.sort(blocks.abs(), dim=1, descending=True, stable=True).indices
    places_BK = order[:, : coding.num_kept].sort(dim=1).values
    kept_BK = torch.gather(blocks, 1, places_BK)
    scales_B = scales_of(kept_BK, _SPARSE_CODE_MAX)
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


def decode_sparse(coding: SparseCoding, coded_C: Tensor, num_elements: int, seed: int) -> Tensor:
    """Return the numbers that bytes stand for, (N,) float32. See `decode`."""
    device = coded_C.device
    kept = coding.num_kept
    num_candidates = coding.num_candidates(num_elements)
    num_blocks = -(-num_candidates // BLOCK_SIZE)
    scales_C, places_C, codes_C = torch.split(coded_C, [*coding.runs(num_elements)])
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


_CHUNK_SIZE = 1 << 18
_CHUNK_SIZE_ACCELERATOR = 1 << 24
"""Elements that are handled at a time."""

_ROUNDER = 1.5 * 2**23
"""Adding and subtracting it rounds a small float32 to a whole number, half to even."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise with which a tensor's elements are rounded.

    Attributes:
        seed: Names the tensor.
        first: Place of the first element, if what is rounded is a part of the tensor.
    """

    seed: int
    first: int = 0


@torch.no_grad()
def encode(
    coding: Coding, values_N: Tensor, *, seed: int = 0, noise: Noise | None = None
) -> Tensor:
    """Return a run of numbers as bytes.

    Args:
        coding: The format.
        values_N: (N,) float32 or float64. Not changed.
        seed: Draws the candidates of a sparse format. Common to all members.
        noise: Of rounding to rotated codes. None: they are the nearest.

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
            return encode_sparse(coding, values_N.to(torch.float32), seed)
        case RotatedCoding():
            return _encode_rotated(coding, values_N.to(torch.float32), noise)


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
            return decode_sparse(coding, coded_C, num_elements, seed)
        case RotatedCoding():
            return _decode_rotated(coding, coded_C, num_elements)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _aligned(coded_C: Tensor) -> Tensor:
    """Return the same bytes at an address that any element may have."""
    return coded_C if coded_C.data_ptr() % 8 == 0 else coded_C.clone()


def _chunks(blocks: Tensor) -> Iterator[slice]:
    num_blocks, block_size = blocks.shape
    step = (_CHUNK_SIZE if blocks.is_cpu else _CHUNK_SIZE_ACCELERATOR) // block_size
    for start in range(0, num_blocks, step):
        yield slice(start, min(start + step, num_blocks))


def _padded(values_N: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Return the values as blocks, with zeros at the end."""
    missing = num_blocks * block_size - values_N.numel()
    filled = torch.nn.functional.pad(values_N, (0, missing)) if missing else values_N
    return filled.view(num_blocks, block_size)


def _encode_blockwise(coding: BlockCoding, values_N: Tensor) -> Tensor:
    num_blocks = coding.num_blocks(values_N.numel())
    half = coding.block_size // 2
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
    num_blocks = coding.num_blocks(num_elements)
    half = coding.block_size // 2
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


_ROTATED_CODE_MAX = 7
_NOISE_BITS = 16


def _mix(numbers: Tensor) -> Tensor:
    """Turn int32 numbers into others that look random, in place."""
    for shift, mask, factor in ((17, 0x7FFF, -0x12A52B45), (11, 0x1FFFFF, -0x53B52EC3)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_(mask)).mul_(factor)
    return numbers.bitwise_xor_((numbers >> 15).bitwise_and_(0x1FFFF))


@lru_cache(maxsize=8)
def _rotation(tile_size: int, device: torch.device) -> Tensor:
    """Return the matrix that turns a tile, sqrt(K) times a rotation, (K, K). Not to be changed."""
    matrix = torch.ones((1, 1), device=device)
    while len(matrix) < tile_size:
        matrix = torch.cat((matrix.repeat(1, 2), torch.cat((matrix, -matrix), 1)))
    signs_K = _mix(torch.arange(1, tile_size + 1, dtype=torch.int32, device=device)) & 1
    return matrix * (1 - 2 * signs_K)[:, None]


def _encode_rotated(coding: RotatedCoding, values_N: Tensor, noise: Noise | None) -> Tensor:
    size, device = coding.tile_size, values_N.device
    coded_C = torch.empty(coding.num_bytes(values_N.numel()), dtype=torch.uint8, device=device)
    means_C, scales_C, codes_C = torch.split(coded_C, [*coding.runs(values_N.numel())])
    sequences = values_N.view(-1, coding.num_rows, coding.row_size)
    means = means_C.view(torch.bfloat16).view(-1, 1, coding.row_size)
    means.copy_(sequences.mean(dim=1, keepdim=True))
    scales_B = scales_C.view(torch.bfloat16)
    codes_BK = codes_C.view(-1, size // 2)
    matrix = _rotation(size, device)
    half = size // 2
    for rows, mean, here in _tiles(coding, sequences, means):
        turned_BK = (rows - mean).view(-1, size) @ matrix
        wide_B = scales_of(turned_BK, _ROTATED_CODE_MAX)
        # Rounded up to a bfloat16, so that no code is too large.
        wide_B.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
        scales_B[here] = wide_B
        turned_BK.div_(wide_B[:, None])
        if noise is None:
            turned_BK.add_(_ROUNDER).sub_(_ROUNDER)
        else:
            _round_at_random(turned_BK, noise, here.start * size)
        turned_BK.add_(8.0)
        codes_BK[here].copy_(torch.add(turned_BK[:, :half], turned_BK[:, half:], alpha=16))
    return coded_C


def _tiles(
    coding: RotatedCoding, sequences: Tensor, means: Tensor
) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield some rows of a sequence at a time, its mean, and the rows' tiles."""
    tiles_per_row = coding.row_size // coding.tile_size
    for index, sequence in enumerate(sequences):
        for rows in _chunks(sequence):
            first = index * coding.num_rows
            here = slice((first + rows.start) * tiles_per_row, (first + rows.stop) * tiles_per_row)
            yield sequence[rows], means[index].to(torch.float32), here


def _round_at_random(turned_BK: Tensor, noise: Noise, first: int) -> None:
    """Round numbers up or down, in place, each the likelier the nearer it is."""
    place_N = torch.arange(turned_BK.numel(), dtype=torch.int32, device=turned_BK.device)
    place_N.add_((noise.first + first) % 2**31).bitwise_xor_(noise.seed % 2**31)
    drawn_N = _mix(place_N).bitwise_and_((1 << _NOISE_BITS) - 1)
    turned_BK.view(-1).add_(drawn_N, alpha=2.0**-_NOISE_BITS)
    turned_BK.floor_()


def _decode_rotated(coding: RotatedCoding, coded_C: Tensor, num_elements: int) -> Tensor:
    size, device = coding.tile_size, coded_C.device
    means_C, scales_C, codes_C = torch.split(_aligned(coded_C), [*coding.runs(num_elements)])
    scales_B = scales_C.view(torch.bfloat16).to(torch.float32)
    check_scales(scales_B)
    codes_BK = codes_C.view(-1, size // 2)
    means = means_C.view(torch.bfloat16).view(-1, 1, coding.row_size)
    values = torch.empty((len(means), coding.num_rows, coding.row_size), device=device)
    back = _rotation(size, device).t() / size
    half = size // 2
    for rows, mean, here in _tiles(coding, values, means):
        turned_BK = torch.empty((here.stop - here.start, size), device=device)
        turned_BK[:, :half] = codes_BK[here] & 15
        turned_BK[:, half:] = codes_BK[here] >> 4
        turned_BK.sub_(8.0).mul_(scales_B[here, None])
        torch.add((turned_BK @ back).view_as(rows), mean, out=rows)
    return values.view(-1)
