"""Initial weights: a pure function of the seed and the parameter's name.

Members that build the same stage on different hosts must hold the same bits, whatever the device,
the cut into stages, or the host's vector instructions. `torch.normal_` does not promise that,
because its vectorised path iterations differently from its plain one. This module uses only integer
sums and single correctly rounded multiplications, on a bit stream that NumPy guarantees not to
change (NEP 19).
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from decod.run.model_config import ModelConfig

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
    into the residual stream are scaled by 1 / sqrt(2 * blocks).

    Yields:
        float32 on CPU, new memory.

    Source: Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3, for the
    scaling. Deviation: a sum of 8 uniform numbers replaces a normal one.
    """
    if name.endswith(".bias"):
        yield torch.zeros(math.prod(shape))
        return
    if len(shape) == 1:
        yield torch.ones(shape)
        return
    std = _STD
    if name.endswith((".o_proj.weight", ".down_proj.weight", ".c_proj.weight")):
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
