"""Text from an exported model, by a plain loop: enough to see what a run has learnt.

The whole context is computed again for every token. This is slow for long texts, but simple enough
to be trusted. For serving, use transformers or similar tools.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from decod.errors import DataError
from decod.model.folder import read_weights
from decod.model.header import read_config
from decod.model.stage import TORCH_DTYPES, empty_model


@torch.inference_mode()
def generate(
    folder: Path, prompt_ids: Sequence[int], *, num_tokens: int, seed: int, temperature: float
) -> list[int]:
    """Return `num_tokens` tokens that continue the prompt.

    Args:
        folder: A model folder.
        prompt_ids: At least one token id. The model sees only the last `max_position_embeddings`.
        num_tokens: Number of tokens to sample; 0 or less gives none.
        seed: The same seed gives the same tokens on the same host.
        temperature: 0 takes the likeliest token; 1 samples from the model's own distribution.

    Raises:
        DataError: The folder cannot be read, or a token is not in the model's vocabulary.
    """
    model = read_config(folder)
    if not prompt_ids or not all(0 <= token < model.vocab_size for token in prompt_ids):
        raise DataError(
            f"the prompt {list(prompt_ids)[:8]} does not fit a vocabulary of {model.vocab_size}",
            why="the model needs at least one token, and knows no others",
            fix="give a prompt, and use the tokenizer that the model was trained with",
            code="E-DAT-016",
        )
    module = empty_model(model)
    dtype = TORCH_DTYPES[model.dtype]
    module.place({name: tensor.to(dtype) for name, tensor in read_weights(folder, model)})
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt_ids)
    for _ in range(num_tokens):
        context = torch.tensor([tokens[-model.max_position_embeddings :]])
        scores_V = module.logits(module.embed(context)[:, -1:])[0, -1].double()
        if temperature <= 0:
            tokens.append(int(scores_V.argmax()))
        else:
            chances_V = torch.softmax(scores_V / temperature, dim=-1)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return tokens[len(prompt_ids) :]
