"""Passes that are computed again give the same numbers, bit for bit, and keep only their input."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from decod.run.model_config import FAMILIES, Architecture, ModelConfig, ModelDtype
from decod.run.training_config import ActivationCompression, ActivationsConfig, BatchConfig
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.measure import measure
from tests.support.devices import on_devices
from tests.unit.train.test_executor_equals_reference import (
    MODELS,
    assert_equals_reference,
    make_pipeline,
    microbatches,
    reference,
    run_iteration,
    weights_of,
)

torch.set_num_threads(1)

FLOAT32 = ModelDtype.FLOAT32
INT8 = ActivationsConfig(compression=ActivationCompression.INT8)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch refuses kernels whose results may differ from one call to the next."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def recomputing(model: ModelConfig, **options: Any) -> list[StageExecutor]:
    pipeline = make_pipeline(model, **options)
    for index, executor in enumerate(pipeline):
        executor.config = replace(executor.config, recompute=True)
        executor.build(index)
    return pipeline


def passes_of(pipeline: list[StageExecutor]) -> list[torch.Tensor]:
    """Return all that an iteration's passes leave and send. All are forward before any is back."""
    made: list[torch.Tensor] = []
    ends: list[tuple[torch.Tensor, float]] = []
    for mb in microbatches(1):
        hidden = pipeline[0].passes.embed(mb)
        for relay in pipeline[1:]:
            made.append(hidden.clone())
            hidden = relay.passes.forward(mb, hidden)
        ends.append(pipeline[0].passes.head(mb, hidden))
    for mb, (last, loss) in zip(microbatches(1), ends, strict=True):
        gradient = last
        for relay in reversed(pipeline[1:]):
            made.append(gradient.clone())
            gradient = relay.passes.backward(mb, gradient)
        pipeline[0].passes.embed_backward(mb, gradient)
        made += [gradient, torch.tensor(loss)]
    return [*made, *(executor._built.gradient.whole().clone() for executor in pipeline)]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "coding"), [*((dtype, ActivationsConfig()) for dtype in ModelDtype), (FLOAT32, INT8)]
)
def test_passes_are_the_same_bit_for_bit(
    name: str, dtype: ModelDtype, coding: ActivationsConfig
) -> None:
    model = replace(MODELS[name], dtype=dtype)
    kept = passes_of(make_pipeline(model, activations=coding))
    again = passes_of(recomputing(model, activations=coding))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_stages_that_recompute_train_as_one_plain_process_does(name: str, device: str) -> None:
    pipeline = recomputing(MODELS[name], device=device)
    losses = [run_iteration(pipeline, iteration) for iteration in range(1, 6)]
    assert_equals_reference(pipeline, losses, reference(MODELS[name], 5))


def test_weights_after_some_iterations_are_the_same_bit_for_bit() -> None:
    pipelines = make_pipeline(MODELS["llama"]), recomputing(MODELS["llama"])
    for iteration in range(1, 4):
        kept, again = (run_iteration(pipeline, iteration) for pipeline in pipelines)
        assert kept == again
    for name, weights in weights_of(pipelines[0]).items():
        assert torch.equal(weights, weights_of(pipelines[1])[name])


def test_a_microbatch_that_is_sent_twice_counts_once() -> None:
    relay, mb = recomputing(MODELS["llama"])[1], microbatches(1)[0]
    entry = torch.linspace(-1, 1, relay.config.activation_shape.numel()).double()
    entry = entry.view(relay.config.activation_shape)
    results, sums = [], []
    for _ in range(2):
        relay.passes.forward(mb, entry)
        results.append(relay.passes.backward(mb, entry).clone())
        sums.append(relay._built.gradient.whole().clone())
    assert torch.equal(*results)
    assert torch.equal(*sums)
    assert sums[0].any()


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("stage", [0, 1])
def test_only_the_input_is_kept(architecture: Architecture, stage: int) -> None:
    model = MODELS["gpt2" if architecture is Architecture.GPT2 else "llama"]
    executor = recomputing(model)[stage]
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    mb = microbatches(1)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if stage:
            executor.passes.forward(mb, torch.ones(executor.config.activation_shape).double())
        else:
            executor.passes.embed(mb)
    assert kept == []
    held = executor.passes._held[mb]
    assert held.output is None
    assert (held.entry is None) == (stage == 0)


def test_the_cost_of_recomputation_is_measured() -> None:
    """The planner weighs hosts by it, and the capacity follows from it."""
    model = ModelConfig(hidden_size=64, intermediate_size=192, num_hidden_layers=4)
    batch = BatchConfig(sequence_length=32, microbatch_size=4)
    defaults = make_pipeline(MODELS["llama"])[0].config
    config: ExecutorConfig = replace(defaults, run=replace(defaults.run, model=model, batch=batch))
    found = {}
    for recompute in (False, True):
        executor = StageExecutor(replace(config, recompute=recompute))
        executor.build(1)
        found[recompute] = measure(executor, 1)
    assert found[True].microbatch_memory_bytes == 4 * config.activation_shape.numel()
    assert found[True].recomputed_bytes == found[False].microbatch_memory_bytes
    assert found[False].recomputed_bytes == 0
