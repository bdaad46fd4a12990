"""One member's part in one compressed average, phase by phase.

In each phase the members cut their numbers into parts and code them (`parts`). One member adds up
all codings of a part, and codes the mean (`reduce`). All take in the coded means (`means.take`).
After the last phase these give the average: the same
bits for whoever reads the same bytes.

What coding leaves out of a member's numbers, and of the means that it has coded, is its residual.
It adds the residual to its next contribution (error feedback). Sums of contributions weigh members
by their tokens, so a residual is in the unit of a sum.

Legend: P parameters of a stage, flat. V numbers of a phase, flat. N elements of a part. C bytes.
X rows of a matrix, Y columns, R rank.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decod.compression import lowrank
from decod.compression.codecs import decode, encode
from decod.compression.plan import CompressionError, Plan, Section, rows_and_columns, section_sizes


class Means:
    """The means of one average, phase by phase.

    Args:
        plan: How the parameters travel.
        seed: Common to all members, and another one for each average.
        dtype: Of the average: float32 or float64.
    """

    def __init__(self, plan: Plan, *, seed: int, dtype: torch.dtype) -> None:
        self.plan = plan
        self._seed = seed
        self._dtype = dtype
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
        found = list[Tensor]()
        begin = 0
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


class InputError(CompressionError):
    """What a member has sent for a mean is not what it should be.

    Args:
        position: Of the input.
        reason: What is wrong with it.
    """

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        super().__init__(f"input {position}: {reason}")


class CodedContribution:
    """What one member puts into one average, and what it reduces for all.

    If the average is begun again with other members, each makes another contribution of the same
    numbers.

    Args:
        plan: How the parameters travel.
        sum_P: (P,) float32 or float64: this member's sum, with its residual of before. Not changed.
        guide_P: (P,) What all members have in common that resembles the average. See `lowrank`.
        seed: Common to all members, and another one for each average.
    """

    def __init__(self, plan: Plan, sum_P: Tensor, guide_P: Tensor, *, seed: int) -> None:
        assert sum_P.shape == guide_P.shape == (plan.num_elements,), (sum_P.shape, guide_P.shape)
        self._plan = plan
        self._sum_P = sum_P
        self._guide_P = guide_P
        self._seed = seed
        self.means = Means(plan, seed=seed, dtype=sum_P.dtype)
        self._sent = [
            torch.zeros(sum(s.num_elements for s in sections), dtype=sum_P.dtype).to(sum_P.device)
            for sections in plan.phases
        ]
        """For each phase, what this member has put into the coded means: its numbers as others
        decode them, without what it left out of the means that it has coded. (V,)."""

    def parts(self, phase: int, num_parts: int) -> list[Tensor]:
        """Return this member's numbers of a phase, cut and coded: (C,) uint8 for each part.

        Args:
            phase: From 0. The means of the phase before have been taken.
            num_parts: At least 1.

        Raises:
            CompressionError: A number is not finite.
        """
        values_V = self._second_numbers() if phase else self._first_numbers()
        coded = [list[Tensor]() for _ in range(num_parts)]
        for section, begin in sections_of(self._plan, phase):
            for part, here in enumerate(places(section, begin, num_parts)):
                coded_C = encode(section.coding, values_V[here], seed=self._seed)
                coded[part].append(coded_C)
                self._sent[phase][here] += self._decoded(section, coded_C, here)
        return [torch.cat(sections) for sections in coded]

    def reduce(
        self, phase: int, part: int, inputs: Sequence[Tensor], *, num_parts: int, total: int
    ) -> Tensor:
        """Return the coded mean of one part, (C,) uint8.

        Args:
            phase: From 0.
            part: Of `num_parts`.
            inputs: (C,) uint8 of each member, in roster order. At least 1. Not changed.
            num_parts: At least 1.
            total: Weight of all contributions together. At least 1.

        Raises:
            InputError: An input is not what it should be.
            CompressionError: The mean is not finite.
        """
        assert inputs, "a mean needs a contribution"
        assert total >= 1, total
        sizes = [section.part_bytes(num_parts)[part] for section in self._plan.phases[phase]]
        for position, coded_C in enumerate(inputs):
            if coded_C.numel() != sum(sizes):
                raise InputError(position, f"{coded_C.numel()} bytes came, not {sum(sizes)}")
        coded = list[Tensor]()
        split = zip(*(torch.split(coded_C, sizes) for coded_C in inputs), strict=True)
        sections = [
            (section, list(places(section, begin, num_parts))[part])
            for section, begin in sections_of(self._plan, phase)
        ]
        # All inputs are read before anything is taken down: they may be refused.
        sums = [
            self._sum(section, of_members, here)
            for (section, here), of_members in zip(sections, split, strict=True)
        ]
        for (section, here), sum_N in zip(sections, sums, strict=True):
            mean_N = sum_N.div_(torch.full_like(sum_N[:1], total))
            coded_C = encode(section.coding, mean_N, seed=self._seed)
            coded.append(coded_C)
            leftover_N = (mean_N - self._decoded(section, coded_C, here)) * total
            self._sent[phase][here] -= leftover_N
        return torch.cat(coded)

    def _sum(self, section: Section, of_members: Sequence[Tensor], here: slice) -> Tensor:
        """Return the sum of a section's part over the members, in roster order, (N,)."""
        total_N: Tensor | None = None
        for position, coded_C in enumerate(of_members):
            try:
                values_N = self._decoded(section, coded_C, here)
            except CompressionError as error:
                raise InputError(position, str(error)) from error
            if not bool(torch.isfinite(values_N.sum())):
                raise InputError(position, "it is not finite")
            total_N = values_N if total_N is None else total_N.add_(values_N)
        assert total_N is not None
        return total_N

    def _decoded(self, section: Section, coded_C: Tensor, here: slice) -> Tensor:
        return self.means.decoded(section, coded_C, here.stop - here.start)

    def missed(self, phase: int, part: int, num_parts: int, *, kept: float) -> None:
        """Note that a part of this member's numbers came too late for its mean.

        Args:
            phase: From 0.
            part: Of `num_parts`.
            num_parts: As for `parts`.
            kept: Share of it that the residual holds. The rest is dropped.
        """
        for section, begin in sections_of(self._plan, phase):
            here = list(places(section, begin, num_parts))[part]
            self._sent[phase][here] *= 1 - kept

    def residual(self) -> Tensor:
        """Return what the average lacks of this member's numbers, (P,)."""
        return self._sum_P - self.means.restored(self._sent, agreed=False)

    # --- numbers of a phase -------------------------------------------------------------------

    def _first_numbers(self) -> Tensor:
        if self._plan.is_flat:
            return self._sum_P
        found = list[Tensor]()
        for shape, rank, here in self._plan.parameters():
            if rank:
                sides = rows_and_columns(shape)
                right_YR = lowrank.first_right_factor(self._guide_P[here].view(sides), rank)
                # A factor travels column by column: blocks then hold one direction each, and weak
                # directions have their own scales.
                left_XR = lowrank.left_factor(self._sum_P[here].view(sides), right_YR)
                found.append(left_XR.T.reshape(-1))
            else:
                found.append(self._sum_P[here])
        return torch.cat(found)

    def _second_numbers(self) -> Tensor:
        lefts = iter(self.means.lefts)
        matrices = [
            self._sum_P[here].view(rows_and_columns(shape))
            for shape, rank, here in self._plan.parameters()
            if rank
        ]
        rights = [lowrank.right_factor(matrix_XY, next(lefts)) for matrix_XY in matrices]
        return torch.cat([right_YR.T.reshape(-1) for right_YR in rights])
