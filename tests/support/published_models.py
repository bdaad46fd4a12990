"""The `config.json` of published models, with small sizes, and what decod says of each.

Every other field is as published: its spelling, its special tokens, and what decod does not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from decod.data.byte_level import byte_characters

VOCAB_SIZE = 264
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_LLAMA = _SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.0",
    "use_cache": True,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
_LLAMA3 = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
_LLAMA31 = _LLAMA3 | {"rope_scaling": _LLAMA3_ROPE}
_LLAMA32 = _LLAMA31 | {
    "head_dim": 16,
    "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_SMOLLM = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 72,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_QWEN2 = _SIZES | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
}
_QWEN25 = _QWEN2 | {"rope_theta": 1000000.0, "transformers_version": "4.43.1"}
_QWEN3 = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.51.0",
}
_MISTRAL = _SIZES | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
}
_OLMO2 = _SIZES | {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "num_key_value_heads": 4,
    "pad_token_id": 258,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
}
_GEMMA2 = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
}
_QWEN3_MOE = {
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_GRANITE = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 257,
    "embd_pdrop": 0.1,
    "eos_token_id": 257,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 128,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": VOCAB_SIZE,
}


@dataclass(frozen=True, slots=True)
class Published:
    """A published model, scaled down."""

    name: str
    """Its name on the Hugging Face Hub."""
    fields: dict[str, Any]
    """Its `config.json`."""
    refused: str = ""
    """The field by which decod refuses it. Empty: loss and text are those of transformers."""
    stored: str = "float32"
    """The dtype of the weights in its files."""
    adds_bos: bool = True
    """Whether its tokenizer puts a token before a text."""


def _llama(name: str, base: dict[str, Any] = _LLAMA, **fields: Any) -> Published:
    merged = base | fields
    return Published(name, merged, stored=str(merged["torch_dtype"]))


def _qwen(name: str, base: dict[str, Any], **fields: Any) -> Published:
    merged = base | fields
    return Published(name, merged, stored=str(merged["torch_dtype"]), adds_bos=False)


def _gpt2(name: str, **fields: Any) -> Published:
    return Published(name, _GPT2 | fields, adds_bos=False)


def _built(name: str, model_type: str, **fields: Any) -> Published:
    """A model that transformers builds. Its other fields are Llama's."""
    return Published(name, _LLAMA | {"model_type": model_type, "pad_token_id": 258} | fields)


def _refused(name: str, field: str, base: dict[str, Any], **fields: Any) -> Published:
    return Published(name, base | fields, refused=field)


def _foreign(name: str, model_type: str) -> Published:
    """A model of a family that decod does not have."""
    return Published(name, _LLAMA | {"model_type": model_type}, refused="model_type")


PUBLISHED = (
    _llama(
        "huggyllama/llama-7b",
        max_sequence_length=128,
        num_key_value_heads=4,
        pad_token_id=0,
        rms_norm_eps=1e-6,
        torch_dtype="float16",
    ),
    _llama("openlm-research/open_llama_3b", hidden_size=80, num_key_value_heads=4),
    _llama(
        "meta-llama/Llama-2-7b-hf",
        num_key_value_heads=4,
        pretraining_tp=1,
        rope_scaling=None,
        torch_dtype="float16",
    ),
    _llama("meta-llama/Llama-2-13b-chat-hf", num_key_value_heads=4, torch_dtype="float16"),
    _llama("meta-llama/Llama-2-70b-hf", pretraining_tp=1, torch_dtype="float16"),
    _llama("codellama/CodeLlama-7b-hf", rope_theta=1000000, torch_dtype="bfloat16"),
    _llama("lmsys/vicuna-7b-v1.5-16k", rope_scaling={"factor": 4.0, "type": "linear"}),
    _llama("meta-llama/Meta-Llama-3-8B", _LLAMA3),
    _llama("meta-llama/Llama-3.1-8B", _LLAMA31),
    _llama("meta-llama/Llama-3.1-8B-Instruct", _LLAMA31, eos_token_id=[257, 258, 259]),
    _llama("meta-llama/Llama-3.2-1B", _LLAMA32),
    _llama("meta-llama/Llama-3.2-3B-Instruct", _LLAMA32, head_dim=32, eos_token_id=[257, 258]),
    _llama("meta-llama/Llama-3.3-70B-Instruct", _LLAMA31, head_dim=16),
    _llama("TinyLlama/TinyLlama-1.1B-Chat-v1.0", attention_bias=False, torch_dtype="bfloat16"),
    _llama("HuggingFaceTB/SmolLM-135M", _SMOLLM),
    _llama(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        _SMOLLM,
        is_llama_config=True,
        rope_interleaved=False,
        rope_theta=100000,
        **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
    ),
    _llama("HuggingFaceTB/SmolLM2-1.7B", _SMOLLM, num_key_value_heads=9, rope_theta=130000),
    _llama("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", _LLAMA31),
    _llama("deepseek-ai/deepseek-llm-7b-base", num_key_value_heads=4, torch_dtype="bfloat16"),
    _llama(
        "deepseek-ai/deepseek-coder-1.3b-base",
        rope_scaling={"factor": 4.0, "type": "linear"},
        rope_theta=100000,
        torch_dtype="bfloat16",
    ),
    _llama("01-ai/Yi-6B", rope_theta=5000000.0, torch_dtype="bfloat16", pad_token_id=0),
    _llama("unsloth/Llama-3.2-1B", _LLAMA32, unsloth_fixed=True, pad_token_id=258),
    _qwen("Qwen/Qwen1.5-0.5B", _QWEN2, num_key_value_heads=4, tie_word_embeddings=True),
    _qwen("Qwen/Qwen2-0.5B", _QWEN2, tie_word_embeddings=True),
    _qwen("Qwen/Qwen2-7B-Instruct", _QWEN2, max_window_layers=28),
    _qwen("Qwen/Qwen2.5-0.5B", _QWEN25, tie_word_embeddings=True, use_mrope=False),
    _qwen("Qwen/Qwen2.5-7B-Instruct", _QWEN25),
    _qwen("Qwen/Qwen2.5-Coder-1.5B", _QWEN25, tie_word_embeddings=True),
    _qwen("Qwen/Qwen2.5-Math-1.5B", _QWEN25, rope_theta=10000, tie_word_embeddings=True),
    _qwen("Qwen/QwQ-32B", _QWEN25, max_window_layers=64),
    _qwen("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", _QWEN25, rope_theta=10000, use_mrope=False),
    _qwen("Qwen/Qwen3-0.6B", _QWEN3, tie_word_embeddings=True),
    _qwen("Qwen/Qwen3-4B", _QWEN3, tie_word_embeddings=True),
    _qwen("Qwen/Qwen3-4B-Instruct-2507", _QWEN3, rope_theta=5000000, tie_word_embeddings=True),
    _qwen("Qwen/Qwen3-8B", _QWEN3, head_dim=16),
    _qwen("Qwen/Qwen3-32B", _QWEN3, hidden_size=80, max_window_layers=64),
    _llama("mistralai/Mistral-7B-v0.3", _MISTRAL, attention_dropout=0.0, sliding_window=None),
    _llama("mistralai/Mistral-7B-Instruct-v0.2", _MISTRAL, sliding_window=None),
    _llama("mistralai/Mistral-7B-v0.1", _MISTRAL, sliding_window=8),
    _llama("internlm/internlm-7b as llama", attention_bias=True),
    _qwen(
        "Qwen/Qwen2.5-7B-Instruct with YaRN",
        _QWEN25,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"},
    ),
    _qwen(
        "Qwen/Qwen2-57B with a window",
        _QWEN2,
        use_sliding_window=True,
        max_window_layers=1,
        sliding_window=8,
    ),
    _qwen("allenai/OLMo-2-0425-1B", _OLMO2),
    _qwen("allenai/OLMo-2-1124-7B", _OLMO2, num_key_value_heads=2, torch_dtype="float32"),
    _built("google/gemma-2-2b", "gemma2", **_GEMMA2),
    _built("google/gemma-3-1b-pt", "gemma3_text", sliding_window=8, query_pre_attn_scalar=16),
    _built("microsoft/Phi-3-mini-4k-instruct", "phi3", resid_pdrop=0.0, sliding_window=8),
    _built("EleutherAI/pythia-160m", "gpt_neox", rotary_pct=0.25, hidden_act="gelu"),
    _built("HuggingFaceTB/SmolLM3-3B", "smollm3", no_rope_layers=[1, 0]),
    _built("Qwen/Qwen3-30B-A3B", "qwen3_moe", **_QWEN3_MOE),
    _built("ibm-granite/granite-3.3-2b-base", "granite", **_GRANITE),
    _gpt2("openai-community/gpt2"),
    _gpt2("openai-community/gpt2-medium", n_layer=3, n_special=0, predict_special_tokens=True),
    _gpt2("openai-community/gpt2-large", n_embd=60, n_head=5),
    _gpt2("openai-community/gpt2-xl", n_embd=50, n_head=5, output_past=True),
    _gpt2("distilbert/distilgpt2", n_layer=1, _num_labels=1, id2label={"0": "LABEL_0"}),
    _gpt2("microsoft/DialoGPT-small", task_specific_params={"conversational": {"max_length": 9}}),
    _refused(
        "stanford-crfm/alias-gpt2-small-x21",
        "scale_attn_by_inverse_layer_idx",
        _GPT2,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    _refused(
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "dual_chunk_attention_config",
        _QWEN25,
        dual_chunk_attention_config={"chunk_size": 64, "local_size": 8},
    ),
    _refused(
        "a Llama with dynamic NTK",
        "rope_scaling.rope_type",
        _LLAMA,
        rope_scaling={"factor": 2.0, "type": "dynamic"},
    ),
    _refused(
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        "quantization_config",
        _LLAMA31,
        quantization_config={"bits": 4, "quant_method": "awq"},
    ),
    _refused(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
        "quantization_config",
        _LLAMA31,
        quantization_config={"quant_method": "fp8"},
    ),
    _refused(
        "mlx-community/Llama-3.2-1B-Instruct-4bit",
        "quantization",
        _LLAMA32,
        quantization={"bits": 4, "group_size": 64},
    ),
    _foreign("facebook/opt-125m", "opt"),
    _foreign("tiiuae/falcon-7b", "falcon"),
)


def byte_tokenizer(special: Sequence[str], *, begins: str = "") -> str:
    """Return a `tokenizer.json` of one token for each byte, then these special tokens.

    Args:
        special: Names of special tokens, from id 256 on.
        begins: The token that begins every text; none if empty.
    """
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [tokenizers.AddedToken(name, special=True, normalized=False) for name in special]
    tokenizer.add_special_tokens(added)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begins, "$A"],
            pair=[begins, "$A", "$B"],
            special_tokens=[(begins, tokenizer.token_to_id(begins))],
        )
    return tokenizer.to_str()
