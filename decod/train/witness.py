"""What a member can tell of another's work, and how it does that work again.

A member keeps a sketch of each tensor that it has used in an iteration. If the work of another
member of the run is audited, those who have received something from it tell the auditor their
sketches. The auditor computes the same tensors, and compares.

Legend: P parameters of the stage. N elements of a part of the gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decod.errors import TrainingError
from decod.ids import MicrobatchId
from decod.train.activations import ActivationCodec
from decod.train.executor_config import ExecutorConfig
from decod.train.gradient_sum import GradientSum
from decod.train.layout import Layout
from decod.train.reduction import cut
from decod.train.sketch import Sketch, Sketcher, new_seed


class Witness:
    """The sketches of what a member has used in one iteration.

    Args:
        keeps: Whether to keep any: nothing is audited otherwise.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.clear()

    def clear(self) -> None:
        """Forget the iteration."""
        self._sketcher = Sketcher(new_seed())
        self._passes: dict[tuple[MicrobatchId, bool], Sketch] = {}
        self._parts: dict[int, list[Sketch]] = {}

    def used_activation(self, mb: MicrobatchId, activation: Tensor) -> None:
        """Keep the sketch of what the stage before has computed."""
        if self._keeps:
            self._passes[mb, False] = self._sketcher.sketch(activation)

    def used_gradient(self, mb: MicrobatchId, gradient: Tensor) -> None:
        """Keep the sketch of what the stage behind has computed."""
        if self._keeps:
            self._passes[mb, True] = self._sketcher.sketch(gradient)

    def used_contributions(self, part: int, contributions: Sequence[Tensor]) -> None:
        """Keep the sketches of all contributions to one part of an average, in their order."""
        if self._keeps:
            self._parts[part] = [self._sketcher.sketch(each) for each in contributions]

    def of_pass(self, mb: MicrobatchId, *, is_gradient: bool) -> Sketch:
        """Return the sketch of what another stage has computed of a microbatch.

        Raises:
            TrainingError: This member has used no such tensor.
        """
        sketch = self._passes.get((mb, is_gradient))
        if sketch is None:
            raise _unknown(f"microbatch {mb}")
        return sketch

    def of_contribution(self, part: int, position: int) -> Sketch:
        """Return the sketch of one contribution to a part of an average.

        Raises:
            TrainingError: This member has not reduced that part.
        """
        sketches = self._parts.get(part, [])
        if position >= len(sketches):
            raise _unknown(f"contribution {position} to part {part}")
        return sketches[position]


def _unknown(what: str) -> TrainingError:
    return TrainingError(
        f"nothing is known of {what}",
        why="an audit asks for what this member has not used in the iteration",
        fix="nothing: the audit goes on without it",
    )


class Replay:
    """Another member's work of one iteration, done again beside this one's own.

    Args:
        config: The run, and the device.
        gradient: This member's own sum. Its module is borrowed, its sum is not changed.
        layout: Positions of the parameters.
        codec: How activations travel.
    """

    def __init__(
        self, config: ExecutorConfig, gradient: GradientSum, layout: Layout, codec: ActivationCodec
    ) -> None:
        self._config, self._gradient, self._codec = config, gradient, codec
        self.sum_P = torch.zeros_like(gradient.sum_P)
        """What the other member's sum should be."""
        self._views = dict(layout.views(self.sum_P))

    def run(
        self, mb: MicrobatchId, activation: Tensor, gradient: Tensor, told: Sequence[Sketch]
    ) -> tuple[float, float]:
        """Repeat both passes of a microbatch. Add the gradient of the parameters to the sum.

        Args:
            mb: The microbatch.
            activation: What the other member got from the stage before, as it travelled.
            gradient: What it got from the stage behind, as it travelled.
            told: Sketches of what it made of them: of its activation and of its gradient.

        Returns:
            How far each of these is from what it should be; see `Sketch.error`.

        Raises:
            NonFiniteError: An input holds NaN or infinity.
        """
        codec = self._codec
        entry_BTD = codec.received(activation, "activation to audit").requires_grad_()
        back_BTD = codec.received(gradient, "gradient to audit")
        with self._gradient.lend() as stage:
            parameters = stage.parameters_by_name()
            output_BTD = stage.run_blocks(entry_BTD)
            # Not `backward`, which would add to this member's own sum.
            wanted = [entry_BTD, *parameters.values()]
            entry_gradient_BTD, *found = torch.autograd.grad([output_BTD], wanted, [back_BTD])
        for name, each in zip(parameters, found, strict=True):
            self._views[name].add_(each)
        made = (output_BTD.detach(), entry_gradient_BTD)
        errors = [
            sketch.error(codec.travelled(tensor, f"replay of {mb}"))
            for tensor, sketch in zip(made, told, strict=True)
        ]
        return errors[0], errors[1]

    def part_error(self, part: int, num_parts: int, told: Sketch) -> float:
        """Return how far one part of the other member's contribution is from what it should be."""
        whole_P = self.sum_P.to(self._config.wire_dtype)
        return told.error(cut(whole_P, num_parts)[part])
