"""What a method sends of a stage's parameters: fragments, order, formats, sizes. Imports no torch.

The number of elements of a run fixes the number of its bytes, so a receiver knows the size
beforehand.

An average has one or two phases. Low-rank methods average the left factors of all matrices first,
and then the right factors, which depend on the average of the left. Each phase sends some sections.
A section is a flat run of numbers in one format. It is cut into parts, one for each member that
reduces.

Fragments are averaged in turn, so that the link carries an even load. Source: Streaming DiLoCo
(arXiv:2501.18512), section 3.1. Deviation: a fragment is a run of whole parameters of the flat
buffer, where the paper takes whole blocks of layers.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

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
        return num_elements * {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]

    def runs(self, num_elements: int) -> tuple[int, ...]:
        """Return that size."""
        return (self.num_bytes(num_elements),)


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
        return sum(self.runs(num_elements))

    def runs(self, num_elements: int) -> tuple[int, ...]:
        """Return the bytes of the scales, and of the codes."""
        num_blocks = self.num_blocks(num_elements)
        return num_blocks * SCALE_BYTES, num_blocks * self.code_bytes

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
        return sum(self.runs(num_elements))

    def runs(self, num_elements: int) -> tuple[int, ...]:
        """Return the bytes of the scales, of the positions, and of the codes."""
        num_blocks = -(-self.num_candidates(num_elements) // BLOCK_SIZE)
        return num_blocks * SCALE_BYTES, num_blocks * self.num_kept, num_blocks * self.num_kept // 2


TILE_MAX = 128
"""Elements of a tile at most: with a scale for each, 4.125 bits an element."""


@dataclass(frozen=True, slots=True)
class RotatedCoding:
    """4-bit codes of tiles that are rotated before, with a scale for each.

    See `decod.compression.codecs`. Rows come in sequences. The means of all sequences come first,
    then all scales, then the codes of all tiles. Means and scales are bfloat16. A byte of codes
    holds an element of a tile's first half and the one of its second half.

    Attributes:
        row_size: Elements of a row. Even.
        num_rows: Of a sequence.
    """

    row_size: int
    num_rows: int

    @property
    def tile_size(self) -> int:
        """Elements of a tile, a power of two. No tile belongs to two rows."""
        return min(TILE_MAX, self.row_size & -self.row_size)

    def num_bytes(self, num_elements: int) -> int:
        """Return the size of so many elements, in bytes."""
        return sum(self.runs(num_elements))

    def runs(self, num_elements: int) -> tuple[int, ...]:
        """Return the bytes of the means, of the scales, and of the codes."""
        num_means = num_elements // self.num_rows
        return num_means * 2, num_elements // self.tile_size * 2, num_elements // 2


Coding = FloatCoding | BlockCoding | SparseCoding | RotatedCoding


class Method(StrEnum):
    """A way to compress."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    LOWRANK = "lowrank"
    LOWRANK_INT4 = "lowrank+int4"
    COCKTAIL = "cocktail"

    @property
    def has_factors(self) -> bool:
        """Whether matrices travel as products of two factors."""
        return self in (Method.LOWRANK, Method.LOWRANK_INT4)

    @property
    def adapts(self) -> bool:
        """Whether averages can travel more or less finely by this method."""
        return self not in (Method.NONE, Method.COCKTAIL)


_CODINGS: Mapping[int, Coding | None] = {
    0: None,
    4: BlockCoding(4),
    8: BlockCoding(8),
    16: FloatCoding("float16"),
    32: None,
}
"""Formats by their number of bits. None: it depends on the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """A method and its numbers."""

    method: Method = Method.NONE
    """How contributions and averages travel."""
    rank: int = 64
    """The rank of the factors, for low-rank methods. The shape of a matrix bounds it. At least
    1."""
    random_ratio: float = 0.1
    """Share of elements that are candidates, for `cocktail`. In (0, 1]."""
    top_ratio: float = 0.08
    """Share of the candidates that travel, for `cocktail`. In (0, 1]."""
    bits: int = 0
    """The bits of each number that is neither dropped nor factored: 4, 8, 16 or 32. 0: as the
    method has it. Not for `cocktail`."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise CompressionError(f"rank is {self.rank}, but a factor has at least 1 column")
        for name in ("random_ratio", "top_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= 1):
                raise CompressionError(f"{name} is {value}, but a share lies in (0, 1]")
        if self.bits not in _CODINGS or (self.bits and self.method is Method.COCKTAIL):
            raise CompressionError(f"bits are {self.bits}, which {self.method} does not have")

    @property
    def sparse(self) -> SparseCoding:
        """The format of matrices for `cocktail`."""
        num_kept = 2 * max(1, round(self.top_ratio * 128))
        return SparseCoding(stride=max(1, round(1 / self.random_ratio)), num_kept=num_kept)


@dataclass(frozen=True, slots=True)
class Section:
    """A flat run of numbers in one format."""

    coding: Coding
    num_elements: int

    def part_bytes(self, num_parts: int) -> list[int]:
        """Return the sizes of its parts, in bytes."""
        return [self.coding.num_bytes(size) for size in section_sizes(self.num_elements, num_parts)]


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the parameters of a stage travel.

    Attributes:
        shapes: Of the parameters, in the order of the flat buffer.
        phases: The sections of each phase.
        ranks: Of each parameter. 0: it travels whole.
        order: In which the parameters travel, by their positions in the flat buffer.
    """

    shapes: tuple[Shape, ...]
    phases: tuple[tuple[Section, ...], ...]
    ranks: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def is_flat(self) -> bool:
        """Whether the flat buffer travels as it is."""
        return not any(self.ranks) and self.order == tuple(range(len(self.shapes)))

    @property
    def num_elements(self) -> int:
        """All elements of the flat buffer."""
        return sum(map(math.prod, self.shapes))

    def parameters(self) -> Iterator[tuple[Shape, int, slice]]:
        """Yield shape, rank and place of each parameter, in the order in which they travel."""
        ends = list(itertools.accumulate(map(math.prod, self.shapes)))
        for index in self.order:
            shape = self.shapes[index]
            yield shape, self.ranks[index], slice(ends[index] - math.prod(shape), ends[index])

    def part_bytes(self, phase: int, num_parts: int) -> list[int]:
        """Return the sizes of a phase's parts on the wire, in bytes."""
        sections = [section.part_bytes(num_parts) for section in self.phases[phase]]
        return [sum(sizes) for sizes in zip(*sections, strict=True)]

    @property
    def num_bytes(self) -> int:
        """All bytes of one contribution that is not cut."""
        return sum(self.part_bytes(phase, 1)[0] for phase in range(len(self.phases)))


def section_sizes(num_elements: int, num_parts: int) -> list[int]:
    """Return the sizes of contiguous parts, in elements. They differ by at most 1, longer first."""
    size, num_longer = divmod(num_elements, num_parts)
    return [size + (index < num_longer) for index in range(num_parts)]


def make_plan(shapes: Sequence[Shape], config: CompressionConfig, *, wide: str = "float32") -> Plan:
    """Return how parameters of these shapes travel.

    Args:
        shapes: In the order of the flat buffer.
        config: The method.
        wide: Dtype of what isn't rounded: `float32`, or `float64` for models in float64.
    """
    method = config.method
    num_elements = sum(map(math.prod, shapes))
    ranks = tuple(rank_of(shape, config.rank) if method.has_factors else 0 for shape in shapes)
    whole = _coding_of(config, wide)
    if method is Method.COCKTAIL:
        num_sparse = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        sections = (Section(whole, num_elements - num_sparse), Section(config.sparse, num_sparse))
        vectors_first = tuple(sorted(range(len(shapes)), key=lambda index: len(shapes[index]) > 1))
        return Plan(tuple(shapes), (sections,), ranks, vectors_first)
    order = tuple(range(len(shapes)))
    if not any(ranks):
        return Plan(tuple(shapes), ((Section(whole, num_elements),),), ranks, order)
    pairs = list(zip(shapes, ranks, strict=True))
    left = sum(r * rows_and_columns(shape)[0] if r else math.prod(shape) for shape, r in pairs)
    right = sum(r * rows_and_columns(shape)[1] for shape, r in pairs if r)
    factors = ((Section(whole, left),), (Section(whole, right),))
    return Plan(tuple(shapes), factors, ranks, order)


def _coding_of(config: CompressionConfig, wide: str) -> Coding:
    """Return the format of what a method neither drops nor factors."""
    if (coding := _CODINGS[config.bits]) is not None:
        return coding
    if config.bits:
        return FloatCoding(wide)
    match config.method:
        case Method.NONE | Method.LOWRANK:
            return FloatCoding(wide)
        case Method.FP16:
            return FloatCoding("float16")
        case Method.BF16:
            return FloatCoding("bfloat16")
        case Method.INT8:
            return BlockCoding(8)
        case Method.INT4 | Method.LOWRANK_INT4 | Method.COCKTAIL:
            return BlockCoding(4)


def rows_and_columns(shape: Shape) -> tuple[int, int]:
    """Return the two sides of a tensor with at least two dimensions, seen as a matrix."""
    return shape[0], math.prod(shape[1:])


def rank_of(shape: Shape, rank: int) -> int:
    """Return the rank of a parameter's factors. 0: its factors would not be smaller than it."""
    if len(shape) < 2:
        return 0
    rows, columns = rows_and_columns(shape)
    rank = min(rank, rows, columns)
    return rank if rank * (rows + columns) < rows * columns else 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """Parameters that are averaged together."""

    index: int
    """The fragment's number, from 1. 0: all parameters."""
    here: slice
    """Their elements in the flat buffer."""
    shapes: tuple[Shape, ...]
    """Shapes of the parameters, in the order of the flat buffer."""

    @property
    def num_elements(self) -> int:
        """All its elements."""
        return sum(map(math.prod, self.shapes))


class StagePlans:
    """What averages of one stage are of, and how they travel.

    Args:
        shapes: Of its trained parameters, in the order of the flat buffer. There may be none.
        num_fragments: At least 1.
        config: The method with its start values. None: averages travel whole.
        wide: Dtype of what isn't rounded: `float32`, or `float64` for models in float64.

    Raises:
        CompressionError: There are more fragments than parameters.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        num_fragments: int = 1,
        config: CompressionConfig | None = None,
        *,
        wide: str = "float32",
    ) -> None:
        self._config = config
        self._wide = wide
        shapes = tuple(shapes)
        if shapes and not 1 <= num_fragments <= len(shapes):
            raise CompressionError(
                f"fragments are {num_fragments}, but the stage has {len(shapes)} parameters"
            )
        starts = list(itertools.accumulate(map(math.prod, shapes), initial=0))
        whole = Fragment(0, slice(0, starts[-1]), shapes)
        cuts = _cuts(starts[1:], num_fragments) if shapes else [0] * (num_fragments + 1)
        self.fragments = (
            whole,
            *(
                Fragment(index, slice(starts[first], starts[last]), shapes[first:last])
                for index, (first, last) in enumerate(itertools.pairwise(cuts), 1)
            ),
        )
        """All parameters, and then each fragment. With one fragment, that holds all too."""
        self.plan = lru_cache(maxsize=256)(self._plan)

    @property
    def num_phases(self) -> int:
        """Phases of an average of all parameters. One if no matrix is large enough for factors."""
        plan = self.plan(0, 0, 0)
        return 1 if plan is None else len(plan.phases)

    def _plan(self, fragment: int, rank: int, bits: int) -> Plan | None:
        """Return how an average travels. None: whole.

        Args:
            fragment: From 1. 0: all parameters.
            rank: 0: that of the start.
            bits: 0: those of the method.
        """
        if self._config is None:
            return None
        config = replace(self._config, rank=rank or self._config.rank, bits=bits)
        return make_plan(self.fragments[fragment].shapes, config, wide=self._wide)


def _cuts(ends: Sequence[int], num_fragments: int) -> list[int]:
    """Return the parameters at which fragments begin, and the number of all parameters.

    Fragments are as even as whole parameters allow. Each holds at least one.
    """
    cuts = [0]
    for index in range(1, num_fragments):
        target = ends[-1] * index / num_fragments
        possible = range(cuts[-1] + 1, len(ends) - num_fragments + index + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut - 1] - target)))
    return [*cuts, len(ends)]
