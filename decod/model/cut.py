"""Models that transformers builds, cut into stages.

A stage is the model of transformers with some of its blocks: the classes, masks, rotary tables and
windows are transformers' own. Whatever comes before the first block or after the last is on stage
0. The other stages put hidden states in, and take hidden states out:

    stage 0    tokens -> what comes before -> its blocks -> hidden states
    relay      hidden states -> its blocks -> hidden states
    stage 0    hidden states -> what comes after -> head -> logits

The model is built whole and without memory, so every block knows its own place in it. A stage then
takes its blocks out. A configuration's lists of one entry per block are cut likewise.

As a program, this module reads a `config.json` and prints the model's `ModelLayout`
(`decod.run.model_layout`). So processes that have no torch learn names and shapes.

Legend: B sequences, T positions, N positions of all sequences, D width, V vocabulary.
"""

import copy
import inspect
import json
import logging
import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from decod.errors import ConfigError
from decod.model.shape import LOSS_ROWS_MIN
from decod.model.stage import TORCH_DTYPES, FirstStage, Stage, without_memory
from decod.run.model_config import ModelConfig
from decod.run.model_layout import canonical, installed_version, unusable, without_noise

_NEUTRAL: dict[str, float] = {"embedding_multiplier": 1.0}
"""Numbers by which a model multiplies its embedded tokens outside the embedding."""


_WITHOUT_MASK = frozenset({"gpt_oss"})
"""Types that take masks of documents, and do not make them from positions."""


class _Zeros(nn.Module):
    """Learnt positions for whom they were added before: on stage 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    @override
    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(*positions.shape, self._width, device=positions.device)


class _Same(nn.Module):
    """A norm that was applied before, or will be later: on stage 0."""

    @override
    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class _ReachedError(Exception):
    """A model has come to its first block."""


class CutModel:
    """A model without memory, and its parts.

    Args:
        config: The model's `config.json`.
        dtype: Of its activations.

    Raises:
        ConfigError: transformers can't build the model, or it can't be cut.
    """

    def __init__(self, config: str, dtype: torch.dtype = torch.float32) -> None:
        fields = json.loads(config)
        self.model_type = str(fields.get("model_type"))
        self.config = _config_of(fields)
        if dtype == torch.float64:
            # The other ways to compute experts take no such numbers.
            self.config._experts_implementation = "eager"
        try:
            with without_memory():
                auto = _library().AutoModelForCausalLM
                self.whole: Any = auto.from_config(self.config, dtype=dtype).eval()
        except Exception as error:
            raise unusable(self.model_type, f"transformers can't build it: {error}") from error
        self.inner: Any = self.whole.base_model
        self.blocks_name = self._find_blocks()
        _hold_buffers(self.whole)
        with torch.device("cpu"):
            _fill_buffers(self.whole)
            self._entering = self._find_entering()

    @property
    def blocks(self) -> nn.ModuleList:
        found = getattr(self.inner, self.blocks_name)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def inner_name(self) -> str:
        """The name of the model without its head."""
        names = (name for name, child in self.whole.named_children() if child is self.inner)
        return str(next(names))

    def _find_blocks(self) -> str:
        num_blocks = getattr(self.config, "num_hidden_layers", None)
        found = [
            name
            for name, child in self.inner.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == num_blocks
        ]
        if len(found) != 1 or self.inner is self.whole:
            raise unusable(self.model_type, "its blocks are not one list")
        if "inputs_embeds" not in inspect.signature(self.inner.forward).parameters:
            raise unusable(self.model_type, "it takes no hidden states")
        return str(found[0])

    def _find_entering(self) -> set[str]:
        """Return the parts with parameters that a model passes before its first block."""
        passed = set[str]()
        probe = copy.copy(self.inner)
        probe._modules = dict(self.inner._modules)
        for name, child in self.inner.named_children():
            if name != self.blocks_name and next(child.parameters(), None) is not None:
                stand_in = self._stand_in(child)
                stand_in.register_forward_pre_hook(lambda *_, name=name: passed.add(name))
                probe._modules[name] = stand_in

        def reached(*_: Any) -> None:
            raise _ReachedError

        hook = self.blocks[0].register_forward_pre_hook(reached)
        try:
            probe(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except _ReachedError:
            return passed
        except Exception as error:
            raise unusable(self.model_type, f"its parts can't be told apart: {error}") from error
        finally:
            hook.remove()
        raise unusable(self.model_type, "its first block is not run")

    def _stand_in(self, child: nn.Module) -> nn.Module:
        """Return what does nothing in the place of a part outside the blocks."""
        return _Zeros(self.config.hidden_size) if isinstance(child, nn.Embedding) else _Same()

    def part(self, blocks: range, *, enters: bool, leaves: bool) -> Any:
        """Return the model without its head, with some of its blocks, and the same parameters.

        Args:
            blocks: The indexes of the blocks.
            enters: Whether it takes tokens. Else it takes hidden states.
            leaves: Whether it applies what comes after the blocks.
        """
        part = copy.copy(self.inner)
        part._modules = dict(self.inner._modules)
        part.config = copy.deepcopy(self.config)
        part.config.num_hidden_layers = len(blocks)
        for name, value in vars(self.config).items():
            if isinstance(value, list) and len(value) == len(self.blocks):
                setattr(part.config, name, value[blocks.start : blocks.stop])
        setattr(part, self.blocks_name, nn.ModuleList([self.blocks[index] for index in blocks]))
        if not enters:
            for name, value in _NEUTRAL.items():
                for owner in (part, part.config):
                    if hasattr(owner, name):
                        setattr(owner, name, value)
        for name, child in self.inner.named_children():
            stays = enters if name in self._entering else leaves
            # Constants, such as rotary tables, belong to every stage. Hidden states pass by the
            # embedding.
            common = name == self.blocks_name or next(child.parameters(), None) is None
            if not (stays or common or child is self.inner.get_input_embeddings()):
                part._modules[name] = self._stand_in(child)
        return part

    def require_cut(self) -> None:
        """Raise ConfigError if hidden states would change between two stages."""
        part = self.part(range(0), enters=False, leaves=False)
        hidden_BTD = torch.randn(1, 4, self.config.hidden_size)
        try:
            passed_BTD = part(inputs_embeds=hidden_BTD, use_cache=False).last_hidden_state
        except Exception as error:
            raise unusable(self.model_type, f"a part of it does not run: {error}") from error
        if not torch.equal(passed_BTD, hidden_BTD):
            raise unusable(self.model_type, "hidden states would change between two stages")


def _cache_name(function: Callable[..., Any]) -> str:
    """Return what a function of transformers calls its cache: 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def _library() -> Any:
    """Return transformers, which says nothing by itself and fetches nothing."""
    # With this package, it would fetch code from the Hub.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "transformers is not installed",
            why="it builds the models that decod does not have itself",
            fix="pip install transformers",
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def _config_of(fields: Mapping[str, Any]) -> Any:
    model_type = str(fields.get("model_type"))
    _library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[model_type]
    except KeyError:
        raise unusable(model_type, "this version of transformers does not know it") from None
    try:
        return kind.from_dict(copy.deepcopy(without_noise(fields)))
    except Exception as error:
        raise unusable(model_type, f"transformers refuses its config.json: {error}") from error


def _hold_buffers(whole: Any) -> None:
    """Make parameters of the constants that files hold, so that stages have them.

    They choose experts, for example. Nothing trains them: they are no part of what is computed.
    """
    for module in whole.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer))


def _fill_buffers(whole: Any) -> None:
    """Give a model without memory the constants that no file holds, as transformers does."""
    for parameter in whole.parameters():
        parameter._is_hf_initialized = True
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    whole.initialize_weights()


class _WithLoss(torch.autograd.Function):
    """Hidden states that bring a loss of their own into the backward pass."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden_BTD: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden_BTD.view_as(hidden_BTD)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient_BTD, torch.ones_like(loss)


class _RouterLoss:
    """The loss that has the experts of some blocks share the work, as the model's own code has it.

    It counts if the configuration says `output_router_logits`. A stage adds that of its own blocks,
    times their part of all blocks. So it is transformers' if one stage has all blocks; else the
    experts of each stage are balanced among themselves.

    Args:
        cut: The model.
        num_blocks: Of the stage.
    """

    def __init__(self, cut: CutModel, num_blocks: int) -> None:
        whole = cut.whole
        self._function = getattr(
            sys.modules[type(whole).__module__], "load_balancing_loss_func", None
        )
        if self._function is None:
            raise unusable(cut.model_type, "output_router_logits is set, and it has no such loss")
        self._num_experts = whole.num_experts
        self._num_active = whole.num_experts_per_tok
        self._weight = whole.router_aux_loss_coef * num_blocks / len(cut.blocks)

    def added(self, hidden_BTD: Tensor, router_logits: Sequence[Tensor], share: float) -> Tensor:
        """Return hidden states with the loss of a microbatch, or of a share of its sequences."""
        if not router_logits:
            return hidden_BTD
        loss: Any = self._function
        loss = loss(tuple(router_logits), self._num_experts, self._num_active)
        result: Tensor = _WithLoss.apply(hidden_BTD, loss * self._weight * share)  # type: ignore[no-untyped-call]
        return result


class CutStage(Stage):
    """A slice of a model that transformers builds, as a relay runs it. Arguments as for `Stage`."""

    def __init__(self, model: ModelConfig, blocks: range) -> None:
        nn.Module.__init__(self)
        self.config = model
        cut = CutModel(model.config, TORCH_DTYPES[model.dtype])
        self.layers = nn.ModuleDict({str(index): cut.blocks[index] for index in blocks})
        self._type = cut.model_type
        self._config = cut.config
        # Their modules are those of the blocks, which must not be counted twice.
        self._parts: dict[str, Any] = {"blocks": cut.part(blocks, enters=False, leaves=False)}
        self._device = torch.device("cpu")
        """Where the constants are."""
        self._router: _RouterLoss | None = None
        if blocks and getattr(cut.config, "output_router_logits", False):
            self._router = _RouterLoss(cut, len(blocks))
        self._take_ends(cut, blocks)

    def _passed(self, found: Any) -> Tensor:
        """Return the hidden states among what a part has given."""
        hidden_BTD: Tensor = found.last_hidden_state
        if self._router is None or not torch.is_grad_enabled():
            return hidden_BTD
        return self._router.added(hidden_BTD, found.router_logits or (), self.share)

    def _apart(self, places_BT: Tensor | None) -> dict[str, Any]:
        """Return the arguments by which transformers reads documents apart."""
        if places_BT is None:
            return {}
        if self._type not in _WITHOUT_MASK:
            return {"position_ids": places_BT}
        from transformers import masking_utils

        told = {
            "config": self._config,
            # Only dtype and shape matter.
            "inputs_embeds": places_BT[..., None].to(TORCH_DTYPES[self.config.dtype]),
            "attention_mask": None,
            _cache_name(masking_utils.create_causal_mask): None,
            "position_ids": places_BT,
        }
        masks = {
            "full_attention": masking_utils.create_causal_mask(**told),
            "sliding_attention": masking_utils.create_sliding_window_causal_mask(**told),
        }
        return {"position_ids": places_BT, "attention_mask": masks}

    def _take_ends(self, cut: CutModel, blocks: range) -> None:
        """A relay has none."""

    def _part(self, name: str, device: torch.device) -> Any:
        """Return a part. All constants of the stage are on the device then."""
        if device != self._device:
            self._device = device
            for module in (each for part in self._parts.values() for each in part.modules()):
                for constant, value in module.named_buffers(recurse=False):
                    setattr(module, constant, value.to(device))
        return self._parts[name]

    @override
    def run_blocks(
        self,
        hidden_BTD: Tensor,
        places_BT: Tensor | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        if not self.layers:
            return hidden_BTD
        part = self._part("blocks", hidden_BTD.device)
        apart = self._apart(places_BT)
        return self._passed(part(inputs_embeds=hidden_BTD, use_cache=False, **apart))


class CutFirstStage(CutStage, FirstStage):
    """Stage 0 of such a model. With all blocks it is the whole model."""

    @override
    def _take_ends(self, cut: CutModel, blocks: range) -> None:
        inner = self.inner = nn.Module()  # type: ignore[assignment]
        for name, child in cut.inner.named_children():
            if name != cut.blocks_name:
                inner.add_module(name, child)
        self.heads = nn.Module()
        head = copy.copy(cut.whole)
        head.config = copy.deepcopy(cut.config)
        head.config.output_router_logits = False
        head._modules = dict(cut.whole._modules)
        for name, child in cut.whole.named_children():
            if child is cut.inner:
                head._modules[name] = cut.part(range(0), enters=False, leaves=True)
            else:
                self.heads.add_module(name, child)
        self._parts |= {"entry": cut.part(blocks, enters=True, leaves=False), "head": head}
        if len(blocks) == len(cut.blocks):
            self._parts["whole"] = cut.whole

    @override
    def _named(self, path: str) -> str:
        if path.startswith("heads."):
            return path.removeprefix("heads.")
        return super()._named(path)

    @override
    def place(self, tensors: Mapping[str, Tensor]) -> None:
        super().place(tensors)
        if self.config.tie_word_embeddings:
            table = self._parts["entry"].get_input_embeddings().weight
            self._parts["head"].get_output_embeddings().weight = table

    @override
    def embed(self, tokens_BT: Tensor, places_BT: Tensor | None = None) -> Tensor:
        part = self._part("entry", tokens_BT.device)
        return self._passed(part(tokens_BT, use_cache=False, **self._apart(places_BT)))

    @override
    def logits(self, hidden_BTD: Tensor) -> Tensor:
        part = self._part("head", hidden_BTD.device)
        result: Tensor = part(inputs_embeds=hidden_BTD, use_cache=False).logits
        return result

    @override
    def caches(self, num_positions_max: int) -> Any:
        return _library().DynamicCache(config=self._parts["whole"].config)

    @override
    def next_logits(self, tokens_BT: Tensor, caches: Any) -> Tensor:
        whole = self._part("whole", tokens_BT.device)
        kept = {_cache_name(whole.forward): caches}
        result: Tensor = whole(tokens_BT, **kept, use_cache=True, logits_to_keep=1).logits[:, -1]
        return result

    @override
    def loss(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        # Logits of a few positions at a time are in memory.
        hidden_ND = hidden_BTD.flatten(0, 1)
        targets_N = targets_BT.flatten()
        split = torch.split
        rows = zip(split(hidden_ND, LOSS_ROWS_MIN), split(targets_N, LOSS_ROWS_MIN), strict=True)
        sums = [checkpoint(self._sum_of, *each, use_reentrant=False) for each in rows]
        return torch.stack(sums).sum() / len(targets_N)

    def _sum_of(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = self.logits(hidden_ND[None])[0]
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        return functional.cross_entropy(logits_NV.to(wide), targets_N, reduction="sum")

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.embed(tokens_BT))


# --- the layout ---------------------------------------------------------------------------------


def describe(config: str) -> dict[str, Any]:
    """Return the layout of a model as JSON has it. See `decod.run.model_layout.ModelLayout`.

    Raises:
        ConfigError: The model can't be cut.
    """
    cut = CutModel(config)
    cut.require_cut()
    prefix = f"{cut.inner_name}.{cut.blocks_name}."
    stored = _stored_names(cut.whole)
    shapes = {name: list(each.shape) for name, each in cut.whole.named_parameters()}
    fields = cut.config
    ends = {name: shape for name, shape in shapes.items() if not name.startswith(prefix)}
    table = _name_of(cut.whole, cut.whole.get_input_embeddings().weight)
    tied = _name_of(cut.whole, cut.whole.get_output_embeddings().weight) == table
    num_heads = fields.num_attention_heads
    width = fields.hidden_size
    num_active = getattr(fields, "num_experts_per_tok", None) or 1
    blocks: list[dict[str, Any]] = []
    kinds: list[int] = []
    for index, block in enumerate(cut.blocks):
        kind = _of_block(block, f"{prefix}{index}.", shapes, stored, num_active)
        if kind not in blocks:
            blocks.append(kind)
        kinds.append(blocks.index(kind))
    return {
        "config": _canonical(cut.config, json.loads(config).get("transformers_version")),
        "vocab_size": fields.vocab_size,
        "hidden_size": width,
        "num_hidden_layers": len(cut.blocks),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": getattr(fields, "head_dim", None) or width // num_heads,
        "max_position_embeddings": getattr(fields, "max_position_embeddings", None) or 1 << 20,
        "tie_word_embeddings": tied,
        "block_prefix": prefix,
        "ends_prefix": f"{cut.inner_name}.",
        "embedding": table,
        "ends": ends,
        "blocks": blocks,
        "kinds": kinds,
        "stored": {name: stored[name] for name in ends if name in stored},
        "num_active": num_active,
    }


def _of_block(
    block: nn.Module,
    prefix: str,
    shapes: Mapping[str, list[int]],
    stored: Mapping[str, list[Any]],
    num_active: int,
) -> dict[str, Any]:
    own = {n.removeprefix(prefix): shape for n, shape in shapes.items() if n.startswith(prefix)}
    linears = [name for name, module in block.named_modules() if type(module) is nn.Linear]
    return {
        "shapes": own,
        "linears": sorted(linears),
        "stored": {
            name: [[key.replace(prefix, "{}", 1), shape] for key, shape in stored[prefix + name]]
            for name in own
            if prefix + name in stored
        },
        # Most matrices keep their inputs, and their results are kept by what follows.
        "kept": sum(_kept_numbers(shape, num_active) for shape in own.values()),
    }


def _kept_numbers(shape: Sequence[int], num_active: int) -> int:
    """Return about what a weight's product keeps of a position."""
    if len(shape) == 2:
        return sum(shape)
    return num_active * sum(shape[1:]) if len(shape) == 3 else 0


def _name_of(whole: Any, parameter: Tensor) -> str:
    return str(next(name for name, each in whole.named_parameters() if each is parameter))


def _canonical(config: Any, release: str | None) -> str:
    """Return a configuration in one fixed form, with the release of transformers that builds it."""
    fields = without_noise(config.to_dict())
    fields["transformers_version"] = release or installed_version()
    return canonical(fields)


def _stored_names(whole: Any) -> dict[str, list[Any]]:
    """Return how files name parameters that have another name, or are in several tensors.

    Returns:
        By the parameter's name: the names and shapes of tensors that, one after another, hold the
        parameter's elements in their order.

    Raises:
        ConfigError: Files hold them in another order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: each.shape for name, each in whole.named_parameters()}
    # Transformers' own code splits and renames tensors. It is given numbered elements. A tensor of
    # experts is shrunk to two elements for each: of its two halves, which files may hold apart.
    sizes = {name: (shape[0], 2, 1) if len(shape) == 3 else (1,) for name, shape in shapes.items()}
    ends = accumulate(map(math.prod, sizes.values()), initial=0)
    starts = dict(zip(sizes, ends, strict=False))
    numbers = {
        name: torch.arange(starts[name], starts[name] + math.prod(size)).view(size)
        for name, size in sizes.items()
    }
    try:
        found = revert_weight_conversion(whole, numbers)
        whole_shapes = revert_weight_conversion(
            whole, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        )
    except Exception as error:
        raise unusable(whole.config.model_type, f"its files can't be read: {error}") from error
    owners = sorted((start, name) for name, start in starts.items())
    pieces: dict[str, list[tuple[int, int, str]]] = {name: [] for name in shapes}
    for key, elements in found.items():
        flat = elements.flatten().tolist()
        start, owner = max(each for each in owners if each[0] <= flat[0])
        if flat != list(range(flat[0], flat[0] + len(flat))):
            raise unusable(whole.config.model_type, f"files hold {owner} in another order")
        pieces[owner].append((flat[0] - start, len(flat), key))
    result = {}
    for name, parts in pieces.items():
        parts.sort()
        if sum(num for _, num, _ in parts) != math.prod(sizes[name]):
            raise unusable(whole.config.model_type, f"files do not hold {name}")
        if [key for _, _, key in parts] != [name]:
            result[name] = [[key, list(whole_shapes[key].shape)] for _, _, key in parts]
    return result


_MEMORY_MAX_BYTES = 8 << 30
"""Of this process as a program. A large model takes half a gigabyte."""


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_MAX_BYTES, _MEMORY_MAX_BYTES))
    told = sys.stdout
    # Whatever a library prints is no part of the answer.
    sys.stdout = sys.stderr
    try:
        told.write(json.dumps(describe(sys.stdin.read())))
    except ConfigError as error:
        sys.stderr.write(error.why)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
