"""Local mode: each host steps by itself, and hosts average how far they have come.

The *anchor* is where all hosts were after the last round. A host's contribution is its way from
there, times its samples. A round moves the anchor by the average of all ways. What a host has
learnt since it contributed stays on top.

Legend: P all parameters, flat.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decod.optimizer.accumulators import ContributionMode, GradientSums
from decod.optimizer.optimizer_ranks import Order, Ranks
from decod.optimizer.parameters import Parameters, all_finite


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
        self._parameters, self._wrapped, self._num_calls = parameters, wrapped, num_calls
        self._ranks = ranks
        self._sums = GradientSums(parameters, batch_size)
        self._num_samples = 0
        """In the sums."""
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
