"""Each field of a `config.json` is computed with, or refused by name, or changes nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.errors import ConfigError, DataError
from decod.model.hf import config_from_hf, config_to_hf, require_same
from decod.run.model_config import Architecture, ModelConfig, ModelDtype
from tests.support.oracle import import_transformers

SMALL = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA = ModelConfig(**SMALL)
QWEN2 = ModelConfig(**SMALL, attention_bias=True, num_key_value_heads=2, dtype=ModelDtype.BFLOAT16)
QWEN3 = ModelConfig(**SMALL, qk_norm=True, head_dim=8, num_key_value_heads=2)
GPT2 = ModelConfig(**SMALL, model_type=Architecture.GPT2, tie_word_embeddings=True)
MODELS = (LLAMA, QWEN2, QWEN3, GPT2)


@pytest.mark.parametrize("model", [*MODELS, replace(LLAMA, head_dim=6)])
def test_a_configuration_survives_the_way_there_and_back(model: ModelConfig) -> None:
    fields = json.loads(json.dumps(config_to_hf(model)))
    assert config_from_hf(fields) == model
    assert config_from_hf(fields, dtype=ModelDtype.FLOAT64).dtype is ModelDtype.FLOAT64


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (LLAMA, "model_type", "mamba"),
        (LLAMA, "model_type", ["llama"]),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "head_dim", 7),
        (LLAMA, "head_dim", 0),
        (LLAMA, "hidden_size", "16"),
        (LLAMA, "hidden_size", None),
        (LLAMA, "num_attention_heads", 0),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "vocab_size", True),
        (LLAMA, "rms_norm_eps", -1.0),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "quantization_config", {"bits": 4}),
        (LLAMA, "dtype", "float8_e4m3fn"),
        (LLAMA, "attention_dropout", 0.1),
        (LLAMA, "hidden_dropout", 0.1),
        (LLAMA, "pretraining_tp", 2),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "sliding_window", 4096),
        (LLAMA, "is_causal", False),
        (LLAMA, "is_encoder_decoder", True),
        (LLAMA, "per_layer_config", {"1": {"intermediate_size": 8}}),
        (LLAMA, "pruned_heads", {"1": [0]}),
        (LLAMA, "auto_map", {"AutoModelForCausalLM": "modeling_mine.Mine"}),
        (LLAMA, "attn_logit_softcapping", 30.0),
        (LLAMA, "no_such_feature", 0),
        (QWEN2, "attention_bias", False),
        (QWEN2, "attention_dropout", 0.1),
        (QWEN2, "use_mrope", True),
        (QWEN3, "num_experts", 4),
        (GPT2, "activation_function", "relu"),
        (GPT2, "add_cross_attention", True),
        (GPT2, "scale_attn_weights", False),
        (GPT2, "scale_attn_by_inverse_layer_idx", True),
        (GPT2, "reorder_and_upcast_attn", True),
        (GPT2, "attn_pdrop", 0.1),
        (GPT2, "embd_pdrop", 0.1),
        (GPT2, "resid_pdrop", 0.1),
        (GPT2, "layer_norm_epsilon", 0.0),
        # Another name of n_embd, which transformers would follow.
        (GPT2, "hidden_size", 32),
        (GPT2, "rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused_by_name(
    model: ModelConfig, field: str, value: Any
) -> None:
    with pytest.raises(DataError, match=re.escape(field)):
        config_from_hf(config_to_hf(model) | {field: value})


def test_a_field_without_a_name_is_unknown() -> None:
    with pytest.raises(DataError, match=r"config.json:  is 5: decod does not know this field"):
        config_from_hf(config_to_hf(LLAMA) | {"": 5})


def test_dropout_is_refused_with_all_that_is_to_be_changed() -> None:
    """GPT-2's own folder has three: one edit must do."""
    fields = config_to_hf(GPT2) | {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.2}
    with pytest.raises(DataError, match=r"set attn_pdrop, embd_pdrop, resid_pdrop to 0.0"):
        config_from_hf(fields)
    fields["embd_pdrop"] = 0
    with pytest.raises(DataError, match=r"config.json: attn_pdrop is 0.1, resid_pdrop is 0.2:"):
        config_from_hf(fields)


def test_an_absent_field_means_what_it_does_to_transformers() -> None:
    """Dropout of GPT-2 is 0.1 there unless the file says otherwise."""
    fields = config_to_hf(GPT2)
    del fields["attn_pdrop"]
    with pytest.raises(DataError, match=r"attn_pdrop is 0.1"):
        config_from_hf(fields)
    fields = config_to_hf(QWEN2)
    del fields["num_key_value_heads"]
    with pytest.raises(DataError, match="num_key_value_heads is 32"):
        config_from_hf(fields)
    fields = config_to_hf(QWEN3)
    del fields["head_dim"]
    assert config_from_hf(fields).head_dim == 128


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "GPT2"])
def test_all_fields_that_transformers_writes_are_known(kind: str) -> None:
    """Those of models for other tasks, and of text generation, too: none of them is a feature."""
    transformers = import_transformers()
    theirs = getattr(transformers, f"{kind}Config")(bos_token_id=0, eos_token_id=[1, 2])
    fields = json.loads(theirs.to_json_string(use_diff=False))
    fields |= {name: 0.0 for name in fields if name.endswith("_pdrop")}
    fields |= transformers.GenerationConfig()._get_default_generation_params()
    fields |= {"torch_dtype": "float32", "use_cache": False, "_attn_implementation": "eager"}
    assert config_from_hf(fields).vocab_size == theirs.vocab_size


# As they were published, without their sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": 1024,
        "n_special": 0,
        "predict_special_tokens": True,
        "summary_first_dropout": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": [128001, 128008, 128009],
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
    },
    "SmolLM2": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    },
    "Qwen2.5": {
        "max_window_layers": 24,
        "rms_norm_eps": 1e-06,
        "sliding_window": 32768,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3": {
        "attention_bias": False,
        "head_dim": 128,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_models_are_known(name: str) -> None:
    model = {"gpt2": GPT2, "Qwen2.5": QWEN2, "Qwen3": QWEN3}.get(name, LLAMA)
    fields = {k: v for k, v in config_to_hf(model).items() if k != "rope_parameters"}
    config_from_hf(fields | PUBLISHED[name])


def test_another_model_is_refused_with_all_that_differs() -> None:
    given = replace(LLAMA, max_position_embeddings=2048, tie_word_embeddings=True)
    require_same(LLAMA, LLAMA, Path("config.json"))
    with pytest.raises(DataError) as caught:
        require_same(LLAMA, given, Path("config.json"))
    assert "max_position_embeddings is 1024 in the run file and 2048 in" in caught.value.what
    assert "model.max_position_embeddings = 2048" in caught.value.fix
    assert "model.tie_word_embeddings = true" in caught.value.fix


def test_the_width_of_a_head_has_two_spellings() -> None:
    """One that is hidden_size / num_attention_heads may be left out."""
    spelled = replace(LLAMA, head_dim=4)
    require_same(LLAMA, spelled, Path("config.json"))
    assert config_from_hf(config_to_hf(spelled)) == LLAMA
    with pytest.raises(
        DataError, match=r"model.head_dim is 4 in the run file and 8 in .*"
    ) as caught:
        require_same(LLAMA, replace(LLAMA, head_dim=8), Path("config.json"))
    assert "model.head_dim = 8" in caught.value.fix


@pytest.mark.parametrize("run", [ModelConfig(), ModelConfig(head_dim=32), QWEN3, GPT2])
@pytest.mark.parametrize("given", [*MODELS, replace(LLAMA, head_dim=6)])
def test_a_run_file_with_the_values_of_the_message_is_accepted(
    run: ModelConfig, given: ModelConfig
) -> None:
    """One look at the message is enough, although the width of a head follows from two fields."""
    given = replace(given, dtype=run.dtype)
    if run == given:
        return
    with pytest.raises(DataError) as caught:
        require_same(run, given, Path("config.json"))
    wanted = re.findall(r"model\.(\w+) = ([^,]*?)(?:,| in the run file)", caught.value.fix)
    values = {name: json.loads(value) for name, value in wanted}
    family = Architecture(values.pop("model_type", run.model_type))
    followed = replace(run, **values, model_type=family)
    require_same(followed, given, Path("config.json"))
    assert followed.query_width == given.query_width


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        (LLAMA, {"head_dim": -1}, "model.head_dim is -1"),
        (LLAMA, {"head_dim": 5}, "model.head_dim is 5: .*even"),
        (GPT2, {"head_dim": 8}, "model.head_dim is 8: gpt2 has no such thing"),
        (GPT2, {"num_key_value_heads": 2}, "gpt2 has as many key and value heads"),
        (GPT2, {"qk_norm": True}, "model.qk_norm is True: gpt2 has no such thing"),
        (QWEN2, {"qk_norm": True}, "model.qk_norm is True: no family"),
    ],
)
def test_heads_that_no_family_has_are_refused(
    model: ModelConfig, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(model, **changes)
