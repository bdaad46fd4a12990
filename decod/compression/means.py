"""The average that coded means stand for: the same bits for whoever reads the same bytes.

Legend: P parameters of a stage, flat. V numbers of a phase, flat. N elements of a part. C bytes.
X rows of a matrix, Y columns, R rank.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decod.compression import lowrank
from decod.compression.codecs import decode
from decod.compression.coding import CompressionError
from decod.compression.plan import Plan, Section, rows_and_columns, section_sizes


class Means:
    """The means of one average, phase by phase.

    Args:
        plan: How the parameters travel.
        seed: Common to all members, and another one for each average.
        dtype: Of the average: float32 or float64.
    """

    def __init__(self, plan: Plan, *, seed: int, dtype: torch.dtype) -> None:
        self.plan, self._seed, self._dtype = plan, seed, dtype
        self.lefts: list[Tensor] = []
        """The agreed left factors, of each matrix that has factors."""
        self._phases: list[Tensor] = []
        """The numbers of each phase, (V,)."""

    def take(self, phase: int, means: Sequence[Tensor]) -> None:
        """Take in the coded means of all parts of a phase.

        Args:
            phase: From 0. Those before have been taken.
            means: (C,) uint8 of each part, in order. At least 1. Not changed.

        Raises:
            CompressionError: A mean is not what it should be.
        """
        assert phase == len(self._phases), "phases come in order"
        expected = self.plan.part_bytes(phase, len(means))
        if [coded_C.numel() for coded_C in means] != expected:
            raise CompressionError(
                f"means of {[coded_C.numel() for coded_C in means][:8]} bytes, not {expected[:8]}"
            )
        length = sum(section.num_elements for section in self.plan.phases[phase])
        mean_V = torch.empty(length, dtype=self._dtype, device=means[0].device)
        starts = [0] * len(means)
        for section, begin in sections_of(self.plan, phase):
            sizes = section.part_bytes(len(means))
            for part, here in enumerate(places(section, begin, len(means))):
                coded_C = means[part][starts[part] : starts[part] + sizes[part]]
                mean_V[here] = self.decoded(section, coded_C, here.stop - here.start)
                starts[part] += sizes[part]
        self._phases.append(mean_V)
        if phase == 0:
            self.lefts = [lowrank.agreed_left(left_XR) for left_XR in self._factors(mean_V, 0)]

    def decoded(self, section: Section, coded_C: Tensor, num_elements: int) -> Tensor:
        """Return the numbers of a section's part, (N,)."""
        return decode(section.coding, coded_C, num_elements, seed=self._seed).to(self._dtype)

    def average(self) -> Tensor:
        """Return the average, (P,), in new memory."""
        assert len(self._phases) == len(self.plan.phases), "a phase is missing"
        return self.restored(self._phases, agreed=True)

    def effective_rank(self) -> float:
        """Return how many directions the average has, as the mean over its elements.

        Parameters that travel whole don't count. 0: all do.
        """
        rights = self._factors(self._phases[-1], 1) if self.lefts else []
        weighted = [
            (lowrank.effective_rank(left_XR, right_YR), left_XR.shape[0] * right_YR.shape[0])
            for left_XR, right_YR in zip(self.lefts, rights, strict=True)
        ]
        num_elements = sum(weight for _, weight in weighted)
        return sum(rank * weight for rank, weight in weighted) / max(num_elements, 1)

    def restored(self, phases: Sequence[Tensor], *, agreed: bool) -> Tensor:
        """Return the parameters that the numbers of all phases stand for, (P,), in new memory.

        Args:
            phases: (V,) of each phase.
            agreed: Whether all members must come to the same bits.
        """
        if self.plan.is_flat:
            return phases[0].clone()
        multiply = lowrank.agreed_product if agreed else lowrank.product
        rights = self._factors(phases[1], 1) if self.lefts else []
        products = iter([multiply(*both) for both in zip(self.lefts, rights, strict=True)])
        restored_P = torch.empty(self.plan.num_elements, dtype=self._dtype, device=phases[0].device)
        begin = 0
        for shape, rank, here in self.plan.parameters():
            if rank:
                restored_P[here] = next(products).reshape(-1)
                begin += rank * rows_and_columns(shape)[0]
            else:
                num_elements = math.prod(shape)
                restored_P[here] = phases[0][begin : begin + num_elements]
                begin += num_elements
        return restored_P

    def _factors(self, values_V: Tensor, side: int) -> list[Tensor]:
        """Return the factors of one side that a phase's numbers hold, (X, R) or (Y, R)."""
        found, begin = list[Tensor](), 0
        for shape, rank, _ in self.plan.parameters():
            if rank:
                length = rows_and_columns(shape)[side]
                found.append(values_V[begin : begin + rank * length].view(rank, length).T)
                begin += rank * length
            elif side == 0:
                begin += math.prod(shape)
        return found


def sections_of(plan: Plan, phase: int) -> Iterator[tuple[Section, int]]:
    """Yield the sections of a phase, and where each begins among its numbers."""
    begin = 0
    for section in plan.phases[phase]:
        yield section, begin
        begin += section.num_elements


def places(section: Section, begin: int, num_parts: int) -> Iterator[slice]:
    """Yield the places of a section's parts among the numbers of its phase."""
    for size in section_sizes(section.num_elements, num_parts):
        yield slice(begin, begin + size)
        begin += size
