"""An adapter that stages train together is the one that PEFT trains in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decod.model.shape import frozen_shapes, model_shapes, trained_shapes
from decod.model.stage import initial_weight
from decod.run.adapter_config import AdapterConfig, AdapterKind, BaseFormat
from decod.run.model_config import Architecture, ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.train.checkpoint.base import BaseSource, base_hashes
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.layout import byte_view
from tests.support.architectures import small_model
from tests.support.model_folders import write_folder
from tests.support.peft_reference import PeftReference
from tests.unit.train.test_executor_equals_reference import (
    BATCH,
    MODELS,
    OPTIMIZER,
    HashedTokens,
    microbatches,
    run_iteration,
    weights_of,
)

torch.set_num_threads(1)

LORA = AdapterConfig(kind=AdapterKind.LORA, rank=3, alpha=6.0)


def folder_of(path: Path, model: ModelConfig, seed: int = 9) -> Path:
    """Write a model, and return its folder."""
    shapes = model_shapes(model)
    weights = {n: initial_weight(model, seed=seed, name=n, shape=s) for n, s in shapes.items()}
    # Norms and biases of a model that has been trained are not 1 and 0.
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape, generator=generator) / 10)
    write_folder(path, model, weights)
    return path


def run_of(model: ModelConfig, adapter: AdapterConfig = LORA, **changes: Any) -> RunConfig:
    stages = StagesConfig(num_relay_stages=2)
    run = RunConfig(
        model=model, adapter=adapter, stages=stages, batch=BATCH, optimizer=OPTIMIZER, seed=5
    )
    return replace(run, **changes)


def pipeline_of(run: RunConfig, folder: Path, **options: Any) -> list[StageExecutor]:
    base = BaseSource(base_hashes(folder, run.model), folder / "cache", folder)
    executors = []
    for index in range(run.stages.num_relay_stages + 1):
        tokens = HashedTokens() if index == 0 else None
        config = ExecutorConfig(run=run, base=base, **options)
        executor = StageExecutor(config, tokens=tokens)
        executor.build(index)
        executors.append(executor)
    return executors


def batches(num_iterations: int) -> list[list[Any]]:
    source = HashedTokens()
    return [
        [source.microbatch(mb, BATCH, 5) for mb in microbatches(iteration)]
        for iteration in range(1, num_iterations + 1)
    ]


@pytest.mark.parametrize(
    "adapter",
    [LORA, replace(LORA, targets="q_proj, down_proj"), replace(LORA, rank=1, alpha=0.5)],
    ids=["all", "some", "thin"],
)
@pytest.mark.parametrize("kind", ["llama tied, grouped", "qwen2", "qwen3", "gpt2"])
def test_an_adapter_is_that_of_peft(tmp_path: Path, kind: str, adapter: AdapterConfig) -> None:
    model = MODELS[kind]
    if model.model_type is Architecture.GPT2 and adapter.targets != "all-linear":
        adapter = replace(adapter, targets="c_attn, c_fc")
    # Stage 0 has a block of its own in some, and nothing to train in others.
    stages = StagesConfig(num_relay_stages=2, num_first_blocks=int(adapter.rank == 1))
    folder = folder_of(tmp_path, model)
    pipeline = pipeline_of(run_of(model, adapter, stages=stages), folder)
    theirs = PeftReference(folder, adapter, weights_of(pipeline))
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    assert losses == pytest.approx(theirs.train(OPTIMIZER, batches(5)), rel=1e-12)
    for name, weight in weights_of(pipeline).items():
        torch.testing.assert_close(weight, theirs.weights[name], rtol=0, atol=1e-12)
        assert weight.any(), "everything has been trained"


def test_an_adapter_beside_a_model_of_transformers_is_that_of_peft(tmp_path: Path) -> None:
    """The norms of transformers are never wider than float32."""
    model = small_model("gemma2", ModelDtype.FLOAT64)
    folder = folder_of(tmp_path, model)
    pipeline = pipeline_of(run_of(model), folder)
    theirs = PeftReference(folder, LORA, weights_of(pipeline))
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    assert losses == pytest.approx(theirs.train(OPTIMIZER, batches(5)), rel=1e-6)
    for name, weight in weights_of(pipeline).items():
        torch.testing.assert_close(weight, theirs.weights[name], rtol=0, atol=1e-5)


def test_passes_that_are_computed_again_are_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MODELS["llama"])
    kept, again = (
        pipeline_of(run_of(MODELS["llama"]), folder, recompute=each) for each in (False, True)
    )
    for iteration in (1, 2):
        assert run_iteration(kept, iteration) == run_iteration(again, iteration)
    for name, weight in weights_of(kept).items():
        torch.testing.assert_close(weights_of(again)[name], weight, rtol=0, atol=0)


def test_only_what_is_trained_is_in_a_stages_state(tmp_path: Path) -> None:
    model = MODELS["llama"]
    run = run_of(model)
    pipeline = pipeline_of(run, folder_of(tmp_path, model))
    assert pipeline[0].weights() == {}
    for index, executor in enumerate(pipeline):
        names = [place.name for place in executor.snapshot(with_optimizer=True).places]
        assert all("lora" in name for name in names)
        assert {*frozen_shapes(run, index)}.isdisjoint(trained_shapes(run, index))


@pytest.mark.parametrize(
    ("base", "error_max"),
    [(BaseFormat.BFLOAT16, 2e-3), (BaseFormat.INT8, 1e-2), (BaseFormat.NF4, 6e-2)],
)
def test_a_narrow_base_computes_nearly_the_same(
    tmp_path: Path, base: BaseFormat, error_max: float
) -> None:
    model = replace(MODELS["llama"], dtype=ModelDtype.FLOAT32)
    folder = folder_of(tmp_path, model)
    wide = pipeline_of(run_of(model), folder)
    narrow = pipeline_of(run_of(model, replace(LORA, base=base)), folder)
    for iteration in (1, 2, 3):
        expected = run_iteration(wide, iteration)
        loss = run_iteration(narrow, iteration)
        assert loss == pytest.approx(expected, rel=error_max)
        assert loss != expected, "something was made narrow"


def test_the_adapter_of_a_lost_stage_begins_anew(tmp_path: Path) -> None:
    run = run_of(MODELS["llama"])
    folder = folder_of(tmp_path, run.model)
    pipeline = pipeline_of(run, folder)
    first = {name: weight.clone() for name, weight in pipeline[2].weights().items()}
    for iteration in (1, 2):
        run_iteration(pipeline, iteration)
    snapshot = pipeline[1].snapshot(with_optimizer=True)
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    entries, _ = snapshot.write(blob)
    pipeline[2].mix([(1, byte_view(blob), entries)], 2)
    for name, weight in pipeline[2].weights().items():
        assert torch.equal(weight, first[name])
    assert run_iteration(pipeline, 3) > 0
