"""A stage's flat buffers: positions of parameters, and what all members hold alike.

Parameters are sorted by name, without gaps.

Legend: P parameters of the stage.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decod.run.model_config import Shapes
from decod.train.checkpoint.description import hashed_line
from decod.train.copies import on_host
from decod.train.optimizers import Segment


@dataclass(frozen=True, slots=True)
class SharedState:
    """A stage's weights, and the moments of the optimizer that all members have in common."""

    weights: Tensor
    """(P,) float32 or float64. For bfloat16 models, the float32 master weights."""
    moments: Mapping[str, Tensor]
    """Moments by the prefix of their tensors' names in a checkpoint; (P,) like the weights."""

    @classmethod
    def without_moments(cls, weights_P: Tensor, prefixes: Sequence[str]) -> "SharedState":
        """Return a state before the first step: the moments are zero."""
        return cls(weights_P, {prefix: torch.zeros_like(weights_P) for prefix in prefixes})

    def to(self, device: str) -> "SharedState":
        """Return the state on a device. Nothing is copied if it is there already."""
        moments = {prefix: moment.to(device) for prefix, moment in self.moments.items()}
        return SharedState(self.weights.to(device), moments)


class Layout:
    """Positions of a stage's parameters in flat buffers of `num_elements` elements.

    Args:
        shapes: Of the parameters, by name.
        whole: Names of matrices for which an optimizer takes steps as a whole.
    """

    def __init__(self, shapes: Shapes, whole: Collection[str] = ()) -> None:
        self.shapes: Shapes = dict(sorted(shapes.items()))
        self._whole = whole
        self.slices: dict[str, slice] = {}
        start = 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(start, start + math.prod(shape))
            start = self.slices[name].stop
        self.num_elements = start

    def views(self, flat_P: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's name and its view of a flat buffer."""
        assert flat_P.shape == (self.num_elements,), (flat_P.shape, self.num_elements)
        for name, here in self.slices.items():
            yield name, flat_P[here].view(self.shapes[name])

    def segments(self) -> list[Segment]:
        """Return the segments of equal weight decay: matrices are decayed, norms and biases not.

        A matrix that is stepped as a whole has a segment to itself.
        """
        found = list[Segment]()
        for name, here in self.slices.items():
            shape = self.shapes[name]
            matrix = (shape[0], shape[1]) if name in self._whole else None
            decayed = len(shape) > 1
            last = found[-1] if found else None
            if last and last.decayed == decayed and matrix is None and last.matrix is None:
                found[-1] = replace(last, stop=here.stop)
            else:
                found.append(Segment(here.start, here.stop, decayed, matrix))
        return found

    def hash(self, flat_P: Tensor) -> str:
        """Return the sha256 of names, shapes and each tensor's sha256, as hexadecimal digits.

        So it also follows from a description of the tensors that has their hashes.
        """
        assert flat_P.shape == (self.num_elements,), (flat_P.shape, self.num_elements)
        whole = hashlib.sha256()
        digest = hashlib.sha256()
        tensors = iter(self.shapes.items())
        name, shape = next(tensors, ("", ()))
        left = math.prod(shape) * flat_P.element_size()
        for piece in on_host(flat_P):
            rest = byte_view(piece)
            while rest:
                digest.update(rest[:left])
                taken = len(rest[:left])
                rest = rest[left:]
                left -= taken
                if left:
                    continue
                whole.update(hashed_line(name, flat_P.dtype, shape, digest.hexdigest()))
                name, shape = next(tensors, ("", ()))
                left = math.prod(shape) * flat_P.element_size()
                digest = hashlib.sha256()
        return whole.hexdigest()


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
