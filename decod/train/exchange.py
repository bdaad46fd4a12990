"""How contributions to an average travel, as the device sees it: whole, or compressed.

Legend: P parameters of a stage, flat. N elements of a part. C bytes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.planner.partition import part_sizes
from decod.train.compression.coding import CompressionError
from decod.train.compression.contribution import Contribution
from decod.train.compression.means import Means
from decod.train.compression.plan import Plan, make_plan
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import Layout
from decod.train.reduction import cut, reduce_part, require_finite


class Exchange(Protocol):
    """One member's part in one average after another."""

    def part_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of a phase's parts on their way to those who reduce them."""
        ...

    def mean_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of a phase's means."""
        ...

    def begin(self, sum_P: Tensor, guide_P: Tensor, iteration: int) -> None:
        """Begin an average, or begin it again with other members.

        Args:
            sum_P: This member's contribution, (P,). Zeros if it has none.
            guide_P: What all members have in common that resembles the average, (P,).
            iteration: The one that the average is of.
        """
        ...

    def parts(self, phase: int, num_parts: int, means: Sequence[Tensor]) -> list[Tensor]:
        """Return this member's parts of a phase. They may share memory: copy them out at once.

        Args:
            phase: From 0.
            num_parts: At least 1.
            means: In the second phase, all means of the first.
        """
        ...

    def reduce(
        self, phase: int, part: int, inputs: Sequence[Tensor], *, num_parts: int, total: int
    ) -> Tensor:
        """Return the mean of one part.

        Raises:
            NonFiniteError: It is not finite.
            ShapeError: An input is not what it should be. The message names its position.
        """
        ...

    def average(self, means: Sequence[Tensor], iteration: int) -> Tensor:
        """Return the average, (P,), in new memory.

        Args:
            means: Of all phases, in order.
            iteration: The one that the average is of.

        Raises:
            NonFiniteError: It is not finite.
            ShapeError: The means are not what they should be.
        """
        ...

    def used(self) -> None:
        """The step from the average is final."""
        ...


class PlainExchange:
    """Contributions travel whole, or rounded to a shorter float. Means are never rounded.

    Args:
        config: Device and dtypes.
        num_elements: P.
    """

    def __init__(self, config: ExecutorConfig, num_elements: int) -> None:
        self._config, self._num_elements = config, num_elements
        self._sum_P = torch.empty(0)

    def part_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:  # noqa: ARG002
        """Return dtype and lengths of the parts."""
        return self._config.wire_dtype, part_sizes(self._num_elements, num_parts)

    def mean_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:  # noqa: ARG002
        """Return dtype and lengths of the means."""
        return self._config.wide, part_sizes(self._num_elements, num_parts)

    def begin(self, sum_P: Tensor, guide_P: Tensor, iteration: int) -> None:  # noqa: ARG002
        """Begin an average."""
        self._sum_P = sum_P

    def parts(self, phase: int, num_parts: int, means: Sequence[Tensor]) -> list[Tensor]:  # noqa: ARG002
        """Return this member's parts."""
        return cut(self._sum_P.to(self._config.wire_dtype), num_parts)

    def reduce(
        self,
        phase: int,  # noqa: ARG002
        part: int,
        inputs: Sequence[Tensor],
        *,
        num_parts: int,
        total: int,
    ) -> Tensor:
        """Return the mean of one part; see `decod.train.reduction.reduce_part`."""
        size = part_sizes(self._num_elements, num_parts)[part]
        if any(part_N.numel() != size for part_N in inputs):
            raise ShapeError(
                f"part {part} of {num_parts} came with {[x.numel() for x in inputs][:8]}",
                why=f"it has {size} elements",
                fix="repeat the iteration; a member cut its gradient differently",
            )
        config = self._config
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
        average_P = torch.cat([part_N.to(config.device, config.wide) for part_N in means])
        require_finite(average_P, "reduced gradient")
        return average_P

    def used(self) -> None:
        """Nothing is left of an average."""


class CompressedExchange:
    """Contributions and means are coded. What that leaves out goes into the next contribution.

    Args:
        config: Device and dtypes.
        plan: How the parameters travel.
    """

    def __init__(self, config: ExecutorConfig, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._residual_P = torch.zeros(plan.num_elements, dtype=config.wide, device=config.device)
        self._contribution: Contribution | None = None

    def part_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of the coded parts."""
        return torch.uint8, self._plan.part_bytes(phase, num_parts)

    def mean_sizes(self, phase: int, num_parts: int) -> tuple[torch.dtype, list[int]]:
        """Return dtype and lengths of the coded means."""
        return self.part_sizes(phase, num_parts)

    def begin(self, sum_P: Tensor, guide_P: Tensor, iteration: int) -> None:
        """Begin an average. See `Contribution`."""
        whole_P = sum_P + self._residual_P
        self._contribution = Contribution(self._plan, whole_P, guide_P, seed=iteration)

    @property
    def _begun(self) -> Contribution:
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
                self._begun.means.take(phase - 1, self._here(means))
            return self._begun.parts(phase, num_parts)
        except CompressionError as error:
            raise NonFiniteError(
                f"this member's contribution can't be compressed: {error}",
                why="it would spoil the weights of the whole stage",
                fix="repeat the iteration; if every node says so, lower optimizer.lr",
            ) from error

    def reduce(
        self, phase: int, part: int, inputs: Sequence[Tensor], *, num_parts: int, total: int
    ) -> Tensor:
        """Return the coded mean of one part, (C,) uint8."""
        try:
            here = self._here(inputs)
            return self._begun.reduce(phase, part, here, num_parts=num_parts, total=total)
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
                found.take(phase, self._here(of_phase))
        except CompressionError as error:
            raise _refused(error) from error
        average_P = found.average()
        require_finite(average_P, "decompressed average")
        return average_P

    def used(self) -> None:
        """Keep what the average lacks of this member's contribution."""
        if self._contribution is not None:
            self._residual_P = self._contribution.residual()
        self._contribution = None

    def _here(self, coded: Sequence[Tensor]) -> list[Tensor]:
        return [coded_C.to(self._config.device) for coded_C in coded]


def _refused(error: CompressionError) -> ShapeError:
    return ShapeError(
        f"what came for an average is refused: {error}",
        why="it would spoil the weights of the whole stage",
        fix="repeat the iteration without that member",
    )


def make_exchange(config: ExecutorConfig, layout: Layout) -> Exchange:
    """Return how the contributions of a stage travel."""
    compression = config.sync.compression_config
    if compression is None:
        return PlainExchange(config, layout.num_elements)
    wide = str(config.wide).removeprefix("torch.")
    return CompressedExchange(
        config, make_plan(tuple(layout.shapes.values()), compression, wide=wide)
    )
