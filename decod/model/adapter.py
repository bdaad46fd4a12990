"""Adapters: matrices that are not trained, with two thin trained ones beside them.

A matrix that is not trained may lie in memory in a narrow format. It becomes wide for one product,
and is forgotten: a backward pass makes it wide again.

Legend: I inputs, O outputs of a layer, R rank.

Source: LoRA (arXiv:2106.09685), section 4.1; QLoRA (arXiv:2305.14314), section 3. Deviation: scales
of NF4 are not quantized themselves, and embedding, norms and head have the model's dtype.
"""

import logging
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from decod.errors import ConfigError
from decod.model.stage import TORCH_DTYPES, Stage, empty_stage, without_memory
from decod.run.adapter_config import AdapterConfig, AdapterKind, BaseFormat
from decod.run.run_config import RunConfig


class Frozen(Protocol):
    """A matrix as it lies in memory."""

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, as it was before it was made narrow, or nearly so."""
        ...


class _Plain:
    """A matrix of a dtype of torch's."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self._matrix.to(dtype)


class _Quantized:
    """A matrix in a format of bitsandbytes."""

    def __init__(self, matrix: Tensor, base: BaseFormat) -> None:
        library = quantizer()
        # The library takes no float64.
        narrow = matrix.float() if matrix.dtype == torch.float64 else matrix
        size = base.block_size
        if base is BaseFormat.NF4:
            self._codes, self._state = library.quantize_4bit(
                narrow, quant_type="nf4", blocksize=size
            )
            self._widen = library.dequantize_4bit
        else:
            self._codes, self._state = library.quantize_blockwise(narrow, blocksize=size)
            self._widen = library.dequantize_blockwise

    def wide(self, dtype: torch.dtype) -> Tensor:
        result: Tensor = self._widen(self._codes, self._state)
        return result.to(dtype)


def quantizer() -> Any:
    """Return the library that makes weights narrow.

    Raises:
        ConfigError: It is not installed.
    """
    # With this package, bitsandbytes would fetch code from the Hub, and says so if it can't.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional as library
    except ImportError as error:
        raise ConfigError(
            "adapter.base asks for bitsandbytes, which is not installed",
            why="it holds weights in one byte or half a byte each",
            fix='pip install bitsandbytes, or choose adapter.base = "bfloat16" in the run file',
        ) from error
    return library


def frozen(matrix: Tensor, base: BaseFormat) -> Frozen:
    """Return a matrix in a format. It may share memory with the argument."""
    if base.block_size:
        return _Quantized(matrix, base)
    return _Plain(matrix.to(torch.bfloat16) if base is BaseFormat.BFLOAT16 else matrix)


class _Product(torch.autograd.Function):
    """A product with a matrix that is not trained, and is wide only as long as it takes."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, matrix: Frozen, transposed: bool) -> Tensor:
        ctx.matrix = matrix
        ctx.transposed = transposed
        wide = matrix.wide(hidden.dtype)
        return hidden @ (wide if transposed else wide.T)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        wide = ctx.matrix.wide(gradient.dtype)
        return gradient @ (wide.T if ctx.transposed else wide), None, None


class AdaptedLinear(nn.Module):
    """A linear layer that is not trained, and maybe an adapter beside it.

    Args:
        layer: The layer as the model has it, without memory.
        adapter: What is trained beside it. None: nothing.
        transposed: Whether the layer's matrix is (I, O).
    """

    def __init__(
        self, layer: nn.Module, adapter: AdapterConfig | None, *, transposed: bool
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter = layer.weight  # type: ignore[assignment]
        self.bias: nn.Parameter | None = layer.bias  # type: ignore[assignment]
        self._transposed = transposed
        self._matrix: Frozen | None = None
        self.lora_A: nn.Linear | None = None
        self.lora_B: nn.Linear | None = None
        if adapter is not None:
            num_outputs, num_inputs = self.weight.shape
            if transposed:
                num_outputs, num_inputs = num_inputs, num_outputs
            self.lora_A = nn.Linear(num_inputs, adapter.rank, bias=False)
            self.lora_B = nn.Linear(adapter.rank, num_outputs, bias=False)
            self._scaling = adapter.scaling

    def hold(self, matrix: Tensor, base: BaseFormat) -> None:
        """Take the matrix, and keep it in a format."""
        assert matrix.shape == self.weight.shape, (matrix.shape, self.weight.shape)
        self._matrix = frozen(matrix, base)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., O) for (..., I)."""
        result: Tensor = _Product.apply(hidden, self._matrix, self._transposed)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            result = result + self.bias
        if self.lora_A is not None and self.lora_B is not None:
            result = result + self.lora_B(self.lora_A(hidden)) * self._scaling
        return result


def stage_of(run: RunConfig, stage_index: int) -> Stage:
    """Return a stage's module for training, without memory.

    With an adapter, call `hold` before use, and in any case `Stage.place`.

    Raises:
        ConfigError: The model cannot be cut like this, or has no such matrices.
    """
    stage = empty_stage(run.model, run.stages, stage_index)
    adapter = run.adapter
    if adapter.kind is AdapterKind.NONE:
        return stage
    for parameter in stage.parameters():
        parameter.requires_grad = False
    targets = adapter.of(run.model)
    with without_memory():
        for index, block in stage.layers.items():
            for path in run.model.family.matrices(run.model, int(index)):
                layer = AdaptedLinear(
                    block.get_submodule(path),
                    adapter if path in targets else None,
                    transposed=run.model.family.transposed,
                )
                block.set_submodule(path, layer)
    return stage


def hold(stage: Stage, run: RunConfig, tensors: Iterable[tuple[str, Tensor]], device: str) -> None:
    """Give a stage the parameters that it does not train, one after another.

    Args:
        stage: The module.
        run: The run, which says how they lie in memory.
        tensors: Names as in `frozen_shapes`, and values of any dtype, on any device.
        device: Where they lie.
    """
    places = stage.frozen_by_name()
    for name, tensor in tensors:
        owner, leaf = places.pop(name)
        here = tensor.to(device, TORCH_DTYPES[run.model.dtype])
        if isinstance(owner, AdaptedLinear) and leaf == "weight":
            owner.hold(here, run.adapter.base)
        else:
            setattr(owner, leaf, nn.Parameter(here, requires_grad=False))
    assert not places, sorted(places)
