"""Text from a model folder, token by token: enough to see what a run has learnt.

A token costs one position, because keys and values of the positions before are kept. If a text
outgrows the model's context, the model sees the newer half of its context from then on, which is
computed anew. For serving, use transformers or similar tools.

Legend: V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decod.errors import DataError
from decod.model.adapter_folder import base_of
from decod.model.hf_folder import model_weights
from decod.model.sampling import Sampling
from decod.model.stage import TORCH_DTYPES, empty_model
from decod.model.weights import read_config


class LoadedModel:
    """The model of a folder, in memory and ready to continue texts.

    Args:
        folder: A model folder, or that of an adapter.
        device: A device of torch.
        base: The model that the adapter changes. None: the one that its settings name.

    Raises:
        DataError: The folder cannot be read.
    """

    def __init__(self, folder: Path, device: str = "cpu", base: Path | None = None) -> None:
        self.config = read_config(base_of(folder, base) or folder, trains=False)
        self._folder = folder
        self._device = device
        self._module = empty_model(self.config)
        dtype = TORCH_DTYPES[self.config.dtype]
        weights = model_weights(folder, self.config, base)
        self._module.place({name: tensor.to(device, dtype) for name, tensor in weights})

    @torch.inference_mode()
    def continuation(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_tokens: int,
        stop_ids: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield the tokens that continue a prompt, each as soon as it is known.

        Args:
            prompt_ids: At least one token id. The model sees the last `max_position_embeddings`.
            sampling: How to choose.
            num_tokens: The most tokens to yield; 0 or less gives none.
            stop_ids: The end of a text: if the model chooses one of them, it is not yielded, and
                nothing follows.

        Raises:
            DataError: A token of the prompt is not in the model's vocabulary, or the model gives
                scores that are not finite.
        """
        self._check(prompt_ids)
        generator = torch.Generator().manual_seed(sampling.seed)
        limit = self.config.max_position_embeddings
        tokens = list(prompt_ids)
        caches, fresh = self._begin(tokens[-limit:], num_tokens)
        num_seen = 0
        for num_left in range(num_tokens, 0, -1):
            if num_seen == limit:
                caches, fresh = self._begin(tokens[-max(1, limit // 2) :], num_left)
                num_seen = 0
            tokens_BT = torch.tensor([fresh], device=self._device)
            # On the CPU, so that a seed means the same on every device.
            scores_V = self._module.next_logits(tokens_BT, caches)[0].to("cpu", torch.float64)
            if not torch.isfinite(scores_V).all():
                raise self._diverged()
            token = choose(scores_V, sampling, generator)
            if token in stop_ids:
                return
            yield token
            tokens.append(token)
            num_seen += len(fresh)
            fresh = [token]

    def _begin(self, window: list[int], num_tokens: int) -> tuple[Any, list[int]]:
        """Return empty caches for a text that begins with some tokens, and these tokens."""
        num_positions = min(self.config.max_position_embeddings, len(window) + num_tokens)
        return self._module.caches(num_positions), window

    def _check(self, prompt_ids: Sequence[int]) -> None:
        vocab_size = self.config.vocab_size
        if not prompt_ids or not all(0 <= token < vocab_size for token in prompt_ids):
            raise DataError(
                f"the prompt {list(prompt_ids)[:8]} does not fit a vocabulary of {vocab_size}",
                why="the model needs at least one token, and knows no others",
                fix="give a prompt, and use the tokenizer that the model was trained with",
                code="E-DAT-016",
            )

    def _diverged(self) -> DataError:
        return DataError(
            f"the model in {self._folder} gives scores that are not finite",
            why="its weights are damaged, or its training has diverged",
            fix="use the model of an earlier iteration",
            code="E-DAT-045",
        )


def choose(scores_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token, given the scores of all.

    Args:
        scores_V: Logits, float64, on the CPU. Changed.
        sampling: How to choose.
        generator: Gives what is random. Not used at temperature 0.
    """
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    # Taking the largest away first keeps a tiny temperature from giving infinity.
    scores_V.sub_(scores_V.max()).div_(sampling.temperature)
    if 0 < sampling.top_k < len(scores_V):
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V[scores_V < least] = -torch.inf
    chances_V = torch.softmax(scores_V, dim=-1)
    if sampling.top_p < 1:
        ordered_V, order_V = chances_V.sort(descending=True)
        # A token stays if those before it have not filled the share. So the first always stays.
        before_V = ordered_V.cumsum(0) - ordered_V
        chances_V[order_V[before_V >= sampling.top_p]] = 0
    return int(torch.multinomial(chances_V, 1, generator=generator))
