"""Stages that are built from a checkpoint go on bit for bit, however the model is cut."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from decod.errors import CheckpointError
from decod.ids import MicrobatchId
from decod.model.hf import config_to_hf
from decod.model.shape import model_shapes
from decod.model.stage import initial_weight
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig, OptimizerName
from decod.train.checkpoint.description import description_text, entry_json
from decod.train.checkpoint.entries import (
    TensorEntry,
    moment_prefixes,
    state_tensors,
    weight_tensors,
)
from decod.train.checkpoint.initial_state import from_checkpoint, from_folder
from decod.train.checkpoint.iteration_folders import StageBlob
from decod.train.checkpoint.store import CheckpointStore, find_problems, read_checkpoint
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from decod.train.start import CheckpointSource
from tests.support.checkpoints import make_manifest

MOMENTS = moment_prefixes(OptimizerName.ADAMW)


torch.set_num_threads(1)

ITERATION = 2


def config(dtype: ModelDtype = ModelDtype.FLOAT32, num_relay_stages: int = 2) -> ExecutorConfig:
    return ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(
                dtype=dtype,
                vocab_size=19,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
            ),
            stages=StagesConfig(num_relay_stages=num_relay_stages),
            batch=BatchConfig(sequence_length=8, microbatch_size=2),
            optimizer=OptimizerConfig(lr=1e-2, warmup_iterations=5),
            seed=3,
        ),
    )


def train(relay: StageExecutor, iteration: int) -> str:
    generator = torch.Generator().manual_seed(iteration)
    mb = MicrobatchId(iteration, 0, 0)
    relay.passes.forward(mb, torch.randn(2, 8, 16, generator=generator).to(relay.config.dtype))
    relay.passes.backward(mb, torch.randn(2, 8, 16, generator=generator).to(relay.config.dtype))
    digest = relay.propose(iteration, [], weights_total=1)
    relay.commit(iteration)
    return digest


def build(
    source: CheckpointSource | None, stage_index: int, config: ExecutorConfig
) -> StageExecutor:
    stage = StageExecutor(config, checkpoint=source)
    stage.build(stage_index)
    return stage


def entries_of(stage: StageExecutor) -> list[TensorEntry]:
    snapshot = stage.snapshot(with_optimizer=True)
    return snapshot.write(torch.zeros(snapshot.num_bytes, dtype=torch.uint8))[0]


def write(folder: Path, stages: list[StageExecutor], *, with_optimizer: bool) -> CheckpointSource:
    blobs = []
    for stage in stages:
        snapshot = stage.snapshot(with_optimizer=with_optimizer)
        blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
        entries, _ = snapshot.write(blob)
        blobs.append(StageBlob(tuple(entries), memoryview(blob.numpy())))
    place = CheckpointStore(folder).write(make_manifest(ITERATION), blobs)
    manifest = read_checkpoint(place).manifest
    assert manifest is not None
    return CheckpointSource(place, manifest.sha256)


@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_training_goes_on_bit_for_bit(tmp_path: Path, dtype: ModelDtype) -> None:
    """Weights, moments, masters and the iteration, on which the learning rate depends."""
    before = [build(None, index, config(dtype)) for index in range(3)]
    for iteration in range(1, ITERATION + 1):
        for relay in before[1:]:
            train(relay, iteration)
    source = write(tmp_path, before, with_optimizer=True)
    for index in (1, 2):
        after = build(source, index, config(dtype))
        assert after.anchor == ITERATION
        for iteration in range(ITERATION + 1, ITERATION + 4):
            assert train(after, iteration) == train(before[index], iteration)


def test_the_model_may_be_cut_in_another_way(tmp_path: Path) -> None:
    before = [build(None, index, config()) for index in range(3)]
    for relay in before[1:]:
        train(relay, 1)
    after = build(write(tmp_path, before, with_optimizer=True), 1, config(num_relay_stages=1))
    expected = before[1].weights() | before[2].weights()
    assert after.weights().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in after.weights().items())


def altered(source: CheckpointSource) -> CheckpointSource:
    path = source.folder / "stage-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return source


def truncated(source: CheckpointSource) -> CheckpointSource:
    path = source.folder / "stage-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return source


def gone(source: CheckpointSource) -> CheckpointSource:
    shutil.rmtree(source.folder)
    return source


def another(source: CheckpointSource) -> CheckpointSource:
    return replace(source, sha256="0" * 64)


@pytest.mark.parametrize("damage", [altered, truncated, gone, another])
def test_what_changed_since_the_run_began_is_refused(tmp_path: Path, damage: object) -> None:
    """Candidates are served for as long as the run lasts, and so is the checkpoint read."""
    stages = [build(None, index, config()) for index in range(3)]
    source = damage(write(tmp_path, stages, with_optimizer=True))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="E-CKP-0"):
        build(source, 1, config())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    stages = [build(None, index, config()) for index in range(3)]
    source = write(tmp_path, stages, with_optimizer=True)
    run = config().run
    wider = replace(config(), run=replace(run, model=replace(run.model, intermediate_size=32)))
    with pytest.raises(CheckpointError, match="E-CKP-002"):
        build(source, 1, wider)


def test_weights_without_moments_are_not_enough(tmp_path: Path) -> None:
    stages = [build(None, index, config()) for index in range(3)]
    source = write(tmp_path, stages, with_optimizer=False)
    with pytest.raises(CheckpointError, match=r"E-CKP-010 .* no moments"):
        build(source, 1, config())


@pytest.mark.parametrize("dtype", list(ModelDtype))
@pytest.mark.parametrize("num_relay_stages", [1, 2])
def test_candidates_are_given_what_the_stage_would_hold(
    tmp_path: Path, dtype: ModelDtype, num_relay_stages: int
) -> None:
    """Byte for byte, though nobody builds the stage to give it, however the model was cut."""
    before = [build(None, index, config(dtype)) for index in range(3)]
    for relay in before[1:]:
        train(relay, 1)
    source = write(tmp_path, before, with_optimizer=True)
    now = config(dtype, num_relay_stages=num_relay_stages)
    snapshot = build(source, 1, now).snapshot(with_optimizer=True)
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    entries, chunks = snapshot.write(blob)
    tensors = state_tensors(now.run, 1)
    given = from_checkpoint(read_checkpoint(source.folder), tensors)
    told = description_text([entry_json(entry) for entry in entries], "".join(chunks))
    assert given.description.text == told
    for chunk in given.description.chunks:
        end = chunk.offset + chunk.num_bytes
        assert given.read(chunk.offset) == bytes(blob[chunk.offset : end].numpy())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_weights_of_a_folder_are_given_as_a_stage_would_round_them(
    tmp_path: Path, dtype: ModelDtype, stored: torch.dtype
) -> None:
    now = config(dtype)
    weights = {
        name: initial_weight(now.run.model, seed=1, name=name, shape=shape).to(stored)
        for name, shape in model_shapes(now.run.model).items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(now.run.model)))
    stage = StageExecutor(now, init_dir=tmp_path)
    stage.build(1)
    snapshot = stage.snapshot(with_optimizer=False)
    blob = torch.zeros(snapshot.num_bytes, dtype=torch.uint8)
    entries, _ = snapshot.write(blob)
    given = from_folder(tmp_path, now.run.model, weight_tensors(now.run, 1))
    assert given.description.entries == tuple(entries)


@pytest.mark.parametrize("damage", [altered, truncated, gone])
def test_what_was_altered_is_not_given(tmp_path: Path, damage: object) -> None:
    stages = [build(None, index, config()) for index in range(3)]
    source = write(tmp_path, stages, with_optimizer=True)
    checkpoint = read_checkpoint(source.folder)
    tensors = state_tensors(config().run, 1)
    given = from_checkpoint(checkpoint, tensors)
    damage(source)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"E-CKP-010 .*first state"):
        from_checkpoint(checkpoint, tensors)
    with pytest.raises(CheckpointError, match=r"E-CKP-010 .*first state"):
        given.read(given.description.chunks[-1].offset)


@pytest.mark.parametrize("num_relay_stages", [1, 2])
def test_a_checked_checkpoint_is_described_without_being_read_again(
    tmp_path: Path, num_relay_stages: int
) -> None:
    stages = [build(None, index, config()) for index in range(3)]
    source = write(tmp_path, stages, with_optimizer=True)
    checkpoint, chunks = read_checkpoint(source.folder), dict[str, Sequence[str]]()
    assert find_problems(checkpoint, chunks) == []
    now = config(num_relay_stages=num_relay_stages)
    tensors = state_tensors(now.run, 1)
    text = from_checkpoint(checkpoint, tensors).description.text
    altered(source)
    given = from_checkpoint(checkpoint, tensors, chunks)
    assert given.description.text == text
    places = {chunk.offset for chunk in given.description.chunks}
    refused = set()
    for offset in places:
        try:
            given.read(offset)
        except CheckpointError:
            refused.add(offset)
    assert len(refused) == 1, "each chunk is compared before it is given"
