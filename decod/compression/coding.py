"""Formats of a run of numbers on its way between members, and their sizes. Imports no torch.

The number of elements fixes the number of bytes, so a receiver knows the size beforehand.
"""

from dataclasses import dataclass

BLOCK_SIZE = 256
"""Elements that share a scale. A scale is a float32: 0.125 bits an element."""

SCALE_BYTES = 4


class CompressionError(ValueError):
    """Numbers can't be compressed, or bytes from a member are not what they should be."""


@dataclass(frozen=True, slots=True)
class FloatCoding:
    """Every element as it is, or rounded to a shorter float.

    Attributes:
        dtype: Name of a torch dtype: `float64`, `float32`, `float16` or `bfloat16`.
    """

    dtype: str

    def num_bytes(self, num_elements: int) -> int:
        """Return the size of so many elements, in bytes."""
        return num_elements * {"float64": 8, "float32": 4}.get(self.dtype, 2)


@dataclass(frozen=True, slots=True)
class BlockCoding:
    """Whole numbers, with one scale for each block of elements.

    All scales come first, then the codes of all blocks. The last block is filled up. With 4 bits, a
    byte holds an element of a block's first half and the one of its second half.

    Attributes:
        bits: 8 or 4.
        block_size: Elements of a block. Even with 4 bits.
    """

    bits: int
    block_size: int = BLOCK_SIZE

    @classmethod
    def of_rows(cls, bits: int, row_size: int) -> "BlockCoding":
        """Return the format for rows of so many elements in which no block belongs to two rows.

        The blocks are as long as `BLOCK_SIZE` allows.
        """
        return cls(bits, max(k for k in range(1, BLOCK_SIZE + 1) if row_size % k == 0))

    def num_blocks(self, num_elements: int) -> int:
        """Return the number of blocks that so many elements fill."""
        return -(-num_elements // self.block_size)

    def num_bytes(self, num_elements: int) -> int:
        """Return the size of so many elements, in bytes."""
        return self.num_blocks(num_elements) * (SCALE_BYTES + self.code_bytes)

    @property
    def code_bytes(self) -> int:
        """Size of a block's codes, in bytes."""
        return self.block_size * self.bits // 8

    @property
    def code_max(self) -> int:
        """The largest code. The smallest is its negative, so that 0 is exact."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, slots=True)
class SparseCoding:
    """One random candidate of every `stride` elements, and the largest of the candidates.

    All members draw the same candidates from a common seed. Of each block of `BLOCK_SIZE`
    candidates, the `num_kept` largest travel, as 4-bit codes with one scale and 8-bit positions.

    Source: CocktailSGD (ICML 2023), section 3. Deviation: the largest are chosen within a block, so
    that a position takes a byte and the size is known beforehand. The paper chooses among all.

    Attributes:
        stride: Elements for each candidate.
        num_kept: Of a block of candidates. Even, so that codes fill bytes.
    """

    stride: int
    num_kept: int

    def num_candidates(self, num_elements: int) -> int:
        """Return the number of candidates among so many elements."""
        return -(-num_elements // self.stride)

    def num_bytes(self, num_elements: int) -> int:
        """Return the size of so many elements, in bytes."""
        num_blocks = -(-self.num_candidates(num_elements) // BLOCK_SIZE)
        return num_blocks * (SCALE_BYTES + self.num_kept + self.num_kept // 2)


Coding = FloatCoding | BlockCoding | SparseCoding
