"""Rotary positions mean the same to decod and to transformers, scaled or not, however spelled."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decod.config.run_file import load_run_file, render_run_file
from decod.errors import ConfigError, DataError
from decod.ids import MicrobatchId
from decod.model.attention import rotary_tables
from decod.model.hf import config_from_hf, config_to_hf
from decod.model.weights import read_config
from decod.run.model_config import Architecture, ModelConfig, ModelDtype, RopeType
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig
from tests.support.model_folders import write_folder
from tests.support.oracle import (
    Float64Transformers,
    import_transformers,
    load_transformers,
    stage_logits,
    transformers_logits,
)
from tests.unit.train.test_executor_equals_reference import HashedTokens, run_microbatch

torch.set_num_threads(1)

LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 3.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS = {"default": {"rope_type": "default"}, "linear": LINEAR, "llama3": LLAMA3}
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# Twice as long as what `original_max_position_embeddings` says.
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 40, (2, 64)))


def save(folder: Path, scaling: Mapping[str, Any], kind: str = "Llama") -> None:
    """Has transformers write a model whose weights are large enough to matter."""
    transformers = import_transformers()
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE, rope_parameters={**scaling, "rope_theta": 50.0}, initializer_range=0.3
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("name", SCALINGS)
def test_stages_have_the_logits_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    save(tmp_path, SCALINGS[name], kind)
    expected = transformers_logits(tmp_path, TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(stage_logits(tmp_path, TOKENS), expected, rtol=0, atol=1e-4)
    with torch.no_grad():
        expected = Float64Transformers(tmp_path)(TOKENS)
    found = stage_logits(tmp_path, TOKENS, dtype=ModelDtype.FLOAT64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_have_the_bits_of_transformers(name: str, tmp_path: Path) -> None:
    save(tmp_path, SCALINGS[name])
    theirs = load_transformers(tmp_path).model.rotary_emb
    expected = theirs(torch.zeros(1), torch.arange(64)[None])
    cos, sin = rotary_tables(read_config(tmp_path), 64, dtype=torch.float32, device="cpu")
    assert torch.equal(cos[:, 0], expected[0][0])
    # decod turns the sign of the first half in the table, transformers in what it is applied to.
    assert torch.equal(sin[:, 0].abs(), expected[1][0].abs())


def test_llama3_leaves_fast_angles_and_slows_slow_ones_down() -> None:
    """Else the test above would compare one formula with itself."""
    tables = [
        rotary_tables(config_from_hf(fields(rope_scaling=s)), 2, dtype=torch.float64, device="cpu")
        for s in (None, LLAMA3)
    ]
    plain, scaled = (cos[1, 0, :8].acos() for cos, _ in tables)
    ratios = [round(ratio, 6) for ratio in (plain / scaled).tolist()]
    assert ratios == sorted(ratios)
    assert (ratios.count(1.0), ratios.count(8.0)) == (1, 4)


def fields(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 4 writes it."""
    common = {"model_type": "llama", "rope_theta": 50.0, "rms_norm_eps": 1e-6}
    return {**SHAPE, **common, **changes}


SPELLINGS: dict[str, dict[str, Any]] = {
    "beside": {"rope_scaling": LLAMA3},
    "old name": {"rope_scaling": {"type": "llama3", **LLAMA3}},
    "inside": {"rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 50.0}},
    "beside the new": {"rope_parameters": LLAMA3},
    "nothing scaled": {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 1.0}},
    "both": {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 50.0}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_understood_as_transformers_does(spelling: str, tmp_path: Path) -> None:
    values = fields(**SPELLINGS[spelling])
    model = config_from_hf(values)
    assert model.rope_theta == 50.0
    assert model.rope_type is RopeType.LLAMA3
    assert model.rope_original_max_position_embeddings == 32
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = import_transformers().AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["rope_theta"] == model.rope_theta
    assert {name: theirs[name] for name in LLAMA3} == LLAMA3


def test_the_base_is_read_inside_and_beside() -> None:
    assert config_from_hf(fields(rope_theta=7.0)).rope_theta == 7.0
    inside = {"rope_type": "default", "rope_theta": 7.0}
    assert config_from_hf(fields(rope_theta=None, rope_parameters=inside)).rope_theta == 7.0
    nowhere = {k: v for k, v in fields().items() if k != "rope_theta"}
    assert config_from_hf(nowhere | {"rope_parameters": LINEAR}).rope_theta == 10000.0


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is dynamic"),
        ({"rope_type": "su"}, "rope_type is su"),
        ({"rope_type": ["linear"]}, "rope_type is"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "rope_type is linear"),
        ({**LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**LINEAR, "attention_factor": 1.5}, "attention_factor is 1.5"),
        ({**LINEAR, "low_freq_factor": 1.0}, "low_freq_factor is 1.0"),
        ({"rope_type": "linear"}, "factor is None"),
        ({**LINEAR, "factor": "3"}, "factor is 3"),
        ({**LINEAR, "factor": 0.5}, "rope_factor is 0.5"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "rope_high_freq_factor is 1.0"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is None"),
        ({**LLAMA3, "original_max_position_embeddings": 16.5}, "embeddings is 16.5"),
        ({**LLAMA3, "original_max_position_embeddings": None}, "embeddings is None"),
        ({**LINEAR, "rope_theta": 51.0}, "rope_theta is 51.0"),
        ({"full_attention": LINEAR}, "full_attention is"),
        (3, "is 3"),
    ],
)
def test_other_scaling_is_refused_by_name(where: str, value: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        config_from_hf(fields(**{where: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="E-DAT-011"):
        config_from_hf(fields(**changes))


@pytest.mark.parametrize("name", SCALINGS)
def test_an_export_is_read_by_transformers_and_by_decod(name: str, tmp_path: Path) -> None:
    save(tmp_path / "theirs", SCALINGS[name])
    model = read_config(tmp_path / "theirs")
    weights = load_transformers(tmp_path / "theirs").state_dict()
    write_folder(tmp_path / "ours", model, weights)
    assert read_config(tmp_path / "ours") == model
    expected = transformers_logits(tmp_path / "theirs", TOKENS)
    assert torch.equal(transformers_logits(tmp_path / "ours", TOKENS), expected)
    # What transformers 4 reads says the same as what 5 does.
    old = {k: v for k, v in config_to_hf(model).items() if k != "rope_parameters"}
    assert config_from_hf(old) == model


@pytest.mark.parametrize("name", SCALINGS)
def test_a_run_file_holds_the_scaling(name: str, tmp_path: Path) -> None:
    model = config_from_hf(fields(rope_parameters=SCALINGS[name]))
    batch = BatchConfig(sequence_length=64)
    run = RunConfig(model=model, batch=batch)
    path = tmp_path / "run.toml"
    path.write_text(render_run_file(run))
    assert load_run_file(path).run.model == model


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_factor": 8.0}, "model.rope_factor is 8.0: rope_type default"),
        ({"rope_type": RopeType.LINEAR}, "model.rope_factor is 0.0: with rope_type linear"),
        (
            {"rope_type": RopeType.LINEAR, "rope_factor": 2.0, "rope_low_freq_factor": 1.0},
            "model.rope_low_freq_factor is 1.0: rope_type linear",
        ),
        (
            {"model_type": Architecture.GPT2, "rope_theta": 5.0},
            "rope_theta is 5.0: gpt2 has no",
        ),
        ({"model_type": Architecture.GPT2, "attention_bias": True}, "attention_bias is True"),
    ],
)
def test_numbers_without_their_scaling_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**changes)


@pytest.mark.parametrize("name", SCALINGS)
def test_stages_train_as_transformers_does(name: str, tmp_path: Path) -> None:
    """In float64, against torch's AdamW on transformers' own model."""
    save(tmp_path, SCALINGS[name])
    model = read_config(tmp_path, dtype=ModelDtype.FLOAT64)
    batch = BatchConfig(sequence_length=63, microbatch_size=2, num_microbatches=2)
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    stages = StagesConfig(num_relay_stages=2, num_first_blocks=1)
    config = ExecutorConfig(
        run=RunConfig(
            model=model,
            stages=stages,
            batch=batch,
            optimizer=optimizer,
        ),
    )
    pipeline = [StageExecutor(config, tokens=HashedTokens(), init_dir=tmp_path) for _ in range(3)]
    for index, executor in enumerate(pipeline):
        executor.build(index)
    theirs = Float64Transformers(tmp_path)
    adamw = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for iteration in (1, 2, 3):
        adamw.zero_grad()
        for index in range(batch.num_microbatches):
            mb = MicrobatchId(iteration, 0, index)
            tokens = torch.from_numpy(HashedTokens().microbatch(mb, batch, 0))
            logits = theirs(tokens[:, :-1])
            expected = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten()
            )
            torch.autograd.backward([expected / batch.num_microbatches])
            assert abs(run_microbatch(pipeline, mb) - float(expected.detach())) < 1e-9
        adamw.step()
        for executor in pipeline:
            executor.propose(iteration, [], weights_total=batch.num_microbatches)
            executor.commit(iteration)
    weights = dict(theirs.model.named_parameters())
    for executor in pipeline:
        for key, found in executor.weights().items():
            torch.testing.assert_close(found, weights[key].detach(), rtol=1e-7, atol=1e-9)


def test_another_scaling_is_another_model() -> None:
    plain = config_from_hf(fields())
    assert config_from_hf(fields(rope_scaling=LINEAR)) != plain
    assert replace(plain, rope_type=RopeType.LINEAR, rope_factor=3.0) == config_from_hf(
        fields(rope_scaling=LINEAR)
    )
