"""The parameters that an optimizer trains, as one flat run of numbers.

Legend: P all parameters, flat.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decod.errors import ConfigError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Parameters:
    """The parameters with `requires_grad`, in the order of the optimizer's groups.

    Args:
        groups: `param_groups` of the optimizer.

    Raises:
        ConfigError: There are none, or one can't be averaged.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.tensors: list[Tensor] = [
            parameter
            for group in groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._check()
        self.shapes = [tuple(parameter.shape) for parameter in self.tensors]
        self.num_elements = sum(map(math.prod, self.shapes))
        has_float64 = any(parameter.dtype == torch.float64 for parameter in self.tensors)
        self.wide = torch.float64 if has_float64 else torch.float32
        """Dtype in which contributions and averages travel between this process and the node."""

    def _check(self) -> None:
        problem = "" if self.tensors else "no parameter has requires_grad"
        for index, parameter in enumerate(self.tensors):
            if parameter.dtype not in _DTYPES:
                problem = f"parameter {index} is of {parameter.dtype}"
            elif parameter.layout != torch.strided:
                problem = f"parameter {index} is sparse"
            elif not parameter.numel():
                problem = f"parameter {index} has no elements"
        if problem:
            raise ConfigError(
                problem,
                why="averages are of dense float16, bfloat16, float32 or float64 parameters",
                fix="give the optimizer only such parameters",
                code="E-CFG-091",
            )

    @property
    def on_cpu(self) -> bool:
        """Return whether some of them, and so their gradients, are in the host's memory."""
        return any(parameter.device.type == "cpu" for parameter in self.tensors)

    def wide_of(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which this parameter's gradients are added up."""
        return torch.float64 if parameter.dtype == torch.float64 else torch.float32

    def views(self, flat_P: Tensor) -> list[Tensor]:
        """Return each parameter's place in a flat run, in its shape."""
        assert flat_P.shape == (self.num_elements,), (flat_P.shape, self.num_elements)
        pieces = torch.split(flat_P, [math.prod(shape) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def gradients_of(self, flat_P: Tensor) -> list[Tensor]:
        """Return a flat run as new gradients on the parameters' devices."""
        return [
            view.to(parameter.device, parameter.dtype, copy=True)
            for parameter, view in zip(self.tensors, self.views(flat_P), strict=True)
        ]

    @contextmanager
    def with_gradients(self, gradients: Sequence[Tensor | None]) -> Iterator[None]:
        """Give the parameters other gradients for a while.

        Afterwards they have their own again, the same tensors: DDP's buckets may refer to them.
        """
        own = [parameter.grad for parameter in self.tensors]
        self._set(gradients)
        try:
            yield
        finally:
            self._set(own)

    def _set(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.tensors, gradients, strict=True):
            parameter.grad = gradient

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that the loop has computed."""
        if factor != 1.0:
            torch._foreach_mul_(
                [each.grad for each in self.tensors if each.grad is not None], factor
            )

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients that the loop has computed.

        Raises:
            ConfigError: One is sparse.
        """
        found = [parameter.grad for parameter in self.tensors]
        if any(gradient is not None and gradient.layout != torch.strided for gradient in found):
            raise ConfigError(
                "a gradient is sparse",
                why="averages are of dense gradients",
                fix="make the embedding with sparse=False",
                code="E-CFG-091",
            )
        return found


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether no element is NaN or infinite. Waits once for each device.

    NaN and infinity survive a sum.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None:
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            sums.setdefault(tensor.device, []).append(tensor.detach().sum(dtype=wide))
    return all(bool(torch.stack(each).double().isfinite().all()) for each in sums.values())


def fingerprint(optimizer: torch.optim.Optimizer, mode: str, scheduler: Any = None) -> str:
    """Return a hash of what all hosts must have in common, as hexadecimal digits.

    It covers shapes and dtypes of the parameters, and the classes and settings of the optimizer, by
    group, and of the scheduler.

    Args:
        optimizer: As the script has made it.
        mode: Of the run.
        scheduler: That has just been made for the optimizer. None: there is none.
    """
    groups = []
    for group in optimizer.param_groups:
        tensors = [
            [list(each.shape), str(each.dtype)] for each in group["params"] if each.requires_grad
        ]
        options = {key: _plain(value) for key, value in sorted(group.items()) if key != "params"}
        groups.append([tensors, options])
    kept = {} if scheduler is None else scheduler.state_dict()
    schedule = {k: _plain(v) for k, v in sorted(kept.items()) if not k.startswith("_")}
    said = [_kind(optimizer), mode, groups, _kind(scheduler), schedule]
    return hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value).__qualname__
