"""Gradients of weights that are computed after the input's, so that the input's can be sent first.

Whoever waits for a backward pass waits for the gradient of the activation alone. Matrix products
for weights are half of the work, and nobody needs them before the iteration's end: with them put
off, a stage works on its weights while the stage before it already runs its own backward.

Source: the split of backward in Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.
There such work fills the pipeline's bubbles; here it is done as soon as the gradient is on its way,
since what a host keeps for it is memory that another microbatch could use.

Legend: N positions, I inputs, O outputs of a layer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class WeightProducts:
    """Products that are still to be added to the sums of gradients.

    Args:
        sums: Pairs of a weight (O, I) and the sum that its gradients are added to, of the weight's
            dtype or a wider one.
    """

    def __init__(self, sums: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._sums = {id(weight_OI): sum_OI for weight_OI, sum_OI in sums}
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put_off(self, weight_OI: Tensor, gradient_NO: Tensor, input_NI: Tensor) -> None:
        """Remember one product, `gradient_NO.T @ input_NI`; neither may change before `compute`."""
        self._waiting.append((self._sums[id(weight_OI)], gradient_NO, input_NI))

    def compute(self) -> None:
        """Add all products to their sums."""
        with torch.no_grad():
            for sum_OI, gradient_NO, input_NI in self._waiting:
                if sum_OI.dtype == gradient_NO.dtype:
                    sum_OI.addmm_(gradient_NO.T, input_NI)
                else:
                    sum_OI.add_(gradient_NO.T @ input_NI)
        self._waiting.clear()

    def clear(self) -> None:
        """Forget the products."""
        self._waiting.clear()


def weight_gradient(
    later: WeightProducts | None, weight_OI: Tensor, gradient_NO: Tensor, input_NI: Tensor
) -> Tensor | None:
    """Return a weight's gradient, (O, I), or put it off and return nothing."""
    if later is None:
        return gradient_NO.T @ input_NI
    later.put_off(weight_OI, gradient_NO, input_NI)
    return None
