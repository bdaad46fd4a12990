"""Weight gradients that are computed after the input's gradient, so that it can be sent first.

The stage before waits only for the gradient of the activation. Matrix products for weights are half
of the work, and no node needs them before the iteration's end. If a stage postpones them, it works
on its weights while the stage before it already runs its own backward pass.

Source: the split of backward in Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.
Deviation: there the postponed work fills the pipeline's bubbles. Here it runs as soon as the
gradient is on its way, because its inputs take memory that another microbatch could use.

Legend: N positions, I inputs, O outputs of a layer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from decod.model.product import add_weight_product


class WeightProducts:
    """Products that still have to be added to the sums of gradients.

    Args:
        sums: Pairs of a weight (O, I) and the sum of its gradients, in the weight's dtype or a
            wider one.
    """

    def __init__(self, sums: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._sums = {id(weight_OI): sum_OI for weight_OI, sum_OI in sums}
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put_off(self, weight_OI: Tensor, gradient_NO: Tensor, input_NI: Tensor) -> None:
        """Remember the product `gradient_NO.T @ input_NI`. Neither may change before `compute`."""
        self._waiting.append((self._sums[id(weight_OI)], gradient_NO, input_NI))

    def compute(self) -> None:
        """Add all products to their sums."""
        with torch.no_grad():
            for sum_OI, gradient_NO, input_NI in self._waiting:
                add_weight_product(sum_OI, gradient_NO, input_NI)
        self._waiting.clear()

    def clear(self) -> None:
        """Forget the products."""
        self._waiting.clear()


def weight_gradient(
    later: WeightProducts | None, weight_OI: Tensor, gradient_NO: Tensor, input_NI: Tensor
) -> Tensor | None:
    """Return a weight's gradient, (O, I). With `later`, postpone it and return None."""
    if later is None:
        return gradient_NO.T @ input_NI
    later.put_off(weight_OI, gradient_NO, input_NI)
    return None
