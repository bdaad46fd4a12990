"""Modules of the stages: stage 0 (both ends of the model) and the relays' slices.

A stage is built empty, on torch's meta device, and then filled with tensors that its trainer owns.
The trainer thus decides how the memory is laid out. Parameters carry the names of Hugging Face
checkpoints.

Legend: B sequences, T positions, D width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from decod.model.cache import KeyValueCache
from decod.model.gpt2 import Gpt2Block
from decod.model.llama import LlamaBlock
from decod.model.loss import linear_cross_entropy
from decod.model.norm import RmsNorm
from decod.model.rotary import Rotary, rotary_tables
from decod.run.model_config import Architecture, ModelConfig, ModelDtype, StagesConfig, stage_blocks

TORCH_DTYPES = {
    ModelDtype.FLOAT64: torch.float64,
    ModelDtype.FLOAT32: torch.float32,
    ModelDtype.BFLOAT16: torch.bfloat16,
}
"""The torch dtype of activations and of the modules' weights."""


class Stage(nn.Module):
    """A contiguous slice of blocks, as a relay runs it.

    Args:
        model: The whole model.
        blocks: Indexes of the slice's blocks.
    """

    def __init__(self, model: ModelConfig, blocks: range) -> None:
        super().__init__()
        self.config = model
        self._rotary: Rotary | None = None
        self.layers = nn.ModuleDict()
        for index in blocks:
            gpt2 = model.model_type is Architecture.GPT2
            self.layers[str(index)] = Gpt2Block(model) if gpt2 else LlamaBlock(model)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return the parameters under their checkpoint names, in sorted order."""
        gpt2 = self.config.model_type is Architecture.GPT2
        prefixes = (
            {"layers.": "transformer.h.", "inner.": "transformer."}
            if gpt2
            else {"layers.": "model.layers.", "inner.": "model."}
        )
        result = {}
        for path, parameter in self.named_parameters():
            for own, theirs in prefixes.items():
                if path.startswith(own):
                    path = theirs + path.removeprefix(own)  # noqa: PLW2901
                    break
            result[path] = parameter
        return dict(sorted(result.items()))

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Make every parameter a trainable view of the tensor of its name. Copies nothing.

        Args:
            tensors: One tensor per parameter, with its shape, all of one dtype and device.
        """
        owners = dict(self.named_modules())
        names = {id(parameter): name for name, parameter in self.parameters_by_name().items()}
        for path, old in list(self.named_parameters()):
            tensor = tensors[names[id(old)]]
            assert tensor.shape == old.shape, (path, tensor.shape, old.shape)
            if old.is_meta:
                owner, _, leaf = path.rpartition(".")
                setattr(owners[owner], leaf, nn.Parameter(tensor))
            else:
                old.data = tensor

    def run_blocks(
        self, hidden_BTD: Tensor, caches: Sequence[KeyValueCache] | None = None
    ) -> Tensor:
        """Return the residual stream after this stage's blocks.

        Args:
            hidden_BTD: (B, T, D) in the module's dtype and on its device. Not changed.
            caches: One for each block, all of one text, which the positions continue. None: the
                positions begin a text.
        """
        of_blocks = [None] * len(self.layers) if caches is None else caches
        if self.config.model_type is Architecture.GPT2:
            for block, cache in zip(self.layers.values(), of_blocks, strict=True):
                hidden_BTD = block(hidden_BTD, cache)
            return hidden_BTD
        if not self.layers:
            return hidden_BTD
        first = of_blocks[0]
        start = 0 if first is None else first.num_positions
        end = start + hidden_BTD.shape[1]
        if self._rotary is None or len(self._rotary[0]) < end:
            length = end if first is None else first.num_positions_max
            self._rotary = rotary_tables(
                self.config, length, dtype=hidden_BTD.dtype, device=str(hidden_BTD.device)
            )
        rotary = (self._rotary[0][start:end], self._rotary[1][start:end])
        for block, cache in zip(self.layers.values(), of_blocks, strict=True):
            hidden_BTD = block(hidden_BTD, rotary, cache)
        return hidden_BTD

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return `run_blocks`."""
        return self.run_blocks(hidden_BTD)


class LlamaEnds(nn.Module):
    """Llama's parts outside its blocks, except the head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.norm = RmsNorm(model.hidden_size, model.norm_eps)

    def enter(self, tokens_BT: Tensor, start: int = 0) -> Tensor:  # noqa: ARG002 - as GPT-2's.
        """Return the embedded tokens, (B, T, D)."""
        result: Tensor = self.embed_tokens(tokens_BT)
        return result

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed residual stream, (B, T, D)."""
        result: Tensor = self.norm(hidden_BTD)
        return result

    def table(self) -> Tensor:
        """Return the embedding's weights, (V, D)."""
        return self.embed_tokens.weight


class Gpt2Ends(nn.Module):
    """GPT-2's parts outside its blocks, except the head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(model.vocab_size, model.hidden_size)
        self.wpe = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        self.ln_f = nn.LayerNorm(model.hidden_size, eps=model.norm_eps)

    def enter(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """Return the embedded tokens plus their positions from `start` on, (B, T, D)."""
        positions_TD = self.wpe.weight[start : start + tokens_BT.shape[1]]
        result: Tensor = self.wte(tokens_BT) + positions_TD
        return result

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed residual stream, (B, T, D)."""
        result: Tensor = self.ln_f(hidden_BTD)
        return result

    def table(self) -> Tensor:
        """Return the embedding's weights, (V, D)."""
        return self.wte.weight


class FirstStage(Stage):
    """Stage 0: embedding and first blocks on the way in, final norm and head on the way out.

    With all blocks it is the whole model. The arguments are those of `Stage`.
    """

    def __init__(self, model: ModelConfig, blocks: range) -> None:
        super().__init__(model, blocks)
        ends = Gpt2Ends if model.model_type is Architecture.GPT2 else LlamaEnds
        self.inner: Gpt2Ends | LlamaEnds = ends(model)
        self.lm_head: nn.Linear | None = None
        if not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the residual stream that leaves stage 0, (B, T, D).

        Args:
            tokens_BT: int64 token ids below the vocabulary's size, on the module's device.
        """
        return self.run_blocks(self.inner.enter(tokens_BT))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the scores of every next token, (B, T, V) in the module's dtype."""
        return functional.linear(self.inner.leave(hidden_BTD), self._table())

    def next_logits(self, tokens_BT: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """Return the scores of the token after the last, (B, V) in the module's dtype.

        For a model whose blocks are all here.

        Args:
            tokens_BT: The tokens that follow those in the caches. The caches take them in.
            caches: One for each block. The text's beginning takes empty ones.
        """
        hidden_BTD = self.inner.enter(tokens_BT, caches[0].num_positions)
        return self.logits(self.run_blocks(hidden_BTD, caches)[:, -1:])[:, -1]

    def _table(self) -> Tensor:
        return self.inner.table() if self.lm_head is None else self.lm_head.weight

    def loss(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy over all positions, a scalar in float32 or wider.

        Args:
            hidden_BTD: Output of the last block, in the module's dtype.
            targets_BT: int64, the token that follows each position.
        """
        hidden_ND = self.inner.leave(hidden_BTD).flatten(0, 1)
        return linear_cross_entropy(hidden_ND, self._table(), targets_BT.flatten())

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of a model whose blocks are all here, (B, T, V)."""
        return self.logits(self.embed(tokens_BT))


class _NothingDrawn(TorchFunctionMode):
    """Keeps modules from drawing initial values.

    On the meta device there is nothing to fill. But torch's way of doing nothing loads its
    compiler, which takes a second of CPU time and 40 MiB.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        values = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__ and "tensor" in values:
            return values["tensor"]
        return func(*args, **values)


def empty_stage(model: ModelConfig, stages: StagesConfig, stage_index: int) -> Stage:
    """Return a stage's module for training, without memory. Call `place` before use.

    Raises:
        ConfigError: The model cannot be cut like this.
    """
    blocks = stage_blocks(model, stages)[stage_index]
    with torch.device("meta"), _NothingDrawn():
        kind = FirstStage if stage_index == 0 else Stage
        return kind(model, blocks)


def empty_model(model: ModelConfig) -> FirstStage:
    """Return the whole model as one module without memory. Call `place` before use."""
    with torch.device("meta"), _NothingDrawn():
        return FirstStage(model, range(model.num_hidden_layers))
