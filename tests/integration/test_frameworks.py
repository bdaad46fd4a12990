"""Hugging Face's Trainer and Lightning with decod's callback and strategy: what was seen counts."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decod.errors import ConfigError
from tests.support.loops import make_model
from tests.support.quick import first_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install '.[examples]'")


def away(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((one - two).detach().abs().max()) for one, two in pairs)


# --- Hugging Face ---------------------------------------------------------------------------------


def make_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def texts(lengths: list[int], width: int = 16) -> list[dict[str, Tensor]]:
    """Texts with padding, which is no target."""
    draws, found = torch.Generator().manual_seed(3), []
    for length in lengths:
        ids = torch.randint(0, 64, (width,), generator=draws)
        labels = ids.clone()
        labels[length:] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def train_with_callback(model: Any, data: Any, folder: Path, callback: Any, **fields: Any) -> None:
    from transformers import Trainer, TrainingArguments

    usual = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**usual, **fields})
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()


def callback_of(folder: Path, **fields: Any) -> Any:
    from decod.optimizer.huggingface import CollaborationCallback

    place = {"run": "t", "listen": "127.0.0.1:0", "state_dir": folder / "state", "verbose": False}
    return CollaborationCallback(**{**place, **fields})


@pytest.mark.parametrize("accumulated", first_of([2, 1]))
@pytest.mark.parametrize("clip", first_of([0.05, 0.0]))
def test_the_trainer_takes_the_step_on_all_tokens_that_are_targets(
    tmp_path: Path, accumulated: int, clip: float
) -> None:
    """Batches have unequal numbers of them, and the last one is smaller. The average is clipped."""
    require("transformers", "accelerate")
    model, lengths = make_gpt(), [16, 3, 9, 16, 2, 5, 16, 12, 7, 4]
    alone, data = copy.deepcopy(model), texts(lengths)
    num_targets = sum(lengths) - len(lengths)
    callback = callback_of(tmp_path, target_batch_size=num_targets, count="tokens")
    train_with_callback(
        model, data, tmp_path, callback, gradient_accumulation_steps=accumulated, max_grad_norm=clip
    )
    batch = {key: torch.stack([each[key] for each in data]) for key in ("input_ids", "labels")}
    alone(**batch).loss.backward()
    if clip:
        assert nn.utils.clip_grad_norm_(alone.parameters(), clip) > 2 * clip
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    optimizer = callback.optimizer
    assert (optimizer.round, optimizer.samples_contributed) == (1, num_targets)
    assert away(model, alone) < 1e-6


def test_the_trainers_schedule_goes_over_rounds(tmp_path: Path) -> None:
    require("transformers", "accelerate")
    model = make_gpt()
    rates: list[float] = []
    callback = callback_of(tmp_path, target_batch_size=8, num_rounds=4)
    callback.on_optimizer_step = lambda *_, **rest: rates.append(
        rest["optimizer"].param_groups[0]["lr"]
    )
    fields = {"lr_scheduler_type": "linear", "warmup_steps": 2, "num_train_epochs": 100}
    train_with_callback(model, texts([16] * 8), tmp_path, callback, **fields)
    assert callback.optimizer.round == 4, "training ends with the last round"
    assert rates == pytest.approx([0.0, 0.25, 0.25, 0.5, 0.5, 0.25, 0.25, 0.0])


def test_a_schedule_of_unknown_length_is_refused(tmp_path: Path) -> None:
    require("transformers", "accelerate")
    callback = callback_of(tmp_path, target_batch_size=8)
    with pytest.raises(ConfigError, match="lr_scheduler_type is cosine, without num_rounds"):
        train_with_callback(
            make_gpt(), texts([16] * 8), tmp_path, callback, lr_scheduler_type="cosine"
        )


# --- Lightning ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clip", first_of([0.05, None]))
@pytest.mark.parametrize("batches", first_of([(3, 4), (4, 2), (8, 1)]))
def test_lightning_takes_the_step_on_all_samples(
    tmp_path: Path, batches: tuple[int, int], clip: float | None
) -> None:
    """Ten samples make no whole number of batches, and batches no whole number of steps."""
    size, accumulated = batches
    require("lightning")
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from decod.optimizer.lightning import CollaborationStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(torch.float32)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.model(inputs), targets)

    draws = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(10, 5, generator=draws), torch.randn(10, 3, generator=draws)
    module = Module()
    alone = copy.deepcopy(module.model)
    strategy = CollaborationStrategy(
        run="t",
        target_batch_size=10,
        batch_size_per_step=size * accumulated,
        device="cpu",
        listen="127.0.0.1:0",
        state_dir=tmp_path / "state",
        verbose=False,
    )
    lightning.Trainer(
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=size))
    nn.functional.mse_loss(alone(inputs), targets).backward()
    if clip:
        assert nn.utils.clip_grad_norm_(alone.parameters(), clip) > 2 * clip
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    assert strategy.optimizer is not None
    assert (strategy.optimizer.round, strategy.optimizer.samples_contributed) == (1, 10)
    assert away(module.model, alone) < 1e-6
    assert strategy.optimizer.param_groups[0]["lr"] == pytest.approx(0.05), "a round has passed"
