"""Lightning: hosts learn to tell the pictures of `plain_loop.py` apart.

In one terminal:  python examples/lightning_module.py
In another:       python examples/lightning_module.py --join JOIN_STRING

Needs lightning: pip install -e '.[examples]'
"""

import argparse
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from plain_loop import BATCH_SIZE, make_model, pictures
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

import decod
from decod.optimizer.lightning import CollaborationStrategy


class Pictures(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches without end. Each host draws its own."""

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator()
        draws.seed()
        while True:
            yield pictures(BATCH_SIZE, draws)


class Recogniser(lightning.LightningModule):
    """A model. It knows nothing of other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.model(inputs), targets)


class ShowRounds(lightning.Callback):
    """Shows the run's progress."""

    def __init__(self) -> None:
        self._shown = 0

    @override
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *rest: Any
    ) -> None:
        run = trainer.optimizers[0]
        if isinstance(run, decod.CollaborativeOptimizer) and run.round > self._shown:
            self._shown = run.round
            loss = trainer.callback_metrics.get("loss", rest[0]["loss"])
            print(f"round {run.round}: loss {loss.item():.3f}, {run.num_peers} hosts", flush=True)


def main() -> None:
    """Train with other hosts until all steps are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--join", help="join string of the first host; absent: this is the first")
    parser.add_argument("--listen", default="127.0.0.1:0", help="0.0.0.0:7700 to let others in")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of this host")
    options = parser.parse_args()
    collaboration = CollaborationStrategy(
        run=None if options.join else "pictures",
        join=options.join,
        target_batch_size=512,
        batch_size_per_step=BATCH_SIZE,
        listen=options.listen,
        verbose=False,
    )
    trainer = lightning.Trainer(
        strategy=collaboration,
        callbacks=[ShowRounds()],
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(Pictures(), batch_size=None)
    trainer.fit(Recogniser(), batches)
    run = collaboration.optimizer
    if run is not None:
        print(f"contributed {run.samples_contributed} samples, round {run.round}")


_AsWritten = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
