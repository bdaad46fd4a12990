"""Initial weights are the same wherever they are made."""

import hashlib

import pytest
import torch

from decod.model.shape import model_shapes, stage_shapes
from decod.model.stage import empty_model, empty_stage, initial_weight
from decod.run.model_config import FAMILIES, Architecture, ModelConfig
from decod.run.stages_config import StagesConfig

torch.set_num_threads(1)

SMALL = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_cut_gives_the_same_parameters_once(architecture: Architecture, tied: bool) -> None:
    model = ModelConfig(model_type=architecture, tie_word_embeddings=tied, **SMALL)
    whole = model_shapes(model)
    module = empty_model(model).parameters_by_name()
    assert {name: tuple(p.shape) for name, p in module.items()} == whole
    for stages in (StagesConfig(num_relay_stages=4), StagesConfig(num_first_blocks=1)):
        found = {}
        for index in range(stages.num_relay_stages + 1):
            part = stage_shapes(model, stages, index)
            module = empty_stage(model, stages, index).parameters_by_name()
            assert {name: tuple(p.shape) for name, p in module.items()} == part
            assert not found.keys() & part.keys()
            found |= part
        assert dict(sorted(found.items())) == whole


def test_initial_weights_never_change() -> None:
    """Members with other versions of decod or torch would refuse each other's hash."""
    weight = initial_weight(ModelConfig(), seed=1, name="lm_head.weight", shape=(3, 100_000))
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    assert digest == "17f2ba37ca567fedaea18e04d9d60b61932fe528de29b4de46f29c86be707552"


def test_initial_weights_depend_on_seed_and_name_and_have_the_right_width() -> None:
    model = ModelConfig(num_hidden_layers=8)

    def make(seed: int, name: str) -> torch.Tensor:
        return initial_weight(model, seed=seed, name=name, shape=(1000, 300))

    first = make(0, "model.layers.0.mlp.up_proj.weight")
    assert torch.equal(first, make(0, "model.layers.0.mlp.up_proj.weight"))
    assert not torch.equal(first, make(1, "model.layers.0.mlp.up_proj.weight"))
    assert not torch.equal(first, make(0, "model.layers.1.mlp.up_proj.weight"))
    assert first.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(first.mean().item()) < 2e-4
    # About as many values beyond two deviations as a normal distribution has: 4.55 %.
    assert (first.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, abs=0.002)
    assert make(0, "model.layers.0.mlp.down_proj.weight").std().item() == pytest.approx(
        0.005, rel=0.01
    )
    assert torch.equal(
        initial_weight(model, seed=0, name="model.norm.weight", shape=(4,)), torch.ones(4)
    )
    assert not initial_weight(model, seed=0, name="transformer.ln_f.bias", shape=(4,)).any()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_empty_stage_draws_nothing(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device torch loads its compiler for that, which takes a second."""

    def refuse(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError(f"values are drawn for {tuple(tensor.shape)}")

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    model, stages = ModelConfig(model_type=architecture, **SMALL), StagesConfig(num_relay_stages=2)
    for index in range(3):
        parameters = empty_stage(model, stages, index).parameters()
        assert all(parameter.is_meta for parameter in parameters)
