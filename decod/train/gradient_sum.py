"""The sum of the gradients of one stage's microbatches.

A microbatch counts once, however often it is sent: a repeated backward pass gives the sender the
same gradient and adds nothing.

Legend: P parameters of the stage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from decod.errors import NonFiniteError
from decod.ids import MicrobatchId
from decod.model.autograd import Output
from decod.model.stage import Stage
from decod.train.layout import Layout
from decod.train.reduction import require_finite

if TYPE_CHECKING:
    from decod.train.weight_shards import Shards


class GradientSum:
    """Runs backward passes, and adds up what they leave in the parameters.

    Args:
        stage: The module, whose parameters have their memory.
        layout: Positions of the parameters in the sum.
        sum_P: Zeros, (P,), in the dtype of the parameters or a wider one.
        add_others: Adds what other devices have summed up since it was last called. Returns why
            their sums are unusable; empty if they are not.
        shards: This device's part of the stage, if the stage is spread over several. Gradients go
            to its sums, and `add_others` adds them up.
    """

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        sum_P: Tensor,
        add_others: "Callable[[Tensor, Shards | None], str]" = lambda *_: "",
        shards: "Shards | None" = None,
    ) -> None:
        self.sum_P = sum_P
        """All parameters' gradients."""
        self._stage = stage
        self._layout = layout
        self._add_others = add_others
        self._shards = shards
        self._others_lack = False
        """Whether other devices may have sums that are not in this one."""
        self._contributed: set[tuple[str, MicrobatchId]] = set()
        self._spoiled: str | None = None
        self._lent = False
        views = dict(layout.views(sum_P)) if shards is None else shards.sums
        assert views.keys() == stage.parameters_by_name().keys(), "each parameter has a sum"
        for name, parameter in stage.parameters_by_name().items():
            target = views[name]
            if parameter.dtype == sum_P.dtype and shards is None:
                # Autograd adds into an existing gradient in place.
                parameter.grad = target
            else:
                # A bfloat16 sum would lose many small terms, so each goes to the float32 sum at
                # once. Where a stage is spread, each backward pass makes new gradients.
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._mover(target)
                )

    @property
    def is_empty(self) -> bool:
        """Whether the stage has no trained parameters."""
        return not self._layout.num_elements

    @property
    def num_microbatches(self) -> int:
        """How many microbatches have begun to add to the sum."""
        return len({mb for _, mb in self._contributed})

    def _mover(self, target: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            if not self._lent:
                assert parameter.grad is not None
                shards = self._shards
                target.add_(parameter.grad if shards is None else shards.own(parameter.grad))
            parameter.grad = None

        return move

    def backward(
        self, part: tuple[str, MicrobatchId], start: Tensor | GradientEdge, entry: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of `entry`. Add the parameters' gradients if `part` is new.

        Raises:
            NonFiniteError: The gradient is not finite. The sum is spoiled.
        """
        starts: Any = [start]
        if part in self._contributed:
            if entry is None:
                return None
            result: Tensor = torch.autograd.grad(starts, [entry])[0]
            return result
        self._others_lack = True
        with self._adding(part[1]):
            torch.autograd.backward(starts)
            gradient = None if entry is None else entry.grad
            if gradient is not None:
                require_finite(gradient, f"gradient of microbatch {part[1]}")
        self._contributed.add(part)
        return gradient

    def apart(
        self, entry: Tensor, gradient: Tensor, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run both passes of a microbatch without adding anything to the sum.

        Args:
            entry: Input of the stage, which requires a gradient.
            gradient: Of the output.
            places: As for `Stage.run_blocks`.

        Returns:
            The output, the gradient of the input, and that of the parameters, (P,).
        """
        if self._shards is not None:
            return self._apart_in(self._shards, entry, gradient, places)
        with self.lend() as stage:
            parameters = stage.parameters_by_name()
            output = stage.run_blocks(entry, places)
            # Not `backward`, which would add to the parameters' own gradients.
            wanted = [entry, *parameters.values()]
            entry_gradient, *found = torch.autograd.grad(
                [output], wanted, [gradient], allow_unused=True
            )
        apart_P = torch.zeros_like(self.sum_P)
        views = dict(self._layout.views(apart_P))
        for name, each in zip(parameters, found, strict=True):
            if each is not None:
                views[name].copy_(each)
        return output.detach(), entry_gradient, apart_P

    def _apart_in(
        self, shards: "Shards", entry: Tensor, gradient: Tensor, places: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `apart`, of all devices' gradients on the first, and nothing of use on others."""
        apart_P = torch.zeros_like(self.sum_P)
        with shards.set_aside():
            output = self._stage.run_blocks(entry, places)
            starts: Any = [Output(output).given(gradient)]
            torch.autograd.backward(starts)
            # Of the others, `sum_P` is a part alone.
            shards.add_up(None if self.sum_P is shards.sum_Q else apart_P)
        assert entry.grad is not None
        return output.detach(), entry.grad, apart_P

    @contextmanager
    def _adding(self, mb: MicrobatchId) -> Iterator[None]:
        """Mark the sum as spoiled if the block fails, because its content is then unknown."""
        try:
            yield
        except BaseException:
            self._spoiled = f"the backward of microbatch {mb} failed"
            raise

    def total(self, part: Tensor) -> Tensor:
        """Return a number that the passes of several devices depend on: the sum of their parts.

        Where the stage is not spread, they don't depend on each other, and it is the part itself.
        """
        return part if self._shards is None else self._shards.total(part)

    def spoil(self, reason: str) -> None:
        """Make the sum unusable until `clear`."""
        self._spoiled = self._spoiled or reason

    def whole(self) -> Tensor:
        """Return the sum, (P,), of all devices.

        Raises:
            NonFiniteError: It holds NaN or infinity, or a backward pass failed halfway. Only
                `clear` helps.
        """
        if self._others_lack and self._spoiled is None:
            self._spoiled = self._add_others(self.sum_P, self._shards) or None
            self._others_lack = False
        if self._spoiled is not None:
            raise NonFiniteError(
                f"the gradient is spoiled: {self._spoiled}",
                why="nobody knows which part of that microbatch it holds",
                fix="reset and repeat the iteration",
                code="E-TRN-006",
            )
        require_finite(self.sum_P, "gradient of this stage")
        return self.sum_P

    def clear(self) -> None:
        """Make the sum zero, as before the first microbatch."""
        self._contributed.clear()
        self.sum_P.zero_()
        if self._shards is not None:
            self._shards.sum_Q.zero_()
        self._spoiled = None
        self._others_lack = False

    @contextmanager
    def lend(self) -> Iterator[Stage]:
        """Lend the module for trial runs, whose gradients are thrown away."""
        assert not self._lent, "one trial run at a time"
        parameters = list(self._stage.parameters())
        gradients = [parameter.grad for parameter in parameters]
        self._lent = True
        try:
            for parameter in parameters:
                parameter.grad = None
            yield self._stage
        finally:
            self._lent = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
