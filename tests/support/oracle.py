"""Exported models, examined by transformers and by decod's own stages."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from decod.model.hf_folder import read_weights
from decod.model.stage import TORCH_DTYPES, FirstStage, empty_stage
from decod.model.weights import read_config
from decod.run.model_config import ModelDtype
from decod.run.stages_config import StagesConfig
from tests.support.runs import Tokens


def import_transformers() -> Any:
    """Return the library with progress bars off. It is slow to load, so it is not loaded above."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library


def load_transformers(folder: Path) -> Any:
    """Return the model of a folder as transformers reads it, in the folder's own precision."""
    transformers = import_transformers()
    with warnings.catch_warnings():
        # Warnings of other libraries about each other say nothing about decod.
        warnings.simplefilter("ignore")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype="auto"
        )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


class Float64Transformers(torch.nn.Module):
    """The model of a folder as transformers computes it, entirely in float64.

    transformers computes norms and rotary angles in float32, whatever the model's dtype. Rounding
    would hide small differences, so the name float32 means float64 while transformers is at work.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        transformers = import_transformers()
        stored = load_transformers(folder)
        with _all_wide():
            config = transformers.AutoConfig.from_pretrained(folder)
            self.model = transformers.AutoModelForCausalLM.from_config(config).double()
        self.model.load_state_dict(stored.state_dict())

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits, (B, T, V)."""
        with _all_wide():
            logits: Tensor = self.model(tokens_BT).logits
        return logits


@contextmanager
def _all_wide() -> Iterator[None]:
    with (
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        yield


@torch.no_grad()
def transformers_logits(folder: Path, tokens_BT: Tensor) -> Tensor:
    """Return the logits of transformers, (B, T, V)."""
    logits: Tensor = load_transformers(folder)(tokens_BT).logits
    return logits


@torch.no_grad()
def stage_logits(
    folder: Path,
    tokens_BT: Tensor,
    *,
    num_relay_stages: int = 2,
    dtype: ModelDtype | None = None,
) -> Tensor:
    """Return the logits of decod's stages in sequence, built from a folder, (B, T, V)."""
    model = read_config(folder, dtype=dtype)
    stages = StagesConfig(num_relay_stages=num_relay_stages)
    modules = []
    for index in range(num_relay_stages + 1):
        module = empty_stage(model, stages, index)
        weights = read_weights(folder, model, module.parameters_by_name())
        wanted = TORCH_DTYPES[model.dtype]
        module.place({name: tensor.to(wanted) for name, tensor in weights})
        modules.append(module)
    first, *relays = modules
    assert isinstance(first, FirstStage)
    hidden_BTD = first.embed(tokens_BT)
    for relay in relays:
        hidden_BTD = relay(hidden_BTD)
    return first.logits(hidden_BTD)


@torch.no_grad()
def transformers_loss(folder: Path, batch: list[Tokens]) -> float:
    """Return the mean loss over the microbatches of one iteration."""
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
    """Check that transformers and decod compute the same logits from a folder."""
    torch.set_num_threads(1)
    tokens_BT = torch.from_numpy(np.random.default_rng(0).integers(0, 257, (2, 32)))
    expected = transformers_logits(folder, tokens_BT)
    torch.testing.assert_close(stage_logits(folder, tokens_BT), expected, rtol=0, atol=1e-4)
    # Logits that are all equal would agree for any weights.
    assert expected.std() > 0.1
