"""Exported models, looked at by transformers and by decod's own stages."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decod.model.config import StagesConfig
from decod.model.folder import read_config, read_weights
from decod.model.stage import FirstStage, empty_stage
from tests.support.runs import Tokens


def import_transformers() -> Any:
    """Returns the library, told to be quiet. It is slow to load, so it is not loaded above."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library


def load_transformers(folder: Path) -> Any:
    """Returns the model of a folder as transformers reads it, in the folder's own precision."""
    transformers = import_transformers()
    with warnings.catch_warnings():
        # What other libraries think of each other is no finding about decod.
        warnings.simplefilter("ignore")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype="auto"
        )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def transformers_logits(folder: Path, tokens_BT: Tensor) -> Tensor:
    """Returns (B, T, V)."""
    logits: Tensor = load_transformers(folder)(tokens_BT).logits
    return logits


@torch.no_grad()
def stage_logits(folder: Path, tokens_BT: Tensor, *, num_relay_stages: int = 2) -> Tensor:
    """Returns the logits of decod's stages, one after another, built from a folder, (B, T, V)."""
    model = read_config(folder)
    stages = StagesConfig(num_relay_stages=num_relay_stages)
    modules = []
    for index in range(num_relay_stages + 1):
        module = empty_stage(model, stages, index)
        module.place(dict(read_weights(folder, model, module.parameters_by_name())))
        modules.append(module)
    first, *relays = modules
    assert isinstance(first, FirstStage)
    hidden_BTD = first.embed(tokens_BT)
    for relay in relays:
        hidden_BTD = relay(hidden_BTD)
    return first.logits(hidden_BTD)


@torch.no_grad()
def transformers_loss(folder: Path, batch: list[Tokens]) -> float:
    """Returns the mean loss over the microbatches of one iteration."""
    model = load_transformers(folder)
    losses = []
    for microbatch in batch:
        tokens = torch.from_numpy(microbatch)
        logits = model(tokens[:, :-1]).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        )
    return float(torch.stack(losses).mean())


def assert_agreement(folder: Path) -> None:
    """Checks that transformers and decod compute the same logits from a folder."""
    torch.set_num_threads(1)
    tokens_BT = torch.from_numpy(np.random.default_rng(0).integers(0, 257, (2, 32)))
    expected = transformers_logits(folder, tokens_BT)
    torch.testing.assert_close(stage_logits(folder, tokens_BT), expected, rtol=0, atol=1e-4)
    # Logits that are all alike would agree whatever the weights.
    assert expected.std() > 0.1
