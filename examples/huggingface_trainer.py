"""Hugging Face's Trainer: hosts train a small GPT-2 from scratch to count.

In one terminal:  python examples/huggingface_trainer.py
In another:       python examples/huggingface_trainer.py --join JOIN_STRING

Needs transformers and accelerate: pip install -e '.[examples]'
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from decod.optimizer.huggingface import CollaborationCallback

BATCH_SIZE = 8
NUM_TOKENS, LENGTH = 64, 32


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that rise by one, or by two, or by three."""

    def __len__(self) -> int:
        return 1 << 16

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin, step = index % NUM_TOKENS, 1 + index // NUM_TOKENS % 3
        tokens = (begin + step * torch.arange(LENGTH)) % NUM_TOKENS
        return {"input_ids": tokens, "labels": tokens}


class ShowRounds(TrainerCallback):
    """Shows the run's progress where the Trainer logs."""

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        logs = rest["logs"]
        if "loss" in logs:
            text = f"round {logs['round']}: loss {float(logs['loss']):.3f}, {logs['hosts']} hosts"
            print(text, flush=True)


def main() -> None:
    """Train with other hosts until all steps are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--join", help="join string of the first host; absent: this is the first")
    parser.add_argument("--listen", default="127.0.0.1:0", help="0.0.0.0:7700 to let others in")
    parser.add_argument("--steps", type=int, default=400, help="steps of this host")
    options = parser.parse_args()
    sizes = GPT2Config(vocab_size=NUM_TOKENS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(sizes)
    collaboration = CollaborationCallback(
        run=None if options.join else "counting",
        join=options.join,
        target_batch_size=64,
        listen=options.listen,
        verbose=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=options.steps,
            learning_rate=2e-3,
            logging_steps=20,
            data_seed=torch.seed() % (1 << 31),  # Each host has an order of its own.
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Counting(),
            callbacks=[collaboration, ShowRounds()],
        )
        try:
            trainer.train()
        except KeyboardInterrupt:
            print("leaving the run")
    run = collaboration.optimizer
    if run is not None:
        print(f"contributed {run.samples_contributed} samples, round {run.round}")


_AsWritten = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
