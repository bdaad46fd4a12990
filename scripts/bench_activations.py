"""Trains one model with each format of activations, and compares the losses.

    python scripts/bench_activations.py
    python scripts/bench_activations.py --iterations 1000 --seeds 1 2

All stages run in this process, one after the other, with decod's own passes: what leaves a stage is
coded, and what enters one is decoded. Every format starts from the same weights and reads the same
tokens of the default corpus, which a seed draws. With one block a stage, a model has the most cuts.
The loss is the mean of the last 50 iterations.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from decod.data.corpus import default_corpus
from decod.data.dataset import Dataset
from decod.ids import MicrobatchId
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    ActivationCompression,
    ActivationsConfig,
    BatchConfig,
    OptimizerConfig,
)
from decod.train.executor import StageExecutor
from decod.train.executor_config import ExecutorConfig

NUM_LAST = 50
"""Iterations over which the loss is averaged at the end."""

BATCH = BatchConfig(sequence_length=256, microbatch_size=2, num_microbatches=4)


@dataclass
class Run:
    """The stages of one training, and its losses."""

    compression: ActivationCompression
    seed: int
    stages: list[StageExecutor]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Of processor time."""

    def iterate(self, iteration: int) -> None:
        """Train on the next batch."""
        start_s = time.process_time()
        num = BATCH.num_microbatches
        losses = [self._pass(MicrobatchId(iteration, 0, index)) for index in range(num)]
        squares = [stage.square_sum(stage.own_mean(num)) for stage in self.stages]
        for stage in self.stages:
            norm = math.sqrt(sum(squares))
            stage.propose(iteration, [], weights_total=num, gradient_norm=norm)
            stage.commit(iteration)
        self.losses.append(sum(losses) / num)
        self.seconds += time.process_time() - start_s

    def _pass(self, mb: MicrobatchId) -> float:
        first, *relays = (stage.passes for stage in self.stages)
        travelling = first.embed(mb)
        for relay in relays:
            travelling = relay.forward(mb, travelling)
        travelling, loss = first.head(mb, travelling)
        for relay in reversed(relays):
            travelling = relay.backward(mb, travelling)
        first.embed_backward(mb, travelling)
        return loss

    @property
    def token_bytes(self) -> float:
        """Bytes of a token between two stages."""
        dtype, shape = self.stages[0].config.activation_wire
        return shape.numel() * dtype.itemsize / BATCH.tokens_per_microbatch

    @property
    def last(self) -> float:
        """The loss at the end."""
        return statistics.fmean(self.losses[-NUM_LAST:])


def make_run(
    compression: ActivationCompression, seed: int, dataset: Dataset, options: argparse.Namespace
) -> Run:
    """Return a training that has not begun."""
    width = options.width
    config = ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(
                vocab_size=dataset.vocab_size,
                hidden_size=width,
                intermediate_size=8 * width // 3,
                num_hidden_layers=options.blocks,
            ),
            stages=StagesConfig(num_relay_stages=options.blocks),
            batch=BATCH,
            optimizer=OptimizerConfig(lr=1e-3, warmup_iterations=30, clip_norm=1.0),
            activations=ActivationsConfig(compression=compression),
            seed=seed,
        ),
    )
    stages = []
    for index in range(options.blocks + 1):
        stages.append(StageExecutor(config, tokens=None if index else dataset))
        stages[-1].build(index)
    return Run(compression, seed, stages)


def report(runs: Sequence[Run]) -> None:
    """Print a line for each training."""
    plain = {run.seed: run.last for run in runs if run.compression is ActivationCompression.NONE}
    print(
        "format   seed   bytes a token   first loss   last loss   beside none   CPU s / iteration"
    )
    for run in runs:
        beside = 100 * (run.last / plain[run.seed] - 1)
        print(
            f"{run.compression:8} {run.seed:4} {run.token_bytes:15.0f} {run.losses[0]:12.4f}"
            f" {run.last:11.4f} {beside:+11.3f} % {run.seconds / len(run.losses):17.2f}"
        )


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--iterations", type=int, default=300, help="of each training (default: 300)")
    add("--width", type=int, default=256, help="of the model (default: 256)")
    add("--blocks", type=int, default=4, help="relay stages of one block (default: 4)")
    add("--seeds", type=int, nargs="+", default=[1], help="one training each (default: 1)")
    add("--threads", type=int, default=1, help="of torch (default: 1)")
    options = parser.parse_args()
    if min(options.iterations, options.width, options.blocks, options.threads) < 1:
        parser.error("iterations, width, blocks and threads are counts from 1")
    return options


def main() -> None:
    """Train with all formats by turns, so that the machine's mood favours none."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    with Dataset.open(default_corpus()) as dataset:
        runs = [
            make_run(compression, seed, dataset, options)
            for seed in options.seeds
            for compression in ActivationCompression
        ]
        num = runs[0].stages[0].config.run.batch.tokens_per_microbatch * BATCH.num_microbatches
        print(f"{options.blocks} blocks of width {options.width}, {num} tokens an iteration")
        for iteration in range(1, options.iterations + 1):
            for run in runs:
                run.iterate(iteration)
            if iteration % 50 == 0:
                now = "  ".join(f"{run.compression} {run.last:.4f}" for run in runs)
                print(f"iteration {iteration}: {now}", flush=True)
        report(runs)


if __name__ == "__main__":
    main()
