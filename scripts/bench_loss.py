"""Compares the loss in chunks with the loss in one piece: memory beyond the weights, and time.

    python scripts/bench_loss.py
    python scripts/bench_loss.py --width 2048 --positions 4096 --dtype bfloat16

Both run forward and backward on the CPU. Memory is the most that torch's allocator gave out at a
time, the gradients of the head and of its input included. Time is the processor's.
"""

import argparse
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from decod.model.autograd import linear_cross_entropy


def in_one_piece(hidden_ND: Tensor, table_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return torch's loss of all logits."""
    logits_NV = functional.linear(hidden_ND, table_VD)
    return functional.cross_entropy(logits_NV.float(), targets_N)


def measure(run: Callable[[], None]) -> tuple[int, float]:
    """Return the peak of memory in bytes, and the time in seconds."""
    start_s = time.process_time()
    run()
    busy_s = time.process_time() - start_s
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(sizes)), busy_s


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vocabulary", type=int, default=128_256, help="tokens (default: 128256, Llama 3's)")
    add("--width", type=int, default=256, help="of the model (default: 256)")
    add("--positions", type=int, default=1024, help="of a microbatch (default: 1024)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--threads", type=int, default=1, help="of torch (default: 1)")
    options = parser.parse_args()
    if min(options.vocabulary, options.width, options.positions, options.threads) < 1:
        parser.error("vocabulary, width, positions and threads are counts from 1")
    return options


def main() -> None:
    """Measure both."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    hidden_ND = torch.randn(options.positions, options.width).to(dtype).requires_grad_()
    table_VD = (0.02 * torch.randn(options.vocabulary, options.width)).to(dtype).requires_grad_()
    targets_N = torch.randint(options.vocabulary, (options.positions,))
    print("loss           memory in MiB   CPU s")
    for name, loss in (("in chunks", linear_cross_entropy), ("in one piece", in_one_piece)):

        def run(loss: Callable[..., Tensor] = loss) -> None:
            hidden_ND.grad = table_VD.grad = None
            torch.autograd.backward([loss(hidden_ND, table_VD, targets_N)])

        peak_bytes, busy_s = measure(run)
        print(f"{name:12} {peak_bytes / 2**20:15.0f} {busy_s:7.2f}", flush=True)


if __name__ == "__main__":
    main()
