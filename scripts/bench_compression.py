"""Measure compression against a copy of memory: `python scripts/bench_compression.py`.

It prints GB of float32 numbers a second, on one core of the CPU and on CUDA where there is one. A
method's line holds one member's work for one average: coding its own numbers, and decoding the
mean. The parameters are those of a stage of a Llama with `--width`.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from decod.compression.codecs import Noise, decode, encode
from decod.compression.contribution import CodedContribution
from decod.compression.plan import (
    BlockCoding,
    Coding,
    CompressionConfig,
    FloatCoding,
    Method,
    Plan,
    RotatedCoding,
    Shape,
    SparseCoding,
    make_plan,
)

NUM_REPEATS = 5
CODINGS: dict[str, Coding] = {
    "float32": FloatCoding("float32"),
    "fp16": FloatCoding("float16"),
    "bf16": FloatCoding("bfloat16"),
    "int8": BlockCoding(8),
    "int4": BlockCoding(4),
    "cocktail": SparseCoding(stride=10, num_kept=20),
    "rotated": RotatedCoding(4096, 1024),
    "... noisy": RotatedCoding(4096, 1024),
}
NOISE = {"... noisy": Noise(1)}


def best_s(device: str, work: Callable[[], object]) -> float:
    """Return the shortest time of some repeats, in seconds."""
    found = []
    for _ in range(NUM_REPEATS):
        _wait(device)
        start_s = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - start_s)
    return min(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bench_codings(device: str, num_elements: int) -> None:
    """Print a line for each format."""
    values = torch.randn(num_elements, device=device)
    target, gigabytes = torch.empty_like(values), 4e-9 * num_elements
    copy = gigabytes / best_s(device, lambda: target.copy_(values))
    print(f"{device}: {4 * num_elements / 1e6:.0f} MB, a copy takes {copy:.1f} GB/s")
    print("format     bytes/element   encode GB/s   decode GB/s   both GB/s   both / copy")
    for name, coding in CODINGS.items():
        coded = encode(coding, values)
        encode_s = best_s(device, partial(encode, coding, values, noise=NOISE.get(name)))
        decode_s = best_s(device, partial(decode, coding, coded, num_elements))
        both = gigabytes / (encode_s + decode_s)
        print(
            f"{name:10} {coded.numel() / num_elements:13.4f} {gigabytes / encode_s:13.2f}"
            f" {gigabytes / decode_s:13.2f} {both:11.2f} {both / copy:13.3f}"
        )


def average_alone(plan: Plan, sum_P: Tensor, guide_P: Tensor) -> None:
    """Do one member's work for an average, with its own numbers in place of the mean."""
    member = CodedContribution(plan, sum_P, guide_P, seed=1)
    for phase in range(len(plan.phases)):
        member.means.take(phase, member.parts(phase, 1))
    member.means.average()
    member.residual()


def bench_methods(device: str, width: int, rank: int) -> None:
    """Print a line for each method, on the matrices of two blocks."""
    block: tuple[Shape, ...] = ((width,),) * 2 + ((width, width),) * 4 + ((4 * width, width),) * 3
    shapes = 2 * block
    plans = {m: make_plan(shapes, CompressionConfig(method=m, rank=rank)) for m in Method}
    num_elements = plans[Method.NONE].num_elements
    sum_P = torch.randn(num_elements, device=device)
    guide_P = torch.randn(num_elements, device=device)
    print(f"{device}: one average of {num_elements / 1e6:.1f} M parameters, rank {rank}")
    print("method          times smaller        ms      GB/s")
    for method, plan in plans.items():
        seconds = best_s(device, partial(average_alone, plan, sum_P, guide_P))
        smaller = 4 * num_elements / plan.num_bytes
        rate = 4e-9 * num_elements / seconds
        print(f"{method.value:15} {smaller:13.1f} {1e3 * seconds:9.1f} {rate:9.2f}", flush=True)


def main() -> None:
    """Measure on every device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24, help="numbers to code")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--rank", type=int, default=64, help="of the factors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        bench_codings(device, arguments.elements)
        bench_methods(device, arguments.width, arguments.rank)


if __name__ == "__main__":
    main()
