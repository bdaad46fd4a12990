"""Lightning: hosts learn to tell the pictures of `plain_loop.py` apart.

In one terminal:  python examples/lightning_module.py
In another:       python examples/lightning_module.py --join JOIN_STRING

Needs lightning: pip install -c constraints.txt -e '.[examples]'
"""

import argparse
from collections.abc import Iterator

import lightning
import torch
from plain_loop import BATCH_SIZE, make_model, pictures
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

import decod


class Pictures(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches without end. Each host draws its own."""

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator()
        draws.seed()
        while True:
            yield pictures(BATCH_SIZE, draws)


class Recogniser(lightning.LightningModule):
    """A model that trains together with other hosts.

    Args:
        join: Join string of the first host. None: this is the first.
        listen: Address and port to listen on.
    """

    def __init__(self, join: str | None, listen: str) -> None:
        super().__init__()
        self._join, self._listen = join, listen
        self.model = make_model()
        self.collaboration: decod.CollaborativeOptimizer | None = None
        self._shown = 0

    @override
    def configure_optimizers(self) -> decod.CollaborativeOptimizer:
        self.collaboration = decod.CollaborativeOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=1e-3),
            run=None if self._join else "pictures",
            join=self._join,
            target_batch_size=512,
            batch_size_per_step=BATCH_SIZE,
            listen=self._listen,
            verbose=False,
        )
        if self.collaboration.join_string:
            print(f"join string: {self.collaboration.join_string}", flush=True)
        return self.collaboration

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        run = self.collaboration
        if run is not None and run.round > self._shown:
            self._shown = run.round
            text = f"round {run.round}: loss {loss.item():.3f}, {run.num_peers} hosts"
            print(text, flush=True)
        return loss

    @override
    def on_fit_end(self) -> None:
        run = self.collaboration
        if run is not None:
            print(f"contributed {run.samples_contributed} samples, round {run.round}")
            run.close()


def main() -> None:
    """Train with other hosts until all steps are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--join", help="join string of the first host; absent: this is the first")
    parser.add_argument("--listen", default="127.0.0.1:0", help="0.0.0.0:7700 to let others in")
    parser.add_argument("--steps", type=int, default=2000, help="steps of this host")
    options = parser.parse_args()
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(Pictures(), batch_size=None)
    trainer.fit(Recogniser(options.join, options.listen), batches)


_AsWritten = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
