"""How contributions to an average travel, as the device sees it: whole, or compressed.

What an average lacks of a member's contribution is that member's residual. It adds the residual to
its next contribution (error feedback).

Legend: P parameters of a stage, flat. V those that are averaged: all, or a fragment. N elements of
a part. C bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decod.compression.contribution import CodedContribution, InputError, Means
from decod.compression.plan import CompressionError, Plan, StagePlans
from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.planner.partition import part_sizes
from decod.protocol.core.average_spec import AverageSpec
from decod.train.reduction import cut, is_finite, reduce_part, require_finite

STALE_WEIGHT = 0.5
"""What comes too late for an average counts so much in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """Dtypes and device of averages."""

    wide: torch.dtype
    """Dtype of contributions and averages: float32, or float64 for float64 models."""
    wire_dtype: torch.dtype
    """Dtype of a contribution on its way, where none is compressed."""
    device: str = "cpu"
    """A torch device."""
    adapts: bool = False
    """Whether each average's effective rank is asked for."""


@dataclass(frozen=True, slots=True)
class Place:
    """A part of an average."""

    part: int
    num_parts: int
    phase: int = 0


class RefusedInputsError(ShapeError):
    """Some contributions to an average are not what they should be.

    Args:
        positions: Of these contributions.
        reason: What is wrong with the first.
    """

    def __init__(self, positions: Sequence[int], reason: str) -> None:
        self.positions = tuple(positions)
        self.reason = reason
        super().__init__(
            f"contributions {[*positions][:8]} to an average are refused: {reason}",
            why="they would spoil the weights of the whole stage",
            fix="repeat the iteration without those members",
        )


class Residuals:
    """What averages lack of this member's contributions.

    Args:
        config: Device and dtypes.
        num_elements: P.
    """

    def __init__(self, config: ExchangeConfig, num_elements: int) -> None:
        self._config = config
        self._num_elements = num_elements
        self._residual_P: Tensor | None = None

    @property
    def any(self) -> bool:
        """Whether anything has been left out yet."""
        return self._residual_P is not None

    def added(self, sum_V: Tensor, here: slice) -> Tensor:
        """Return a contribution with what was left out before, (V,)."""
        return sum_V if self._residual_P is None else sum_V + self._residual_P[here]

    def keep(self, residual_V: Tensor, here: slice) -> None:
        """Replace what was left out of some elements."""
        if self._residual_P is None:
            config = self._config
            self._residual_P = torch.zeros(
                self._num_elements, dtype=config.wide, device=config.device
            )
        self._residual_P[here] = residual_V


class Exchange(Protocol):
    """One member's part in one average."""

    effective_rank: float
    """Directions that the average has, once it is known. 0: that is not asked for."""

    def part_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of a phase's parts on their way to those who reduce them."""
        ...

    def mean_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of a phase's means."""
        ...

    def begin(self, sum_V: Tensor, guide_V: Tensor, iteration: int) -> None:
        """Begin an average, or begin it again with other members.

        Args:
            sum_V: This member's contribution, (V,). Zeros if it has none.
            guide_V: What all members have in common that resembles the average, (V,).
            iteration: The one that the average is of.
        """
        ...

    def parts(self, phase: int, num_parts: int, means: Sequence[Tensor]) -> list[Tensor]:
        """Return this member's parts. They may share memory: copy them out at once.

        Args:
            phase: From 0.
            num_parts: At least 1.
            means: In the second phase, all means of the first.
        """
        ...

    def reduce(self, inputs: Sequence[Tensor], place: Place, weights: Sequence[int]) -> Tensor:
        """Return the mean of one part.

        Args:
            inputs: Of each member, in roster order. At least 1.
            place: The part.
            weights: Of the inputs.

        Raises:
            RefusedInputsError: Some inputs are not what they should be.
        """
        ...

    def average(self, means: Sequence[Tensor], iteration: int) -> Tensor:
        """Return the average, (V,), in new memory.

        Args:
            means: Of all phases, in order.
            iteration: The one that the average is of.

        Raises:
            NonFiniteError: It is not finite.
            ShapeError: The means are not what they should be.
        """
        ...

    def used(self, missed: Collection[int], num_parts: int) -> None:
        """The step from the average is final.

        Args:
            missed: Parts of all phases, counted on, for which this member's contribution came too
                late.
            num_parts: Of a phase.
        """
        ...


class PlainExchange:
    """Contributions travel whole, or rounded to a shorter float. Means are never rounded.

    Args:
        config: Device and dtypes.
        here: Elements that are averaged.
        residuals: Where contributions that came too late are kept.
    """

    effective_rank = 0.0

    def __init__(self, config: ExchangeConfig, here: slice, residuals: Residuals) -> None:
        self._config = config
        self._here = here
        self._residuals = residuals
        self._num_elements = here.stop - here.start
        self._sum_V = torch.empty(0)
        self._is_sent = False

    def part_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:  # noqa: ARG002
        """Return dtype and lengths of the parts."""
        return self._config.wire_dtype, part_sizes(self._num_elements, num_parts)

    def mean_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:  # noqa: ARG002
        """Return dtype and lengths of the means."""
        return self._config.wide, part_sizes(self._num_elements, num_parts)

    def begin(self, sum_V: Tensor, guide_V: Tensor, iteration: int) -> None:  # noqa: ARG002
        """Begin an average."""
        self._sum_V = self._residuals.added(sum_V, self._here)
        self._is_sent = False

    def parts(self, phase: int, num_parts: int, means: Sequence[Tensor]) -> list[Tensor]:  # noqa: ARG002
        """Return this member's parts."""
        self._is_sent = True
        return cut(self._sum_V.to(self._config.wire_dtype), num_parts)

    def reduce(self, inputs: Sequence[Tensor], place: Place, weights: Sequence[int]) -> Tensor:
        """Return the mean of one part; see `decod.train.reduction.reduce_part`."""
        size = part_sizes(self._num_elements, place.num_parts)[place.part]
        odd = [index for index, part_N in enumerate(inputs) if part_N.numel() != size]
        if odd:
            lengths = [inputs[index].numel() for index in odd[:8]]
            raise RefusedInputsError(odd, f"{lengths} elements came, and the part has {size}")
        config = self._config
        total = sum(weights)
        return reduce_part(inputs, weights_total=total, dtype=config.wide, device=config.device)

    def average(self, means: Sequence[Tensor], iteration: int) -> Tensor:  # noqa: ARG002
        """Return the average."""
        sizes = part_sizes(self._num_elements, len(means))
        if [part_N.numel() for part_N in means] != sizes:
            raise ShapeError(
                f"parts of {[part_N.numel() for part_N in means][:8]} elements",
                why=f"this stage's gradient has {sum(sizes)}, cut in {len(sizes)}",
                fix="repeat the iteration",
            )
        config = self._config
        average_V = torch.cat([part_N.to(config.device, config.wide) for part_N in means])
        require_finite(average_V, "reduced gradient")
        return average_V

    def used(self, missed: Collection[int], num_parts: int) -> None:
        """Keep what came too late. Otherwise nothing is left of an average.

        A member that sent nothing keeps what it had kept before.
        """
        if self._is_sent and (missed or self._residuals.any):
            late_V = torch.zeros_like(self._sum_V)
            pairs = zip(cut(late_V, num_parts), cut(self._sum_V, num_parts), strict=True)
            for part, (late_N, sum_N) in enumerate(pairs):
                if part in missed:
                    torch.mul(sum_N, STALE_WEIGHT, out=late_N)
            self._residuals.keep(late_V, self._here)
        self._sum_V = torch.empty(0)


class CompressedExchange:
    """Contributions and means are coded. What that leaves out goes into the next contribution.

    Args:
        config: Device and dtypes.
        plan: How the parameters travel.
        here: Elements that are averaged.
        residuals: Where what is left out is kept.
    """

    def __init__(
        self, config: ExchangeConfig, plan: Plan, here: slice, residuals: Residuals
    ) -> None:
        self._config = config
        self._plan = plan
        self._here = here
        self._residuals = residuals
        self._contribution: CodedContribution | None = None
        self.effective_rank = 0.0

    def part_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of the coded parts."""
        return torch.uint8, self._plan.part_bytes(phase, num_parts)

    def mean_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of the coded means."""
        return self.part_sizes(phase, num_parts)

    def begin(self, sum_V: Tensor, guide_V: Tensor, iteration: int) -> None:
        """Begin an average. See `CodedContribution`."""
        whole_V = self._residuals.added(sum_V, self._here)
        self._contribution = CodedContribution(self._plan, whole_V, guide_V, seed=iteration)

    @property
    def _begun(self) -> CodedContribution:
        if self._contribution is None:
            raise TrainingError(
                "part of an average was asked for that this member has not begun",
                why="it has loaded its stage's state anew meanwhile",
                fix="nothing: the others average without it",
            )
        return self._contribution

    def parts(self, phase: int, num_parts: int, means: Sequence[Tensor]) -> list[Tensor]:
        """Return this member's coded parts, (C,) uint8 each."""
        try:
            if means:
                self._begun.means.take(phase - 1, self._on_device(means))
            return self._begun.parts(phase, num_parts)
        except CompressionError as error:
            raise NonFiniteError(
                f"this member's contribution can't be compressed: {error}",
                why="it would spoil the weights of the whole stage",
                fix="repeat the iteration; if every node says so, lower optimizer.lr",
            ) from error

    def reduce(self, inputs: Sequence[Tensor], place: Place, weights: Sequence[int]) -> Tensor:
        """Return the coded mean of one part, (C,) uint8."""
        try:
            return self._begun.reduce(
                place.phase,
                place.part,
                self._on_device(inputs),
                num_parts=place.num_parts,
                total=sum(weights),
            )
        except InputError as error:
            raise RefusedInputsError([error.position], str(error)) from error
        except CompressionError as error:
            raise _refused(error) from error

    def average(self, means: Sequence[Tensor], iteration: int) -> Tensor:
        """Return the average. Whoever reads the same means comes to the same bits."""
        found = Means(self._plan, seed=iteration, dtype=self._config.wide)
        num_phases = len(self._plan.phases)
        num_parts = len(means) // num_phases
        try:
            for phase in range(num_phases):
                of_phase = means[phase * num_parts : (phase + 1) * num_parts]
                found.take(phase, self._on_device(of_phase))
        except CompressionError as error:
            raise _refused(error) from error
        if self._contribution is not None:
            # A member that had nothing to contribute has not read the means of the first phase.
            self._contribution.means.lefts = found.lefts
        average_V = found.average()
        require_finite(average_V, "decompressed average")
        self.effective_rank = found.effective_rank() if self._config.adapts else 0.0
        return average_V

    def used(self, missed: Collection[int], num_parts: int) -> None:
        """Keep what the average lacks of this member's contribution."""
        if self._contribution is not None:
            for phase, part in (divmod(each, num_parts) for each in missed):
                self._contribution.missed(phase, part, num_parts, kept=STALE_WEIGHT)
            self._residuals.keep(self._contribution.residual(), self._here)
        self._contribution = None

    def _on_device(self, coded: Sequence[Tensor]) -> list[Tensor]:
        return [coded_C.to(self._config.device) for coded_C in coded]


def _refused(error: CompressionError) -> ShapeError:
    return ShapeError(
        f"what came for an average is refused: {error}",
        why="it would spoil the weights of the whole stage",
        fix="repeat the iteration without that member",
    )


class Exchanges:
    """One average after another.

    Args:
        config: Device and dtypes.
        plans: Of the stage.
    """

    def __init__(self, config: ExchangeConfig, plans: StagePlans) -> None:
        self._config = config
        self._plans = plans
        self._residuals = Residuals(config, plans.fragments[0].num_elements)
        self._spec: AverageSpec | None = None
        self._newest: Exchange = PlainExchange(config, slice(0, 0), self._residuals)

    def of(self, spec: AverageSpec) -> Exchange:
        """Return this member's part in an average. Another spec begins another average."""
        if spec != self._spec:
            self._spec = spec
            self._newest = self._made(spec)
        return self._newest

    def _made(self, spec: AverageSpec) -> Exchange:
        plan = self._plans.plan(spec.fragment, spec.rank, spec.bits)
        here = self.here(spec)
        if plan is None:
            return PlainExchange(self._config, here, self._residuals)
        return CompressedExchange(self._config, plan, here, self._residuals)

    def here(self, spec: AverageSpec) -> slice:
        """Return the elements that are averaged.

        Raises:
            TrainingError: The stage has no such fragment.
        """
        if spec.fragment >= len(self._plans.fragments):
            raise TrainingError(
                f"fragment {spec.fragment} of the parameters was to be averaged",
                why=f"this run cuts them in {len(self._plans.fragments) - 1}",
                fix="give all nodes the same run file and release",
            )
        return self._plans.fragments[spec.fragment].here


def reduce_leniently(
    exchange: Exchange, inputs: Sequence[Tensor | None], place: Place, weights: Sequence[int]
) -> tuple[Tensor, dict[int, str]]:
    """Return the mean of the contributions that are as they should be.

    Args:
        exchange: Of the average.
        inputs: In roster order. None: it has the wrong size.
        place: The part.
        weights: Of the inputs.

    Returns:
        The mean, and why the others are left out, by their position.

    Raises:
        NonFiniteError: The mean is not finite.
        RefusedInputsError: None is as it should be.
    """
    refused = {k: "it has the wrong size" for k, value in enumerate(inputs) if value is None}
    while True:
        left = [k for k in range(len(inputs)) if k not in refused]
        if not left:
            raise RefusedInputsError([*refused], next(iter(refused.values())))
        chosen = [value for value in (inputs[k] for k in left) if value is not None]
        try:
            return exchange.reduce(chosen, place, [weights[k] for k in left]), refused
        except RefusedInputsError as error:
            refused |= {left[position]: error.reason for position in error.positions}
        except NonFiniteError:
            bad = [k for k, value in zip(left, chosen, strict=True) if not is_finite(value)]
            if not bad:
                raise
            refused |= dict.fromkeys(bad, "it is not finite")
