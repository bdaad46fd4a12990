"""Baseline: the job in one process, in plain PyTorch."""

import torch
from torch.nn import functional

from bench.job import read_batches, read_job
from bench.trainer import announce, make_adamw, parser, place_initial
from decod.model.stage import TORCH_DTYPES, empty_model


def main() -> None:
    """Train, and print a line an iteration."""
    arguments = parser()
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--compile", action="store_true", help="compile the blocks")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    job = read_job(options.run)
    run = job.run
    module = empty_model(run.model)
    place_initial(module, run)
    module.to(options.device, TORCH_DTYPES[run.model.dtype])
    if options.compile:
        for block in module.layers.values():
            block.compile(dynamic=False)
    adamw = make_adamw(module.parameters(), run.optimizer)
    for iteration, batch in enumerate(read_batches(job), start=1):
        adamw.zero_grad()
        losses = []
        for microbatch in batch:
            tokens_BT = torch.from_numpy(microbatch).to(options.device)
            logits_BTV = module(tokens_BT[:, :-1])
            loss = functional.cross_entropy(
                logits_BTV.reshape(-1, run.model.vocab_size), tokens_BT[:, 1:].reshape(-1)
            )
            torch.autograd.backward([loss / len(batch)])
            losses.append(loss.detach())
        adamw.step()
        announce(iteration, float(torch.stack(losses).mean()))


if __name__ == "__main__":
    main()
