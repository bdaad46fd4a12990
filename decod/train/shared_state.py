"""What all members of a stage hold alike: what newcomers fetch, and what disks keep.

Legend: P parameters of the stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedState:
    """A stage's weights, and the moments of the optimizer that all members have in common."""

    weights: Tensor
    """(P,) float32 or float64. For bfloat16 models, the float32 master weights."""
    moments: Mapping[str, Tensor]
    """By the prefix of their tensors' names in a checkpoint; (P,) like the weights."""

    @classmethod
    def without_moments(cls, weights_P: Tensor, prefixes: Sequence[str]) -> "SharedState":
        """Return a state before the first step: the moments are zero."""
        return cls(weights_P, {prefix: torch.zeros_like(weights_P) for prefix in prefixes})

    def to(self, device: str) -> "SharedState":
        """Return the state on a device. Nothing is copied if it is there already."""
        moments = {prefix: moment.to(device) for prefix, moment in self.moments.items()}
        return SharedState(self.weights.to(device), moments)
