"""Small runs for tests, and the same training in one process."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.ids import MicrobatchId
from decod.model.stage import FirstStage
from decod.run.model_config import Architecture, ModelConfig, ModelDtype
from decod.run.protocol_config import NO_AUDITS, ProtocolConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import ActivationCompression, BatchConfig, OptimizerConfig
from tests.support.coded import cut
from tests.support.reference import train_reference

Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}

MODELS = {
    "llama": ModelConfig(**SIZES, num_key_value_heads=2, attention_bias=True),
    "gpt2": ModelConfig(**SIZES, model_type=Architecture.GPT2, tie_word_embeddings=True),
}

# Detection must be quick, because tests wait for it. But a busy machine must not look dead.
PROTOCOL = ProtocolConfig(
    heartbeat_interval_s=0.5,
    heartbeat_timeout_s=4.0,
    admission_interval_s=0.2,
    utilisation_interval_s=0.5,
    min_nodes_per_stage=2,
)


def make_run(
    model: str = "llama",
    dtype: ModelDtype = ModelDtype.FLOAT64,
    *,
    num_iterations: int = 0,
    num_data_nodes: int = 1,
    min_nodes_per_stage: int = 2,
) -> RunConfig:
    """Return a run of 8 microbatches per iteration over two relay stages. 0 iterations: no end."""
    return RunConfig(
        name="test",
        seed=7,
        num_iterations=num_iterations,
        model=replace(MODELS[model], dtype=dtype),
        stages=StagesConfig(num_relay_stages=2),
        batch=BatchConfig(
            sequence_length=32,
            microbatch_size=2,
            num_microbatches=8,
            num_data_nodes=num_data_nodes,
        ),
        optimizer=OptimizerConfig(lr=3e-3, warmup_iterations=3),
        protocol=replace(
            PROTOCOL, min_nodes_per_stage=min_nodes_per_stage, min_data_nodes=num_data_nodes
        ),
        audits=NO_AUDITS,
    )


def prepare_corpus(folder: Path) -> Path:
    """Return a folder of token shards, from text that a tiny model can learn something from."""
    generator = np.random.default_rng(3)
    words = ["alpha", "beta", "gamma", "delta", "run", "stage", "flow", "node", "of", "the"]
    text = " ".join(words[index] for index in generator.integers(0, len(words), 30_000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    corpus = folder / "corpus"
    prepare(corpus, [folder / "text.txt"], PrepareConfig(shard_tokens=50_000))
    return corpus


def microbatches(run: RunConfig, corpus: Path, iteration: int) -> list[Tokens]:
    """Return the microbatches of all data nodes in an iteration."""
    batch = run.batch
    with Dataset.open(corpus) as dataset:
        return [
            dataset.microbatch(MicrobatchId(iteration, data_node, index), batch, run.seed)
            for data_node in range(batch.num_data_nodes)
            for index in range(batch.num_microbatches)
        ]


@cache
def reference(
    run: RunConfig, corpus: Path, num_iterations: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final weights of the same training in one process.

    It rounds activations at the same cuts as the run.
    """
    torch.set_num_threads(1)
    tokens = (microbatches(run, corpus, index + 1) for index in range(num_iterations))

    def change(module: FirstStage) -> None:
        if run.activations.compression is not ActivationCompression.NONE:
            cut(module, run.stages, run.activations.compression)

    return train_reference(
        run.model, run.optimizer, run.seed, tokens, delay=run.delay, change=change
    )


def loss_error(found: dict[int, float], expected: list[float]) -> float:
    """Return the largest relative error of any iteration's loss. `found` must have no gap."""
    assert sorted(found) == list(range(1, len(expected) + 1)), sorted(found)
    losses = np.array([found[iteration] for iteration in sorted(found)])
    return float(np.abs(losses / np.array(expected) - 1).max())


def weight_error(folder: Path, expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all weights, over the weights' norm."""
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    dtypes = {tensor.dtype for tensor in found.values()}
    assert dtypes == {tensor.dtype for tensor in expected.values()}, dtypes
    difference = sum(
        float((found[name].double() - expected[name].double()).square().sum()) for name in found
    )
    norm = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return float((difference / norm) ** 0.5)


def exported_dtype(folder: Path) -> str:
    """Return the dtype of an exported model, by its own description."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype"))
