"""What is wrong with a setting is said before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decod.errors import ConfigError
from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.fake_node import FakeNode, alone
from tests.support.loops import BATCH, backward, batches, collaborate, make_model, sgd


@pytest.mark.parametrize(
    "settings",
    [
        {"target_batch_size": 0},
        {"target_batch_size": 4.0},
        {"target_batch_size": True},
        {"batch_size_per_step": -1},
        {"gradient_accumulation_steps": 0},
        {"share": 0},
        {"use_local_updates": 1},
        {"overlap": "yes"},
        {"compression": "zip"},
        {"averaging_timeout_s": 0},
        {"averaging_timeout_s": float("inf")},
        {"averaging_timeout_s": float("nan")},
        {"listen": "8000"},
        {"listen": "host:99999"},
        {"advertise": "host"},
        {"name": ""},
        {"upload_max_mbit": 0.5},
        {"upload_max_mbit": 10**400},
        {"upload_max_mbit": "20Mbit"},
        {"run": None},
        {"join": "decod1-v-x@host:1"},
        {"run": None, "join": ""},
        {"run": None, "join": "x" * 9000},
        {"run": None, "join": 7},
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="E-CFG-090") as caught:
        collaborate(FakeNode(), sgd(make_model().parameters()), **settings)
    assert [*settings][-1] in caught.value.what


def test_the_join_string_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "join.txt"
    path.write_text("  decod1-v-abc@host:1\n", encoding="utf-8")
    for join in (path, str(path), "decod1-v-abc@host:1\n"):
        node = FakeNode()
        collaborate(node, sgd(make_model().parameters()), run=None, join=join).close()
        assert node.hello["settings"]["join"] == "decod1-v-abc@host:1"


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read"):
        collaborate(FakeNode(), sgd(make_model().parameters()), run=None, join=tmp_path / "nowhere")


def test_a_batch_size_is_checked() -> None:
    model = make_model()
    with collaborate(FakeNode(alone(BATCH)), sgd(model.parameters())) as optimizer:
        backward(model, batches(1)[0])
        with pytest.raises(ConfigError, match="batch_size"):
            optimizer.step(batch_size=0)


def make_wrong(kind: str) -> Any:
    """What can't be wrapped."""
    model = make_model()
    match kind:
        case "model":
            return model
        case "lbfgs":
            return torch.optim.LBFGS(model.parameters())
        case "frozen":
            return sgd(model.requires_grad_(requires_grad=False).parameters())
        case "complex":
            return sgd([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
        case _:
            return sgd([torch.nn.Parameter(torch.zeros(0))])


@pytest.mark.parametrize("kind", ["model", "lbfgs", "frozen", "complex", "empty"])
def test_what_cannot_be_averaged_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-09[13]"):
        collaborate(FakeNode(), make_wrong(kind))


def test_a_collaborative_optimizer_is_not_wrapped_again() -> None:
    with (
        collaborate(FakeNode(), sgd(make_model().parameters())) as optimizer,
        pytest.raises(ConfigError, match="E-CFG-093"),
    ):
        collaborate(FakeNode(), optimizer)


def test_no_group_of_parameters_is_added() -> None:
    with collaborate(FakeNode(), sgd(make_model().parameters())) as optimizer:
        assert isinstance(optimizer, CollaborativeOptimizer)
        with pytest.raises(ConfigError, match="E-CFG-091"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
