"""The same adapter, trained by PEFT and torch's AdamW in one process."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decod.run.adapter_config import AdapterConfig
from decod.run.training_config import OptimizerConfig
from tests.support.oracle import Float64Transformers
from tests.support.runs import Tokens

_PREFIX = "base_model.model."


def import_peft() -> Any:
    """Return the library. It is slow to load, so it is not loaded above."""
    import peft

    return peft


def load_peft(model: Any, folder: Path) -> Any:
    """Return a model of transformers with the adapter of a folder."""
    with warnings.catch_warnings():
        # Warnings of other libraries about each other say nothing about decod.
        warnings.simplefilter("ignore")
        return import_peft().PeftModel.from_pretrained(model, folder)


class PeftReference:
    """A model of a folder with an adapter, in float64.

    Args:
        folder: The model.
        adapter: What is trained.
        weights: The adapter's first weights, by decod's names.
    """

    def __init__(self, folder: Path, adapter: AdapterConfig, weights: Mapping[str, Tensor]) -> None:
        peft = import_peft()
        targets = adapter.targets
        settings = peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            target_modules=targets if targets == "all-linear" else targets.split(", "),
            task_type="CAUSAL_LM",
        )
        self._wide = Float64Transformers(folder)
        with warnings.catch_warnings():
            # Warnings of other libraries about each other say nothing about decod.
            warnings.simplefilter("ignore")
            self._wide.model = peft.get_peft_model(self._wide.model, settings)
        named = self._wide.model.named_parameters()
        self._trained = {
            name.removeprefix(_PREFIX).replace(".default", ""): parameter
            for name, parameter in named
            if parameter.requires_grad
        }
        assert self._trained.keys() == weights.keys()
        for name, parameter in self._trained.items():
            parameter.data.copy_(weights[name])

    @property
    def weights(self) -> dict[str, Tensor]:
        """The adapter's weights, by decod's names."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    def train(self, optimizer: OptimizerConfig, batches: Iterable[Sequence[Tokens]]) -> list[float]:
        """Take a step for each batch of microbatches, (B, T + 1) token ids. Return mean losses."""
        parameters = [*self._trained.values()]
        stepper = torch.optim.AdamW(
            parameters,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        losses = []
        for iteration, batch in enumerate(batches, 1):
            warmth = min(1.0, iteration / (optimizer.warmup_iterations + 1))
            stepper.param_groups[0]["lr"] = optimizer.lr * warmth
            stepper.zero_grad()
            total = 0.0
            for microbatch in batch:
                tokens = torch.from_numpy(microbatch)
                logits, targets = self._wide(tokens[:, :-1]), tokens[:, 1:]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                torch.autograd.backward([loss / len(batch)])
                total += float(loss.detach())
            if optimizer.clip_norm:
                torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_norm)
            stepper.step()
            losses.append(total / len(batch))
        return losses
