"""Modules of the stages: stage 0 (both ends of the model) and the relays' slices; initial weights.

A stage is built empty, on torch's meta device, and then filled with tensors that its trainer owns.
The trainer thus decides how the memory is laid out. Parameters carry the names of Hugging Face
checkpoints.

Initial weights are a pure function of the seed and the parameter's name. Members that build the
same stage on different hosts must hold the same bits, whatever the device, the cut into stages, or
the host's vector instructions. `torch.normal_` does not promise that, because its vectorised path
iterates differently from its plain one. So they use only integer sums and single correctly rounded
multiplications, on a bit stream that NumPy guarantees not to change (NEP 19).

Legend: B sequences, T positions, D width, V vocabulary.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from decod.model.attention import KeyValueCache, Rotary, rotary_tables, within_documents
from decod.model.autograd import linear_cross_entropy
from decod.model.shape import LORA_A, LORA_B
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.stages_config import StagesConfig, stage_blocks

_NUM_TERMS = 8
"""Uniform 16-bit numbers in one sum (Irwin-Hall): close to normal, excess kurtosis -0.15."""

_CHUNK_SIZE = 1 << 18
"""Elements drawn at a time. This is part of the definition: another value gives other weights."""

_STD = 0.02
"""Standard deviation of GPT-2's and Llama's initial matrices."""


def initial_weight(model: ModelConfig, *, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the initial value of one parameter, float32 on CPU. See `initial_pieces`."""
    return torch.cat([*initial_pieces(model, seed=seed, name=name, shape=shape)]).view(shape)


def initial_pieces(
    model: ModelConfig, *, seed: int, name: str, shape: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield the initial value of one parameter as flat pieces of at most 1 MiB.

    Norms are 1 and biases 0. Matrices are nearly normal with deviation 0.02. Projections that write
    into the residual stream are scaled by 1 / sqrt(2 * blocks). Of an adapter, the matrix behind is
    0. That in front has the deviation of PEFT's, 1 / sqrt(3 * inputs).

    Yields:
        float32 on CPU, new memory.

    Source: Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3, for the
    scaling. Deviation: a sum of 8 uniform numbers replaces a normal one.
    """
    if name.endswith((".bias", LORA_B)):
        yield torch.zeros(math.prod(shape))
        return
    if len(shape) == 1:
        yield torch.ones(shape)
        return
    std = _STD
    if name.endswith(LORA_A):
        std = 1 / math.sqrt(3 * shape[1])
    if name.endswith(model.family.residual):
        std /= math.sqrt(2 * model.num_hidden_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    yield from _near_normal(int.from_bytes(digest, "big"), math.prod(shape), std)


def _near_normal(seed: int, num_elements: int, std: float) -> Iterator[Tensor]:
    bits = np.random.PCG64(seed)
    # A uniform number on 0 .. 65535 has the variance (65536^2 - 1) / 12. Twice the centred sum is
    # an integer, so the only roundings are those of the product and of the cast.
    scale = std / math.sqrt(_NUM_TERMS * (65536**2 - 1) / 12) / 2
    for start in range(0, num_elements, _CHUNK_SIZE):
        size = min(_CHUNK_SIZE, num_elements - start)
        words = bits.random_raw(size * _NUM_TERMS // 4).astype("<u8", copy=False)
        sums = words.view("<u2").reshape(_NUM_TERMS, size).sum(axis=0, dtype=np.int64)
        values = (2 * sums - _NUM_TERMS * 65535) * scale
        yield torch.from_numpy(values.astype(np.float32))


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

    share: float = 1.0
    """The part of a microbatch's sequences that this module computes."""

    def __init__(self, model: ModelConfig, blocks: range) -> None:
        super().__init__()
        self.config = model
        self._rotary: Rotary | None = None
        self.layers = nn.ModuleDict()
        for index in blocks:
            self.layers[str(index)] = resolve_name(model.family.block)(model)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, under their checkpoint names, in sorted order."""
        named = {self._named(path): each for path, each in self._trained()}
        return dict(sorted(named.items()))

    def frozen_by_name(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the module and attribute of each parameter that is not trained, by its name."""
        found = {}
        for path, parameter in self.named_parameters():
            owner, _, leaf = path.rpartition(".")
            if not parameter.requires_grad:
                found[self._named(path)] = self.get_submodule(owner), leaf
        return found

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(path, each) for path, each in self.named_parameters() if each.requires_grad]

    def _named(self, path: str) -> str:
        family = self.config.family
        prefixes = {"layers.": family.block_prefix, "inner.": family.ends_prefix}
        for own, theirs in prefixes.items():
            if path.startswith(own):
                return theirs + path.removeprefix(own)
        return path

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Make every trained parameter a view of the tensor of its name. Copies nothing.

        Args:
            tensors: One tensor per parameter, with its shape, all of one dtype and device.
        """
        for path, old in self._trained():
            tensor = tensors[self._named(path)]
            assert tensor.shape == old.shape, (path, tensor.shape, old.shape)
            if old.is_meta:
                owner, _, leaf = path.rpartition(".")
                setattr(self.get_submodule(owner), leaf, nn.Parameter(tensor))
            else:
                old.data = tensor

    def run_blocks(
        self,
        hidden_BTD: Tensor,
        places_BT: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Return the residual stream after this stage's blocks.

        Args:
            hidden_BTD: (B, T, D) in the module's dtype and on its device. Not changed.
            places_BT: int64, the place of each position in its document, which begins with 0.
                No position reads another document. None: all positions are of one.
            caches: One for each block, all of one text, which the positions continue. None: the
                positions begin a text.
        """
        of_blocks = [None] * len(self.layers) if caches is None else caches
        mask_B1TT = None
        if places_BT is not None:
            mask_B1TT = within_documents(places_BT, hidden_BTD.dtype)
        rotary = None
        if self.layers and "rope_theta" in self.config.family.has:
            rotary = self._rotary_of(hidden_BTD, of_blocks[0])
            if places_BT is not None:
                rotary = rotary[0][places_BT], rotary[1][places_BT]
        for block, cache in zip(self.layers.values(), of_blocks, strict=True):
            hidden_BTD = block(hidden_BTD, rotary, cache, mask_B1TT)
        return hidden_BTD

    def _rotary_of(self, hidden_BTD: Tensor, cache: KeyValueCache | None) -> Rotary:
        """Return the rotary tables of positions that continue those of a cache."""
        start = 0 if cache is None else cache.num_positions
        end = start + hidden_BTD.shape[1]
        if self._rotary is None or len(self._rotary[0]) < end:
            length = end if cache is None else cache.num_positions_max
            self._rotary = rotary_tables(
                self.config, length, dtype=hidden_BTD.dtype, device=str(hidden_BTD.device)
            )
        return self._rotary[0][start:end], self._rotary[1][start:end]

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return `run_blocks`."""
        return self.run_blocks(hidden_BTD)


class Ends(Protocol):
    """A family's parts outside its blocks, except the head. It is a module as well."""

    def enter(self, tokens_BT: Tensor, start: int = 0, places_BT: Tensor | None = None) -> Tensor:
        """Return the residual stream before the first block, (B, T, D).

        Args:
            tokens_BT: int64 token ids.
            start: The position of the first.
            places_BT: As for `Stage.run_blocks`.
        """
        ...

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed residual stream, (B, T, D)."""
        ...

    def table(self) -> Tensor:
        """Return the embedding's weights, (V, D)."""
        ...


class FirstStage(Stage):
    """Stage 0: embedding and first blocks on the way in, final norm and head on the way out.

    With all blocks it is the whole model. The arguments are those of `Stage`.
    """

    def __init__(self, model: ModelConfig, blocks: range) -> None:
        super().__init__(model, blocks)
        self.inner: Ends = resolve_name(model.family.ends)(model)
        self.lm_head: nn.Linear | None = None
        if not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def embed(self, tokens_BT: Tensor, places_BT: Tensor | None = None) -> Tensor:
        """Return the residual stream that leaves stage 0, (B, T, D).

        Args:
            tokens_BT: int64 token ids below the vocabulary's size, on the module's device.
            places_BT: As for `run_blocks`.
        """
        return self.run_blocks(self.inner.enter(tokens_BT, places_BT=places_BT), places_BT)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the scores of every next token, (B, T, V) in the module's dtype."""
        return functional.linear(self.inner.leave(hidden_BTD), self._table())

    def caches(self, num_positions_max: int) -> Any:
        """Return what `next_logits` keeps of a text, empty, for so many positions at most."""
        return [KeyValueCache(num_positions_max) for _ in self.layers]

    def next_logits(self, tokens_BT: Tensor, caches: Any) -> Tensor:
        """Return the scores of the token after the last, (B, V) in the module's dtype.

        For a model whose blocks are all here.

        Args:
            tokens_BT: The tokens that follow those in the caches. The caches take them in.
            caches: From `caches`. The text's beginning takes empty ones.
        """
        hidden_BTD = self.inner.enter(tokens_BT, caches[0].num_positions)
        return self.logits(self.run_blocks(hidden_BTD, caches=caches)[:, -1:])[:, -1]

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


@contextmanager
def without_memory() -> Iterator[None]:
    """Have modules made within the block without memory."""
    with torch.device("meta"), _NothingDrawn():
        yield


def empty_stage(model: ModelConfig, stages: StagesConfig, stage_index: int) -> Stage:
    """Return a stage's module for training, without memory. Call `place` before use.

    Raises:
        ConfigError: The model cannot be cut like this.
    """
    blocks = stage_blocks(model, stages)[stage_index]
    family = model.family
    with without_memory():
        kind = resolve_name(family.first_stage if stage_index == 0 else family.stage)
        stage: Stage = kind(model, blocks)
        return stage


def empty_model(model: ModelConfig) -> FirstStage:
    """Return the whole model as one module without memory. Call `place` before use."""
    with without_memory():
        kind = resolve_name(model.family.first_stage)
        stage: FirstStage = kind(model, range(model.num_hidden_layers))
        return stage
