"""Small models of every architecture, with random weights; and whether decod computes the same.

The oracle is transformers, which builds the whole model in one piece.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from decod.model.hf import built_model
from decod.model.hf_folder import read_weights
from decod.model.stage import Stage, empty_stage
from decod.model.writing import ModelWriter
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.stages_config import StagesConfig, stage_blocks

NUM_BLOCKS = 5
STAGES = StagesConfig(num_relay_stages=2, num_first_blocks=1)
"""Three stages: one block on stage 0, and two on each relay."""

_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Mixtures of experts, under the names of several families.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # Gated delta nets.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # Others.
    "query_pre_attn_scalar": 16,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "ffn_dim": 96,
    "n_inner": 96,
    "decoder_layers": NUM_BLOCKS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
}
"""Fields of all families. Of a family, those count that its configuration has."""

_OF_TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"head_dim": None, "num_key_value_heads": 4},
    "deepseek_v3": {"head_dim": None, "num_key_value_heads": 4},
    "minicpm3": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"]},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gemma2": {"final_logit_softcapping": 5.0},
}
"""Fields of some types: what their defaults would not show, or what they need."""


def small_config(model_type: str) -> Any:
    """Return the configuration of a small model of a type, as transformers has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    fields = dict[str, Any]()
    for name, value in {**_SMALL, **_OF_TYPES.get(model_type, {})}.items():
        known = usual.attribute_map.get(name, name)
        if not hasattr(usual, known) or known in fields or value is None:
            continue
        if name == "head_dim" and getattr(usual, name, None) is None:
            continue
        fields[known] = value
    return kind(**fields)


def small_model(model_type: str, dtype: ModelDtype = ModelDtype.FLOAT32) -> ModelConfig:
    """Return that model as a run has it."""
    return built_model(small_config(model_type).to_dict(), dtype=dtype)


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model in which every parameter matters. Norms and biases are random as well."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for constant in model.state_dict().values():
        if constant.dim() == 1:
            constant.add_(0.05 * torch.randn_like(constant))
    for parameter in model.parameters():
        noise = 0.05 * torch.randn_like(parameter)
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model


@dataclass(frozen=True)
class Compared:
    """How far a model in three stages is from the whole one."""

    logits: float
    """Largest difference, relative to the largest logit."""
    loss: float
    gradients: float
    """Largest distance of a parameter's gradient, relative to its length."""
    bits: bool
    """Whether the export of untrained weights has the bits of the input."""
    apart: float
    """How far the logits of sequences of several documents are from those of each alone, relative
    to the largest."""


def placed_stages(folder: Path, model: ModelConfig) -> list[Any]:
    """Return the three stages of a model folder."""
    weights = dict(read_weights(folder, model))
    found: list[Stage] = []
    for index in range(len(stage_blocks(model, STAGES))):
        stage = empty_stage(model, STAGES, index)
        stage.place({name: weights[name].clone() for name in stage.parameters_by_name()})
        found.append(stage)
    return found


def saved_model(model_type: str, folder: Path) -> Any:
    """Return a small model that runs, and save it. `folder` must not exist."""
    whole = random_model(small_config(model_type))
    whole(torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    whole.save_pretrained(folder)
    return whole


def compared(whole: Any, folder: Path) -> Compared:
    """Cut a model that is saved in a folder into three stages, and compare."""
    model = built_model(json.loads((folder / "config.json").read_text()), trains=False)
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(3, 200, (2, 25), generator=generator)
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    logits_BTV = whole(inputs_BT, use_cache=False).logits
    loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    torch.autograd.backward(loss)
    first, *relays = stages = placed_stages(folder, model)
    hidden_BTD = first.embed(inputs_BT)
    for relay in relays:
        hidden_BTD = relay.run_blocks(hidden_BTD)
    found_BTV = first.logits(hidden_BTD)
    found_loss = first.loss(hidden_BTD, targets_BT)
    torch.autograd.backward(found_loss)
    own = {n: each.grad for stage in stages for n, each in stage.parameters_by_name().items()}
    # What transformers has as a constant in its files must not be trained.
    held = [own[n] for n in own.keys() - dict(whole.named_parameters()).keys()]
    assert not any(each is not None and each.any() for each in held)
    difference = (found_BTV - logits_BTV).abs().max() / logits_BTV.abs().max()
    return Compared(
        logits=float(difference.detach()),
        loss=abs(float(found_loss.detach() - loss.detach())),
        gradients=max(_distance(own[n], each.grad) for n, each in whole.named_parameters()),
        bits=_exports_alike(folder, model),
        apart=_apart(whole, stages, inputs_BT),
    )


_DOCUMENTS = ((0, 7, 13, 24), (0, 3, 20, 24))
"""Where the documents of each sequence begin, and its end."""


@torch.no_grad()
def _apart(whole: Any, stages: list[Any], tokens_BT: Tensor) -> float:
    cut = [list(itertools.pairwise(bounds)) for bounds in _DOCUMENTS]
    places_BT = torch.stack([torch.cat([torch.arange(b - a) for a, b in row]) for row in cut])
    first, *relays = stages
    try:
        hidden_BTD = first.embed(tokens_BT, places_BT)
        for relay in relays:
            hidden_BTD = relay.run_blocks(hidden_BTD, places_BT)
    except TypeError:  # The model takes no positions.
        return float("inf")
    found_BTV = first.logits(hidden_BTD)
    pieces = zip(tokens_BT, cut, strict=True)
    alone = [[whole(row[None, a:b], use_cache=False).logits[0] for a, b in c] for row, c in pieces]
    alone_BTV = torch.stack([torch.cat(row) for row in alone])
    return float((found_BTV - alone_BTV).abs().max() / alone_BTV.abs().max())


def _distance(own: Tensor | None, theirs: Tensor | None) -> float:
    if own is None or theirs is None:
        # An expert whom no token reached has no gradient, or one of zeros.
        rest = [each for each in (own, theirs) if each is not None]
        return 0.0 if not any(each.any() for each in rest) else float("inf")
    return float((own - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _exports_alike(folder: Path, model: ModelConfig) -> bool:
    """Whether transformers loads an export of a model folder, with the same bits."""
    import transformers

    out = folder / "exported"
    writer = ModelWriter(out, model)
    for name, weight in read_weights(folder, model):
        array: Any = weight.contiguous().view(-1).view(torch.uint8).numpy()
        writer.write(name, memoryview(array))
    writer.finish()
    writer.close()
    auto = transformers.AutoModelForCausalLM
    before, after = (auto.from_pretrained(each).state_dict() for each in (folder, out))
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
