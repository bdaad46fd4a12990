"""What a stage needs is computed before anything is built, and agrees with what torch takes."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from decod.config.needs import stage_needs
from decod.config.schema import RunConfig, plans_of
from decod.data.params import BatchConfig
from decod.model.config import Architecture, ModelConfig, ModelDtype
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.measure import measure
from decod.train.params import SyncConfig, SyncMethod


def make_run(architecture: Architecture, dtype: ModelDtype, **changes: Any) -> RunConfig:
    gpt2 = architecture is Architecture.GPT2
    model = ModelConfig(
        model_type=architecture,
        dtype=dtype,
        hidden_size=64,
        intermediate_size=96,
        num_key_value_heads=4 if gpt2 else 2,
        tie_word_embeddings=gpt2,
    )
    batch = BatchConfig(sequence_length=32, microbatch_size=2)
    return RunConfig(model=model, batch=batch, **changes)


def built(run: RunConfig, stage: int) -> StageExecutor:
    sections = ("model", "stages", "batch", "optimizer", "reduction", "activations", "sync")
    executor = StageExecutor(
        ExecutorConfig(seed=0, **{section: getattr(run, section) for section in sections})
    )
    executor.build(stage)
    return executor


def num_bytes(value: object) -> int:
    """Returns the size of all tensors in an object and its fields."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    fields = getattr(value, "__slots__", ())
    return sum(num_bytes(getattr(value, name)) for name in fields)


@pytest.mark.parametrize(
    ("architecture", "dtype", "stage"), [*itertools.product(Architecture, ModelDtype, (0, 1))]
)
def test_the_estimate_is_what_torch_allocates(
    architecture: Architecture, dtype: ModelDtype, stage: int
) -> None:
    run = make_run(architecture, dtype)
    needs, executor = stage_needs(run, stage), built(run, stage)
    # Each storage that autograd saves counts once, without the weights. Llama's tables of angles
    # are there once for all microbatches, and are not in the estimate.
    held = measure(executor, 1).microbatch_memory_bytes
    assert needs.microbatch_bytes == pytest.approx(held, rel=0.1)
    executor.config = replace(executor.config, recompute=True)
    executor.build(stage)
    again = measure(executor, 1)
    assert needs.input_bytes == again.microbatch_memory_bytes
    assert needs.microbatch_bytes == pytest.approx(again.recomputed_bytes, rel=0.1)
    state = executor._built.state
    taken = num_bytes(state.committed) + num_bytes(state.buffers_for(1))
    taken += num_bytes(executor._built.gradient.sum_P)
    narrow = 2 if dtype is ModelDtype.BFLOAT16 else 0
    assert needs.device_bytes == taken + narrow * needs.num_parameters


@pytest.mark.parametrize("dtype", ModelDtype)
def test_a_state_has_the_size_of_its_snapshot(dtype: ModelDtype) -> None:
    run = make_run(Architecture.LLAMA, dtype)
    for changed in (
        run,
        make_run(Architecture.LLAMA, dtype, sync=SyncConfig(method=SyncMethod.DILOCO, every=20)),
    ):
        layout = built(changed, 1).snapshot(with_optimizer=True)
        held = sum(entry.num_bytes for entry in layout.places)
        assert stage_needs(changed, 1).state_bytes == held


def test_parameters_are_those_whose_averages_travel() -> None:
    run = make_run(Architecture.LLAMA, ModelDtype.FLOAT32)
    for stage, plans in plans_of(run).items():
        assert stage_needs(run, stage).num_parameters == plans.fragments[0].num_elements


def test_whether_it_fits_counts_all_microbatches() -> None:
    needs = stage_needs(make_run(Architecture.LLAMA, ModelDtype.FLOAT32), 1)
    room = needs.device_bytes + 3 * needs.microbatch_bytes
    assert needs.fits(room, 3)
    assert not needs.fits(room, 4)
    assert not needs.fits(needs.device_bytes - 1, 0)


def test_with_recomputation_one_microbatch_is_whole_and_the_others_are_inputs() -> None:
    needs = stage_needs(make_run(Architecture.LLAMA, ModelDtype.FLOAT32), 1)
    assert needs.held_bytes(1, recompute=True) == needs.held_bytes(1) == needs.microbatch_bytes
    room = needs.device_bytes + needs.microbatch_bytes + 2 * needs.input_bytes
    assert needs.fits(room, 3, recompute=True)
    assert not needs.fits(room, 4, recompute=True)
    assert not needs.fits(room, 3)
