"""Where and how large the checks run, and the models they run with."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.training_config import BatchConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """How a check runs."""

    device: str
    """`cuda:0`, or `cpu` to try the check itself."""
    tiny: bool
    """Whether sizes are so small that a slow machine needs seconds."""

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> ModelDtype:
        return ModelDtype.FLOAT32 if self.tiny else ModelDtype.BFLOAT16

    def pick(self, usual: int, tiny: int) -> int:
        """Return a size."""
        return tiny if self.tiny else usual

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], num_repeats: int = 5) -> float:
        """Return the median time of some work, after a warm-up."""
        work()
        found = []
        for _ in range(num_repeats):
            self.wait()
            start_s = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - start_s)
        return median(found)


def llama(setting: Setting, name: str, num_blocks: int) -> ModelConfig:
    """Return Llama 3's blocks of `1b` or `8b`; the vocabulary is small, as no head is measured."""
    if setting.tiny:
        return ModelConfig(
            dtype=setting.dtype,
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_blocks,
            num_key_value_heads=2,
        )
    large = name == "8b"
    return ModelConfig(
        dtype=setting.dtype,
        vocab_size=4096,
        hidden_size=4096 if large else 2048,
        intermediate_size=14336 if large else 8192,
        num_hidden_layers=num_blocks,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )


def batch_of(setting: Setting, microbatch_size: int, num_microbatches: int = 4) -> BatchConfig:
    """Return a batch of sequences of 2,048 tokens."""
    return BatchConfig(
        sequence_length=setting.pick(2048, 16),
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
    )
