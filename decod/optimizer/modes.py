"""The two modes of a host: the work that it keeps between two averages, and what it does with one.

Gradient mode: hosts average gradients, and all take the same steps.

Local mode: each host steps by itself, and hosts average how far they have come. The *anchor* is
where all hosts were after the last round. A host's contribution is its way from there, times its
samples. A round moves the anchor by the average of all ways. What a host has learnt since it
contributed stays on top.

Legend: P all parameters, flat.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from decod.optimizer.optimizer_ranks import Order, Ranks
from decod.optimizer.parameters import Parameters, all_finite


class GradientSums:
    """Sums of gradients, each in the unit of a step of `batch_size` samples.

    Equal steps then add plainly, and a sum of one is the gradient itself, bit for bit. A parameter
    that had no gradient yet has no sum.

    Args:
        parameters: What the gradients are of.
        batch_size: Samples of a usual step.
    """

    def __init__(self, parameters: Parameters, batch_size: int) -> None:
        self._parameters = parameters
        self._batch_size = batch_size
        self.sums: list[Tensor | None] = [None] * len(parameters.tensors)

    def add(self, gradients: Sequence[Tensor | None], num_samples: int) -> None:
        """Add the mean gradients of some samples."""
        factor = num_samples / self._batch_size
        for index, (parameter, gradient) in enumerate(
            zip(self._parameters.tensors, gradients, strict=True)
        ):
            if gradient is None:
                continue
            total = self.sums[index]
            if total is not None:
                total.add_(gradient, alpha=factor)
                continue
            # Not a sum with zeros, which would turn -0.0 into 0.0.
            wide = self._parameters.wide_of(parameter)
            copy = gradient.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
            self.sums[index] = copy if factor == 1 else copy.mul_(factor)

    def mean(self, num_samples: int) -> list[Tensor | None]:
        """Return the mean over all samples, in the parameters' dtypes. It may share memory."""
        num_steps = num_samples / self._batch_size
        pairs = zip(self._parameters.tensors, self.sums, strict=True)
        return [
            None
            if total is None
            else (total if num_steps == 1 else total / num_steps).to(parameter.dtype)
            for parameter, total in pairs
        ]

    def write(self, output_P: Tensor) -> None:
        """Write the sum over all samples, and begin anew.

        Args:
            output_P: (P,) on the CPU, in the wide dtype.
        """
        for view, total in zip(self._parameters.views(output_P), self.sums, strict=True):
            if total is None:
                view.zero_()
            else:
                view.copy_(total).mul_(self._batch_size)
        self.clear()

    def give_back(self, given_P: Tensor) -> None:
        """Add a sum over samples again that `write` has given."""
        pairs = zip(self._parameters.tensors, self._parameters.views(given_P), strict=True)
        for index, (parameter, view) in enumerate(pairs):
            wide = self._parameters.wide_of(parameter)
            steps = (view / self._batch_size).to(parameter.device, wide)
            total = self.sums[index]
            self.sums[index] = steps if total is None else total.add_(steps)

    def clear(self) -> None:
        """Begin anew."""
        self.sums = [None] * len(self.sums)


class ContributionMode(Protocol):
    """The work that a host keeps between two averages. The caller locks it, and keeps account."""

    def add(self, gradients: Sequence[Tensor | None], num_samples: int) -> int:
        """Take in the mean gradients of some samples, all finite.

        Returns:
            How many samples are outstanding now that were not before.
        """
        ...

    def end_step(self) -> int:
        """The loop has called `step` as often as one step takes. Returns the same as `add`."""
        ...

    def write(self, output_P: Tensor, num_samples: int) -> bool:
        """Write what is outstanding as a sum over samples, and begin a new contribution.

        Args:
            output_P: (P,) on the CPU, in the wide dtype.
            num_samples: What is outstanding. At least 1.

        Returns:
            Whether it is finite. If not, it is lost.
        """
        ...

    def give_back(self, given_P: Tensor) -> None:
        """Take back what `write` has given: the round goes on without it."""
        ...

    def use(self, average_P: Tensor, round_number: int, *, included: bool, is_fresh: bool) -> None:
        """Apply an average.

        Args:
            average_P: (P,) on the CPU, in the wide dtype, finite. Not changed.
            round_number: Of the average.
            included: Whether what `write` gave is in it.
            is_fresh: Whether nothing is outstanding beside what is in it.
        """
        ...

    def use_own(self, num_samples: int, round_number: int) -> None:
        """Apply what is outstanding: nobody else is there."""
        ...

    def forget_lent(self) -> None:
        """Forget what `write` has given: it comes neither back nor in an average."""
        ...

    def restart(self) -> int:
        """Other parameters have been loaded: forget what belonged to the old ones.

        Returns:
            How many samples are forgotten that were not outstanding yet.
        """
        ...

    def common(self) -> Sequence[Tensor]:
        """Return the parameters as all hosts had them after the newest round."""
        ...

    def to_checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, beside parameters and optimizer."""
        ...

    def from_checkpoint(self, kept: dict[str, Any]) -> None:
        """Take it in again."""
        ...


class GradientMode(ContributionMode):
    """Gradients are added up until a round ends. The wrapped optimizer then steps.

    Args:
        parameters: What is trained.
        wrapped: Takes the steps.
        batch_size: Samples of a usual step.
        ranks: Are told of the steps.
    """

    def __init__(
        self,
        parameters: Parameters,
        wrapped: torch.optim.Optimizer,
        batch_size: int,
        ranks: Ranks,
    ) -> None:
        self._parameters = parameters
        self._wrapped = wrapped
        self._ranks = ranks
        self._sums = GradientSums(parameters, batch_size)

    @override
    def add(self, gradients: Sequence[Tensor | None], num_samples: int) -> int:
        self._sums.add(gradients, num_samples)
        return num_samples

    @override
    def end_step(self) -> int:
        return 0

    @override
    def write(self, output_P: Tensor, num_samples: int) -> bool:
        self._sums.write(output_P)
        return all_finite([output_P])

    @override
    def give_back(self, given_P: Tensor) -> None:
        self._sums.give_back(given_P)

    @override
    def use(self, average_P: Tensor, round_number: int, *, included: bool, is_fresh: bool) -> None:
        self._step_with(self._parameters.gradients_of(average_P), round_number)

    @override
    def use_own(self, num_samples: int, round_number: int) -> None:
        self._step_with(self._sums.mean(num_samples), round_number)
        self._sums.clear()

    def _step_with(self, gradients: Sequence[Tensor | None], round_number: int) -> None:
        self._ranks.step(gradients, round_number)
        with self._parameters.with_gradients(gradients):
            self._wrapped.step()

    @override
    def forget_lent(self) -> None:
        pass

    @override
    def restart(self) -> int:
        self._sums.clear()
        return 0

    @override
    def common(self) -> Sequence[Tensor]:
        return self._parameters.tensors

    @override
    def to_checkpoint(self) -> dict[str, Any]:
        return {"sums": [None if total is None else total.clone() for total in self._sums.sums]}

    @override
    def from_checkpoint(self, kept: dict[str, Any]) -> None:
        pairs = zip(self._parameters.tensors, kept["sums"], strict=True)
        self._sums.sums = [
            None
            if total is None
            else total.to(parameter.device, self._parameters.wide_of(parameter), copy=True)
            for parameter, total in pairs
        ]


class LocalMode(ContributionMode):
    """The wrapped optimizer steps at once. The anchor stays on the CPU.

    Args:
        parameters: What is trained.
        wrapped: Takes the steps.
        batch_size: Samples of a usual call of `step`.
        num_calls: Calls of `step` for one step of the wrapped optimizer.
        ranks: Are told where an average leads.
    """

    def __init__(
        self,
        parameters: Parameters,
        wrapped: torch.optim.Optimizer,
        batch_size: int,
        num_calls: int,
        ranks: Ranks,
    ) -> None:
        self._parameters = parameters
        self._wrapped = wrapped
        self._num_calls = num_calls
        self._ranks = ranks
        self._sums = GradientSums(parameters, batch_size)
        self._num_samples = 0
        """The samples in the sums."""
        self._anchor_P = torch.empty(parameters.num_elements, dtype=parameters.wide)
        self._lent: deque[Tensor] = deque()
        """The ways that the node has been given, oldest first. (P,) each."""
        self._drop_anchor()

    @torch.no_grad()
    def _drop_anchor(self) -> None:
        """All hosts are where this one is."""
        for view, parameter in zip(self._anchors(), self._parameters.tensors, strict=True):
            view.copy_(parameter)

    def _anchors(self) -> list[Tensor]:
        return self._parameters.views(self._anchor_P)

    @override
    def add(self, gradients: Sequence[Tensor | None], num_samples: int) -> int:
        if self._num_calls == 1:
            self._wrapped.step()
            return num_samples
        self._sums.add(gradients, num_samples)
        self._num_samples += num_samples
        return 0

    @override
    def end_step(self) -> int:
        num_samples = self._num_samples
        if num_samples:
            with self._parameters.with_gradients(self._sums.mean(num_samples)):
                self._wrapped.step()
        self._clear_sums()
        return num_samples

    def _clear_sums(self) -> None:
        self._sums.clear()
        self._num_samples = 0

    def _way(self) -> Tensor:
        """Return the way from the anchor to the parameters, anchor minus parameters, (P,)."""
        way_P = torch.empty_like(self._anchor_P)
        triples = zip(
            self._parameters.views(way_P), self._anchors(), self._parameters.tensors, strict=True
        )
        for view, anchor, parameter in triples:
            # From where the parameters began: the anchor as their dtype rounds it.
            view.copy_(anchor.to(parameter.dtype))
            view.sub_(parameter.cpu())
        return way_P

    @override
    def write(self, output_P: Tensor, num_samples: int) -> bool:
        own_P = self._way()
        for lent_P in self._lent:
            own_P.sub_(lent_P)
        torch.mul(own_P, num_samples, out=output_P)
        if not all_finite([output_P]):
            return False
        self._lent.append(own_P)
        return True

    @override
    def give_back(self, given_P: Tensor) -> None:
        # The parameters have it still, so it is in the next contribution.
        self._lent.pop()

    @override
    def use(self, average_P: Tensor, round_number: int, *, included: bool, is_fresh: bool) -> None:
        used_P = self._lent.popleft() if included else None
        own_P = None if is_fresh else self._way()
        self._anchor_P.sub_(average_P)
        if own_P is None:
            self._go_to(self._anchor_P)
        else:
            if used_P is not None:
                own_P.sub_(used_P)
            self._go_to(self._anchor_P - own_P)
        self._ranks.move(round_number)

    def _go_to(self, target_P: Tensor) -> None:
        for parameter, view in zip(
            self._parameters.tensors, self._parameters.views(target_P), strict=True
        ):
            parameter.copy_(view)

    @override
    def use_own(self, num_samples: int, round_number: int) -> None:
        self._drop_anchor()
        self._ranks.order(Order.END_ROUND, round_number)

    @override
    def forget_lent(self) -> None:
        self._lent.clear()

    @override
    def restart(self) -> int:
        num_samples = self._num_samples
        self._lent.clear()
        self._clear_sums()
        self._drop_anchor()
        return num_samples

    @override
    def common(self) -> Sequence[Tensor]:
        pairs = zip(self._anchors(), self._parameters.tensors, strict=True)
        return [anchor.to(parameter.dtype) for anchor, parameter in pairs]

    @override
    def to_checkpoint(self) -> dict[str, Any]:
        return {"anchor": self._anchor_P.clone()}

    @override
    def from_checkpoint(self, kept: dict[str, Any]) -> None:
        self._clear_sums()
        self._lent.clear()
        self._anchor_P.copy_(kept["anchor"])
