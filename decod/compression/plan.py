"""What a method sends of a stage's parameters, in which order and format. Imports no torch.

An average has one or two phases. Low-rank methods average the left factors of all matrices first,
and then the right factors, which depend on the average of the left. Each phase sends some sections.
A section is a flat run of numbers in one format. It is cut into parts, one for each member that
reduces.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from decod.compression.coding import (
    BlockCoding,
    Coding,
    CompressionError,
    FloatCoding,
    SparseCoding,
)


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
    """Of the factors, for low-rank methods. The shape of a matrix bounds it. At least 1."""
    random_ratio: float = 0.1
    """Share of elements that are candidates, for `cocktail`. In (0, 1]."""
    top_ratio: float = 0.08
    """Share of the candidates that travel, for `cocktail`. In (0, 1]."""
    bits: int = 0
    """Of each number that is neither dropped nor factored: 4, 8, 16 or 32. 0: as the method has
    it. Not for `cocktail`."""

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
    method, num_elements = config.method, sum(map(math.prod, shapes))
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
