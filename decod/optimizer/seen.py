"""Counts what a step was computed from, as the training loop's model sees it.

A loop calls `step()` without a number, and its last batch may be smaller than the others. The
outermost module that holds trained parameters is found when the loop first calls it. A pass counts
once a backward pass goes through what it has returned.
"""

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from decod.errors import ConfigError

_IGNORED = -100
"""Label of a token that is no target, as in torch's cross entropy and in transformers."""

Shape = tuple[int, ...]


def _rows(shape: Shape) -> int:
    return shape[0]


def _tokens(shape: Shape) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _columns(shape: Shape) -> int:
    return shape[1] if len(shape) > 1 else 0


_MEASURES: tuple[Callable[[Shape], int], ...] = (_rows, _tokens, _columns)
"""The forms of a sample: a row, a token, or a column of a batch that has time first."""


@dataclass(slots=True)
class _Pass:
    """A forward pass."""

    shape: Shape
    num_targets: Tensor | None
    """Tokens that are targets. None: unknown."""
    num_of_step: Tensor | int | None
    """Targets of the whole step, by which its loss was divided. None: unknown."""
    is_divided: bool = False
    """Its loss is a sum over its targets, divided by `num_of_step`."""
    counts: bool = False
    """A backward pass has gone through it."""


class SeenSamples:
    """The samples of a step.

    Args:
        parameters: What is trained.
        usual: Samples of a full step. Of tokens: not used.
        num_ranks: Processes of this host, each with as large a batch.
        of_tokens: Count the tokens that are targets, by the argument `labels` of the model.
    """

    def __init__(
        self, parameters: Sequence[Tensor], usual: int, num_ranks: int, *, of_tokens: bool
    ) -> None:
        self._parameters = parameters
        self._usual = usual
        self._num_ranks = num_ranks
        self._of_tokens = of_tokens
        self._ids = {*map(id, parameters)}
        self._measure: Callable[[Shape], int] | None = None
        self._is_known = True
        """Whether numbers have made sense so far."""
        self._has_warned = False
        self._divides: bool | None = None
        """True if the model divides its loss by `num_items_in_batch`. None: not known yet."""
        self.correction = 1.0
        """The factor that the gradient of the step that was last taken must be multiplied by."""
        self.told: tuple[int, float] | None = None
        """Samples and correction of the next step, if somebody knows better."""
        self._passes: list[_Pass] = []
        self._module: nn.Module | None = None
        hook = _Hook(self)
        # `torch.compile` warns of it, though it is gone before anything is compiled.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there")
        self._handle = register_module_forward_pre_hook(hook.look)
        weakref.finalize(self, self._handle.remove)

    def close(self) -> None:
        """Watch no more."""
        self._handle.remove()

    # --- hooks --------------------------------------------------------------------------------

    def look(self, module: nn.Module) -> None:
        """A module is called: it may be the one that the loop calls."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if any(id(parameter) in self._ids for parameter in module.parameters()):
            self._handle.remove()
            self._module = module
            self._handle = module.register_forward_hook(_Hook(self), with_kwargs=True)

    def passed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """The loop's module has done a forward pass."""
        # A copy of the module has a copy of the hook.
        if module is not self._module or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            return
        if all(parameter.grad is None for parameter in self._parameters):
            self.drop()
        shape = _batch_shape(module, args, kwargs)
        if shape is None:
            return
        matters = self._of_tokens or "num_items_in_batch" in kwargs
        found = _Pass(shape, *(_targets(module, kwargs) if matters else (None, None)))
        if found.num_of_step is not None and found.num_targets is not None:
            if self._divides is None:
                self._divides = _divides(module, kwargs, output)
            found.is_divided = self._divides
        self._passes.append(found)
        outputs = [each for each in _tensors(output) if each.requires_grad]

        def count(_: Tensor) -> None:
            found.counts = True

        for each in outputs:
            each.register_hook(count)  # type: ignore[no-untyped-call]  # torch has no types here.
        found.counts = not outputs and not [*_tensors(output)]

    # --- the optimizer ------------------------------------------------------------------------

    def drop(self) -> None:
        """The gradients so far are dropped. A backward pass may still follow a forward pass."""
        self._passes = [each for each in self._passes if not each.counts]

    def take(self) -> int:
        """Return the samples since this was last called.

        Raises:
            ConfigError: They are tokens, and the model was not given their labels.
        """
        passes = [each for each in self._passes if each.counts]
        self._passes = []
        if self.told is not None:
            (num, self.correction) = self.told
            self.told = None
            return num
        self.correction = self._correction_of(passes)
        if self._of_tokens:
            return self._num_tokens(passes)
        if not passes:
            self._warn("no call of a module with the trained parameters was seen")
            return self._usual
        if not self._is_known:
            return self._usual
        measure = self._measure or self._find_measure(passes)
        num = self._sum(passes, measure)
        if num > self._usual:
            self._is_known = False
            self._warn(f"a step had a batch of shape {passes[0].shape}, which looks like {num}")
            return self._usual
        if self._measure is None:
            self._warn(f"no step has had so many yet, and one with {num} counts as {num}")
        return num

    def _sum(self, passes: Sequence[_Pass], measure: Callable[[Shape], int]) -> int:
        return sum(measure(each.shape) for each in passes) * self._num_ranks

    def _find_measure(self, passes: Sequence[_Pass]) -> Callable[[Shape], int]:
        """Return what a sample is: that of which a step has as many as it should."""
        for measure in _MEASURES:
            if self._sum(passes, measure) == self._usual:
                self._measure = measure
                return measure
        return _rows

    def _correction_of(self, passes: Sequence[_Pass]) -> float:
        """Return what the gradient must be multiplied by to be the mean over the targets.

        A trainer may have divided the loss by another number, that of all labels, though the first
        of a text is no target.
        """
        told = [each.num_of_step for each in passes if each.num_of_step is not None]
        if not told or self._num_ranks > 1 or not all(each.is_divided for each in passes):
            return 1.0
        num = sum(int(each.num_targets) for each in passes if each.num_targets is not None)
        return float(told[-1]) / num if num else 1.0

    def _num_tokens(self, passes: Sequence[_Pass]) -> int:
        told = [each.num_of_step for each in passes if each.num_of_step is not None]
        if told and self._num_ranks > 1:
            return int(told[-1])
        found = [each.num_targets for each in passes if each.num_targets is not None]
        if not found or len(found) < len(passes):
            raise ConfigError(
                "the tokens of a step can't be counted",
                why="the model was not called with the argument labels",
                fix="give step(batch_size=...) the number of tokens of which the loss is the mean",
                code="E-CFG-090",
            )
        return int(sum(int(each) for each in found)) * self._num_ranks

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        sys.stderr.write(
            f"decod: warning: {what}, where batch_size_per_step is {self._usual}. Without "
            "step(batch_size=...), a step whose samples can't be seen counts as that many\n"
        )


class _Hook:
    """A hook that can be copied and saved along with a model, and then does nothing."""

    def __init__(self, seen: SeenSamples | None = None) -> None:
        self._seen = None if seen is None else weakref.ref(seen)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        seen = None if self._seen is None else self._seen()
        if seen is not None:
            seen.passed(module, args, kwargs, output)

    def look(self, module: nn.Module, _: Any) -> None:
        """A module is about to be called."""
        seen = None if self._seen is None else self._seen()
        if seen is not None:
            seen.look(module)

    @override
    def __getstate__(self) -> dict[str, None]:
        return {"_seen": None}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a batch, or in what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))


def _batch_shape(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape | None:
    """Return the shape of what a batch has first. None: there is no tensor with dimensions."""
    main = kwargs.get(getattr(module, "main_input_name", ""))
    for value in (main, *args, *kwargs.values()):
        if isinstance(value, PackedSequence):
            return (int(value.batch_sizes[0]),)
        for tensor in _tensors(value):
            if tensor.dim():
                return tuple(tensor.shape)
    return None


def _targets(
    module: nn.Module, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | int | None]:
    """Return the number of target tokens of a pass, and of its whole step, as far as it is said."""
    labels = _aligned_labels(module, kwargs)
    num = None if labels is None else (labels != _IGNORED).sum()
    of_step = kwargs.get("num_items_in_batch")
    if isinstance(of_step, Tensor) and of_step.numel() != 1:
        of_step = None  # One for each device of a `DataParallel`.
    return num, of_step


def _aligned_labels(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """Return labels, each at the place from which it is predicted."""
    labels = kwargs.get("shift_labels")
    if isinstance(labels, Tensor):
        return labels
    labels = kwargs.get("labels")
    if not isinstance(labels, Tensor):
        return None
    return labels[..., 1:] if _shifts(module) and labels.dim() > 1 else labels


@torch.no_grad()
def _divides(module: nn.Module, kwargs: dict[str, Any], output: Any) -> bool:
    """Return whether a loss is a sum divided by `num_items_in_batch`, and not a mean. Computes it
    anew."""
    labels = _aligned_labels(module, kwargs)
    loss = getattr(output, "loss", None)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not isinstance(loss, Tensor) or labels is None:
        return False
    if labels.is_floating_point() or (labels.dim(), logits.dim()) not in ((1, 2), (2, 3)):
        return False
    if labels.dim() == 1:
        labels = labels[None]
        logits = logits[None]
    total = 0.0
    for row, targets in zip(logits, labels, strict=True):  # One at a time: logits are large.
        own = row[: len(targets)].float()
        entropy = nn.functional.cross_entropy(own, targets, reduction="sum", ignore_index=_IGNORED)
        total += float(entropy)
    expected = total / float(kwargs["num_items_in_batch"])
    return math.isclose(expected, float(loss), rel_tol=1e-2)


def _shifts(module: nn.Module) -> bool:
    """Return whether a model of transformers predicts each label from those before it."""
    inner = getattr(module, "module", module)
    config = getattr(inner, "config", None)
    loss = getattr(inner, "loss_function", None)
    is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    return is_causal and not getattr(config, "is_encoder_decoder", False)
