"""Baseline: the job in `torch.distributed.pipelining`, 1F1B over gloo, one process a stage.

The embedding is in the first stage. Norm, head and loss are in the last stage, which gets the
fewest blocks, because the head costs about as much as a block.
"""

import argparse
import warnings
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from typing_extensions import override

from bench.job import NUM_PIPELINE_STAGES, Batch, Job, read_batches, read_job
from bench.trainer import announce, make_adamw, parser, place_initial
from decod.model.stage import FirstStage, Stage
from decod.run.run_config import RunConfig


class Entry(nn.Module):
    """Embedding and the first blocks."""

    def __init__(self, stage: FirstStage) -> None:
        super().__init__()
        self.stage = stage

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.stage.embed(tokens_BT)


class Exit(nn.Module):
    """The last blocks, norm and head."""

    def __init__(self, stage: FirstStage) -> None:
        super().__init__()
        self.stage = stage

    @override
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.stage.logits(self.stage.run_blocks(hidden_BTD))


def cut_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Return the blocks of every stage. Sizes differ by at most 1, and larger ones come first."""
    size, num_longer = divmod(num_blocks, num_stages)
    starts = [index * size + min(index, num_longer) for index in range(num_stages + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(num_stages)]


def build_module(run: RunConfig, rank: int) -> nn.Module:
    """Return a rank's module. Parameters of the other end of the model are frozen."""
    blocks = cut_blocks(run.model.num_hidden_layers, NUM_PIPELINE_STAGES)[rank]
    is_end = rank in (0, NUM_PIPELINE_STAGES - 1)
    with torch.device("meta"):
        stage = FirstStage(run.model, blocks) if is_end else Stage(run.model, blocks)
    place_initial(stage, run)
    if not isinstance(stage, FirstStage):
        return stage
    assert stage.lm_head is not None
    unused = [stage.inner.table()]
    if rank == 0:
        unused = [stage.lm_head.weight, *stage.get_submodule("inner.norm").parameters()]
    for parameter in unused:
        parameter.requires_grad = False
    return Entry(stage) if rank == 0 else Exit(stage)


def _loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _step(schedule: Schedule1F1B, rank: int, batch: Batch) -> float:
    """Run one iteration's microbatches; return the mean loss on the last rank, else 0."""
    if rank == 0:
        tokens = torch.cat([torch.from_numpy(microbatch[:, :-1]) for microbatch in batch])
        schedule.step(tokens, return_outputs=False)
        return 0.0
    if rank < NUM_PIPELINE_STAGES - 1:
        schedule.step(return_outputs=False)
        return 0.0
    targets = torch.cat([torch.from_numpy(microbatch[:, 1:]) for microbatch in batch])
    losses: list[Tensor] = []
    schedule.step(target=targets, losses=losses, return_outputs=False)
    return sum(float(loss.detach()) for loss in losses) / len(losses)


def train(job: Job, rank: int) -> None:
    """Train as one rank. The last rank prints a line an iteration."""
    run = job.run
    module = build_module(run, rank)
    adamw = make_adamw((p for p in module.parameters() if p.requires_grad), run.optimizer)
    stage = PipelineStage(module, rank, NUM_PIPELINE_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, run.batch.num_microbatches, loss_fn=_loss)
    for iteration, batch in enumerate(read_batches(job), start=1):
        adamw.zero_grad()
        loss = _step(schedule, rank, batch)
        adamw.step()
        if rank == NUM_PIPELINE_STAGES - 1:
            announce(iteration, loss)


def _parse() -> argparse.Namespace:
    options = parser()
    options.add_argument("--rank", type=int, required=True)
    options.add_argument("--rendezvous", type=Path, required=True)
    return options.parse_args()


def main() -> None:
    """Join the group and train."""
    options = _parse()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=options.rank,
        world_size=NUM_PIPELINE_STAGES,
    )
    try:
        train(read_job(options.run), options.rank)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
