"""Muon with AdamW: each parameter steps as torch's own optimizer of its kind would step it."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from decod import MuonWithAdamW
from decod.errors import ConfigError
from tests.support.loops import backward, batches, make_model, same


def test_fifty_steps_are_those_of_torch() -> None:
    plain, model = make_model(), make_model()
    matrices = [each for each in plain.parameters() if each.ndim == 2]
    vectors = [each for each in plain.parameters() if each.ndim == 1]
    expected = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    )
    own = MuonWithAdamW(model, lr=0.02)
    for number, batch in enumerate(batches(50)):
        plain.zero_grad()
        backward(plain, batch)
        own.zero_grad()
        backward(model, batch)
        for optimizer in (*expected, own):
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = 0.02 - 0.0003 * number
        assert same(plain, model)


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    model, again = make_model(), make_model(seed=3)
    own = MuonWithAdamW(model, lr=0.02)
    data = batches(6)
    for batch in data[:3]:
        own.zero_grad()
        backward(model, batch)
        own.step()
    other = MuonWithAdamW(again, lr=0.5)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(deepcopy(own.state_dict()))
    for batch in data[3:]:
        for optimizer, of in ((own, model), (other, again)):
            optimizer.zero_grad()
            backward(of, batch)
            optimizer.step()
        assert same(model, again)


def test_embedding_and_head_are_no_hidden_matrices() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(requires_grad=False)
    muon, adamw = MuonWithAdamW(model).param_groups
    assert len(muon["params"]) == 2 * 7 - 1
    named = {id(each): name for name, each in model.named_parameters()}
    assert {named[id(each)] for each in adamw["params"]} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        *(
            f"model.layers.{k}.{name}_layernorm.weight"
            for k in (0, 1)
            for name in ("input", "post_attention")
        ),
    }


def test_a_head_can_be_named_and_something_must_be_left() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 4))
    own = MuonWithAdamW(model, head=[model[2].weight])
    assert own.param_groups[0]["params"] == [model[1].weight]
    with pytest.raises(ConfigError, match="no hidden matrix"):
        MuonWithAdamW(model[2], head=[model[2].weight])
