"""Adapters on their way to PEFT, and the memory of weights beside them."""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decod.errors import DataError
from decod.model.adapter import frozen, stage_of
from decod.model.adapter_folder import base_of
from decod.model.generate import LoadedModel
from decod.model.hf_folder import write_merged
from decod.model.sampling import Sampling
from decod.model.shape import frozen_bytes, frozen_shapes, trained_shapes
from decod.model.stage import TORCH_DTYPES, initial_weight
from decod.model.writing import ModelWriter
from decod.run.adapter_config import AdapterConfig, BaseFormat
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import RunConfig
from decod.train.model_folder import judge_folder
from tests.support.architectures import small_model
from tests.support.oracle import load_transformers
from tests.support.peft_reference import load_peft
from tests.unit.train.test_executor_adapter import LORA, folder_of, pipeline_of, run_of
from tests.unit.train.test_executor_equals_reference import MODELS


def write_adapter(path: Path, model: ModelConfig, adapter: AdapterConfig) -> dict[str, Any]:
    """Write an adapter of random weights, as an export does. Return the weights."""
    run = run_of(model, adapter)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: (torch.randn(shape, generator=generator) / 5).to(TORCH_DTYPES[model.dtype])
        for stage in range(3)
        for name, shape in trained_shapes(run, stage).items()
    }
    with closing(ModelWriter(path, model, adapter)) as writer:
        for name, weight in weights.items():
            array: Any = weight.view(-1).view(torch.uint8).numpy()
            writer.write(name, memoryview(array))
        writer.finish()
    return weights


@pytest.mark.parametrize(
    "kind", ["llama tied, grouped", "qwen2", "qwen3", "gpt2", "gemma2", "qwen3_moe"]
)
def test_peft_computes_with_an_export_what_the_stages_compute(tmp_path: Path, kind: str) -> None:
    own = MODELS.get(kind)
    model = small_model(kind) if own is None else replace(own, dtype=ModelDtype.FLOAT32)
    base = folder_of(tmp_path / "base", model)
    weights = write_adapter(tmp_path / "adapter", model, LORA)
    whole = load_transformers(base)
    tokens_BT = torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(0))
    plain = whole(tokens_BT).logits
    theirs = load_peft(whole, tmp_path / "adapter")(tokens_BT).logits
    pipeline = pipeline_of(run_of(model), base)
    stages = [executor.passes._stage for executor in pipeline]
    for stage in stages:
        stage.place({name: weights[name] for name in stage.parameters_by_name()})
    first: Any = stages[0]
    hidden_BTD = first.embed(tokens_BT)
    for stage in stages[1:]:
        hidden_BTD = stage.run_blocks(hidden_BTD)
    torch.testing.assert_close(first.logits(hidden_BTD), theirs, rtol=0, atol=1e-5)
    assert (theirs - plain).abs().max() > 1e-2, "the adapter counts"


@pytest.mark.parametrize(
    ("base", "most"), [(BaseFormat.BFLOAT16, 2.2), (BaseFormat.INT8, 1.2), (BaseFormat.NF4, 0.7)]
)
def test_a_frozen_weight_takes_as_much_as_is_told(base: BaseFormat, most: float) -> None:
    matrix = torch.randn(1024, 512)
    held = frozen(matrix, base)
    tensors = [each for each in _tensors_in(held) if each.data_ptr() != matrix.data_ptr()]
    each_bytes = sum(each.numel() * each.element_size() for each in tensors) / matrix.numel()
    told_bytes = base.weight_bytes(ModelDtype.FLOAT32)
    assert told_bytes <= most
    # Beside the scales, a format has a table of at most 256 numbers, which all share.
    assert each_bytes == pytest.approx(told_bytes, abs=0.003)
    run = RunConfig(adapter=replace(LORA, base=base))
    shapes = frozen_shapes(run, 1).items()
    narrow = sum(shape[0] * shape[1] for _, shape in shapes if len(shape) > 1)
    norms = sum(shape[0] for _, shape in shapes if len(shape) == 1)
    assert frozen_bytes(run, 1) == round(narrow * told_bytes + norms * 4)


def _tensors_in(held: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for each in vars(held).values():
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif type(each).__name__ == "QuantState":
            found += [part for part in vars(each).values() if isinstance(part, torch.Tensor)]
    return found


def test_the_first_weights_change_nothing_and_are_those_of_peft_in_size() -> None:
    run = RunConfig(adapter=LORA)
    for name, shape in trained_shapes(run, 1).items():
        weight = initial_weight(run.model, seed=1, name=name, shape=shape)
        if name.endswith("lora_B.weight"):
            assert not weight.any()
        else:
            # As `kaiming_uniform_` with a = sqrt(5): uniform up to 1 / sqrt(inputs).
            assert float(weight.std()) == pytest.approx((3 * shape[1]) ** -0.5, rel=0.1)


def test_only_the_adapter_is_trained() -> None:
    stage = stage_of(RunConfig(adapter=LORA), 1)
    assert {*stage.parameters_by_name()} == {*trained_shapes(RunConfig(adapter=LORA), 1)}
    assert {*stage.frozen_by_name()} == {*frozen_shapes(RunConfig(adapter=LORA), 1)}


# --- folders of adapters --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
@pytest.mark.parametrize("kind", ["llama tied, grouped", "qwen3", "gpt2"])
def test_a_merged_model_is_that_of_peft(tmp_path: Path, kind: str, dtype: ModelDtype) -> None:
    model = replace(MODELS[kind], dtype=dtype)
    base = folder_of(tmp_path / "base", model)
    write_adapter(tmp_path / "adapter", model, LORA)
    write_merged(tmp_path / "adapter", base, tmp_path / "merged")
    theirs = load_peft(load_transformers(base), tmp_path / "adapter").merge_and_unload()
    ours = load_transformers(tmp_path / "merged").state_dict()
    found = theirs.state_dict()
    assert found.keys() == ours.keys()
    for name, weight in found.items():
        assert torch.equal(ours[name], weight), name


def test_generation_and_evaluation_use_base_and_adapter(tmp_path: Path) -> None:
    model = replace(MODELS["llama"], dtype=ModelDtype.FLOAT32)
    base = folder_of(tmp_path / "base", model)
    write_adapter(tmp_path / "adapter", model, LORA)
    write_merged(tmp_path / "adapter", base, tmp_path / "merged")
    greedy = Sampling(temperature=0.0)
    texts = [
        list(LoadedModel(folder, base=given).continuation([1, 2], greedy, num_tokens=8))
        for folder, given in (
            (tmp_path / "merged", None),
            (tmp_path / "adapter", base),
            (base, None),
        )
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_where_the_base_is(tmp_path: Path) -> None:
    model = replace(MODELS["llama"], dtype=ModelDtype.FLOAT32)
    base = folder_of(tmp_path / "base", model)
    adapter = tmp_path / "adapter"
    write_adapter(adapter, model, LORA)
    assert base_of(base) is None
    assert base_of(adapter, base) == base
    with pytest.raises(DataError, match="is not on this host"):
        base_of(adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert base_of(adapter) == base
    assert judge_folder(adapter).config == model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": "many"}, "r or target_modules"),
        ({"r": 4}, "is \\(3, 16\\), not \\(4, 16\\)"),
        ({"target_modules": ["lm_head"]}, "names 'lm_head'"),
        ({"target_modules": ["q_proj"]}, "is unknown"),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    model = replace(MODELS["llama"], dtype=ModelDtype.FLOAT32)
    base = folder_of(tmp_path / "base", model)
    adapter = tmp_path / "adapter"
    write_adapter(adapter, model, LORA)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | change))
    with pytest.raises(DataError, match=told):
        judge_folder(adapter, base=base)


def test_no_code_is_fetched_to_make_weights_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes takes kernels from the Hub if it can."""
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    frozen(torch.zeros(64, 64), BaseFormat.NF4)
    assert sys.modules["kernels"] is None
