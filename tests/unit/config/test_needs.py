"""What a stage needs is computed before anything is built, and agrees with what torch takes."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from decod.config.needs import stage_needs
from decod.config.presets import MODEL_PRESETS
from decod.config.schema import plans_of
from decod.model.shape import trained_shapes
from decod.model.stage import TORCH_DTYPES, FirstStage, empty_stage
from decod.run.model_config import FAMILIES, Architecture, ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig, stage_blocks
from decod.run.training_config import (
    BatchConfig,
    Documents,
    OptimizerConfig,
    OptimizerName,
    SyncConfig,
    SyncMethod,
)
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.measure import held_bytes, measure
from tests.support.allocations import allocations_of


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
    executor = StageExecutor(ExecutorConfig(run=run))
    executor.build(stage)
    return executor


def num_bytes(value: object) -> int:
    """Returns the size of all tensors in an object and its fields."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(map(num_bytes, value))
    fields = getattr(value, "__slots__", ())
    return sum(num_bytes(getattr(value, name)) for name in fields)


def repeated_bytes(run: RunConfig, stage: int) -> int:
    """Returns what CPUs keep beyond the estimate: keys and values for every query head."""
    model, num_blocks = run.model, len(stage_blocks(run.model, run.stages)[stage])
    numbers = 2 * num_blocks * (model.query_width - model.key_width)
    return numbers * run.batch.tokens_per_microbatch * model.dtype.num_bytes


@pytest.mark.parametrize(
    ("architecture", "dtype", "stage"), [*itertools.product(FAMILIES, ModelDtype, (0, 1))]
)
@pytest.mark.parametrize("name", [OptimizerName.ADAMW, OptimizerName.SGD])
def test_the_estimate_is_what_torch_allocates(
    architecture: Architecture, dtype: ModelDtype, stage: int, name: OptimizerName
) -> None:
    run = make_run(architecture, dtype, optimizer=OptimizerConfig(name=name))
    needs, executor = stage_needs(run, stage), built(run, stage)
    # Each storage that autograd saves counts once, without the weights. Llama's tables of angles
    # are there once for all microbatches, and are not in the estimate.
    held = measure(executor, 1).microbatch_memory_bytes
    expected = pytest.approx(needs.microbatch_bytes + repeated_bytes(run, stage), rel=0.1)
    assert held == expected
    executor.config = replace(executor.config, recompute=True)
    executor.build(stage)
    again = measure(executor, 1)
    assert needs.input_bytes == again.microbatch_memory_bytes
    assert again.recomputed_bytes == expected
    state = executor._built.state
    taken = num_bytes(state.committed) + num_bytes(state.buffers_for(1))
    taken += num_bytes(executor._built.gradient.sum_P)
    narrow = 2 if dtype is ModelDtype.BFLOAT16 else 0
    assert needs.device_bytes - needs.loss_bytes == taken + narrow * needs.num_parameters
    assert (needs.host_bytes, stage_needs(run, stage, 2, sharded=True).host_bytes) == (0, taken)


@pytest.mark.parametrize("stage", [0, 1])
def test_muon_keeps_one_moment_of_hidden_matrices(stage: int) -> None:
    """Its state and the next one are as large as the estimate says that they are."""
    plain = replace(
        make_run(Architecture.LLAMA, ModelDtype.FLOAT32),
        sync=SyncConfig(method=SyncMethod.DILOCO),
    )
    run = replace(plain, optimizer=OptimizerConfig(name=OptimizerName.MUON))
    saved = stage_needs(plain, stage).optimizer_bytes - stage_needs(run, stage).optimizer_bytes
    taken = [
        num_bytes(each._built.state.committed.inner)
        + num_bytes(each._built.state.buffers_for(1).inner)
        for each in (built(plain, stage), built(run, stage))
    ]
    assert saved == taken[0] - taken[1]
    hidden = sum(
        math.prod(shape)
        for name, shape in trained_shapes(run, stage).items()
        if name.startswith("model.layers.") and len(shape) == 2
    )
    assert saved == 2 * 4 * hidden


@pytest.mark.parametrize("architecture", FAMILIES)
def test_documents_apart_need_one_mask_for_all_blocks(architecture: Architecture) -> None:
    together = make_run(architecture, ModelDtype.FLOAT32)
    apart = replace(together, batch=replace(together.batch, documents=Documents.APART))
    mask_bytes = 2 * 32 * 32 * 4
    added = stage_needs(apart, 1).microbatch_bytes - stage_needs(together, 1).microbatch_bytes
    assert added == mask_bytes
    held = [measure(built(run, 1), 1).microbatch_memory_bytes for run in (together, apart)]
    # Llama also has tables of angles for both sequences, instead of one for all.
    angles_bytes = 0 if architecture is Architecture.GPT2 else (2 - 1) * 2 * 32 * 16 * 4
    assert held[1] - held[0] == mask_bytes + angles_bytes


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


@pytest.mark.parametrize("stage", [0, 1])
def test_devices_divide_microbatches_and_not_the_stage(stage: int) -> None:
    run = make_run(Architecture.LLAMA, ModelDtype.FLOAT32)
    one, two, three = (stage_needs(run, stage, num_devices) for num_devices in (1, 2, 3))
    assert one.microbatch_bytes == 2 * two.microbatch_bytes
    assert one.loss_bytes >= two.loss_bytes
    assert one.weights_bytes + one.optimizer_bytes == two.weights_bytes + two.optimizer_bytes
    assert three == two, "a device has one sequence at least"


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_what_a_block_keeps_is_right_for_real_shapes(name: str) -> None:
    """With one block, and fewer tokens. Widths and heads are those of the model."""
    model = replace(MODEL_PRESETS[name].model, num_hidden_layers=1, vocab_size=257)
    batch = BatchConfig(sequence_length=64, microbatch_size=2)
    run = RunConfig(model=model, batch=batch, stages=StagesConfig(num_relay_stages=1))
    stage = empty_stage(model, run.stages, 1)
    dtype = TORCH_DTYPES[model.dtype]
    stage.place(
        {k: torch.zeros(v.shape, dtype=dtype) for k, v in stage.parameters_by_name().items()}
    )
    hidden = torch.zeros(2, 64, model.hidden_size, dtype=dtype)
    held = held_bytes(lambda: stage(hidden.clone().requires_grad_()), stage, hidden)
    needed = stage_needs(run, 1).microbatch_bytes
    # On a CPU, keys and values are kept once for every query head.
    repeated = repeated_bytes(run, 1)
    # CPUs keep the means of GPT-2's norms in bfloat16, and GPUs in float32.
    assert 0.999 * needed <= held <= 1.05 * (needed + repeated)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_the_loss_takes_what_is_planned_whatever_is_tied(tied: bool, dtype: ModelDtype) -> None:
    model = ModelConfig(
        vocab_size=50_000,
        hidden_size=64,
        intermediate_size=64,
        dtype=dtype,
        tie_word_embeddings=tied,
    )
    run = RunConfig(model=model, batch=BatchConfig(sequence_length=512, microbatch_size=2))
    stage = empty_stage(model, run.stages, 0)
    assert isinstance(stage, FirstStage)
    wide = TORCH_DTYPES[dtype]
    stage.place(
        {k: torch.zeros(v.shape, dtype=wide) for k, v in stage.parameters_by_name().items()}
    )
    hidden = torch.zeros(2, 512, 64, dtype=wide).requires_grad_()
    targets = torch.zeros(2, 512, dtype=torch.int64)

    def lose() -> None:
        torch.autograd.backward([stage.loss(hidden, targets)])

    needs, taken = stage_needs(run, 0), allocations_of(lose).peak
    assert needs.loss_bytes <= taken <= 1.3 * needs.loss_bytes
    tables = 1 if tied else 2
    assert needs.num_parameters == tables * 50_000 * 64 + 64


def test_relays_plan_no_loss() -> None:
    run = make_run(Architecture.LLAMA, ModelDtype.FLOAT32)
    assert stage_needs(run, 1).loss_bytes == 0
    assert stage_needs(run, 0).loss_bytes > 0


def test_with_recomputation_one_microbatch_is_whole_and_the_others_are_inputs() -> None:
    needs = stage_needs(make_run(Architecture.LLAMA, ModelDtype.FLOAT32), 1)
    assert needs.held_bytes(1, recompute=True) == needs.held_bytes(1) == needs.microbatch_bytes
    room = needs.device_bytes + needs.microbatch_bytes + 2 * needs.input_bytes
    assert needs.fits(room, 3, recompute=True)
    assert not needs.fits(room, 4, recompute=True)
    assert not needs.fits(room, 3)
