"""Bits and speeds of single operations: agreement of devices, compression, copies."""

from functools import partial

import torch
from torch import Tensor

from decod.compression import lowrank
from decod.compression.codecs import decode, encode
from decod.compression.plan import BlockCoding, Coding, FloatCoding, SparseCoding
from decod.run.training_config import OptimizerConfig
from decod.train.copies import Departure, arrived, arriving
from decod.train.optimizers import OptimizerState, Segment, optimizer_step
from decod.train.reduction import reduce_part
from gpu.result import Measure
from gpu.setting import Setting

CODINGS: dict[str, Coding] = {
    "fp16": FloatCoding("float16"),
    "int8": BlockCoding(8),
    "int4": BlockCoding(4),
    "cocktail": SparseCoding(stride=10, num_kept=20),
}


# --- agreement ------------------------------------------------------------------------------------


def check_agreement(setting: Setting) -> list[Measure]:
    """Count the elements in which this device and the CPU differ, where members must agree."""
    generator = torch.Generator().manual_seed(0)
    size = setting.pick(1 << 24, 1 << 12)
    gradients = [torch.randn(size, generator=generator) for _ in range(3)]
    found = {"AdamW": _steps, "mean of a part": _means}
    different = {
        name: _num_different(of_device("cpu", gradients), of_device(setting.device, gradients))
        for name, of_device in found.items()
    }
    for name, coding in CODINGS.items():
        here = encode(coding, gradients[0].to(setting.device), seed=1)
        there = encode(coding, gradients[0], seed=1)
        different[f"{name}, coded"] = _num_different(there, here)
        different[f"{name}, decoded"] = _num_different(
            decode(coding, there, size, seed=1), decode(coding, here, size, seed=1)
        )
    rows, rank = setting.pick(4096, 64), setting.pick(64, 4)
    left, right = (torch.randn(rows, rank, generator=generator) for _ in range(2))
    left = lowrank.agreed_left(left)
    different["product of factors"] = _num_different(
        lowrank.agreed_product(left, right),
        lowrank.agreed_product(left.to(setting.device), right.to(setting.device)),
    )
    different["orthonormal factor"] = _num_different(
        lowrank.agreed_left(right), lowrank.agreed_left(right.to(setting.device))
    )
    return [
        Measure(f"elements that differ: {name}", num, "", at_most=0)
        for name, num in different.items()
    ]


def _num_different(left: Tensor, right: Tensor) -> int:
    here = right.cpu()
    assert left.shape == here.shape
    return int((left != here).sum())


def _steps(device: str, gradients: list[Tensor]) -> Tensor:
    """Return the weights after two steps."""
    here = [gradient.to(device) for gradient in gradients]
    old = OptimizerState(here[0], (torch.zeros_like(here[0]), torch.zeros_like(here[0])))
    new = old.empty_like()
    segments = [Segment(0, 7, decayed=False), Segment(7, len(here[0]), decayed=True)]
    for iteration, gradient in enumerate(here[1:], 1):
        optimizer = OptimizerConfig(lr=1e-3, warmup_iterations=3)
        optimizer_step(
            old, new, gradient, segments=segments, optimizer=optimizer, iteration=iteration
        )
        old, new = new, old
    return old.weights


def _means(device: str, gradients: list[Tensor]) -> Tensor:
    return reduce_part(gradients, weights_total=7, dtype=torch.float32, device=device)


# --- compression ----------------------------------------------------------------------------------


def check_compression(setting: Setting) -> list[Measure]:
    """Measure gigabytes of float32 numbers a second, beside a copy in the device's memory."""
    size = setting.pick(1 << 28, 1 << 14)
    values = torch.randn(size, device=setting.device)
    other, gigabytes = torch.empty_like(values), 4e-9 * size
    copy = gigabytes / setting.seconds(lambda: other.copy_(values))
    found = [Measure("copy within the device", copy, "GB/s")]

    for name, coding in CODINGS.items():
        coded = encode(coding, values, seed=1)
        encode_s = setting.seconds(partial(encode, coding, values, seed=1))
        decode_s = setting.seconds(partial(decode, coding, coded, size, seed=1))
        found += [
            Measure(f"encode {name}", gigabytes / encode_s, "GB/s"),
            Measure(f"decode {name}", gigabytes / decode_s, "GB/s"),
        ]
    return found


# --- copies ---------------------------------------------------------------------------------------


def check_copies(setting: Setting) -> list[Measure]:
    """Measure copies from and to pinned memory, and how much of their time computing hides."""
    device, size = setting.device, setting.pick(1 << 28, 1 << 14)
    host, target = (
        torch.zeros(size, dtype=torch.uint8, pin_memory=setting.on_cuda) for _ in range(2)
    )
    pageable, here = torch.zeros(size, dtype=torch.uint8), host.to(device)
    width = setting.pick(8192, 64)
    matrix = torch.randn(width, width, device=device)

    def copy_in() -> Tensor:
        with arriving(host, device):
            result = host.to(device, non_blocking=True)
        return arrived(result)

    def compute() -> None:
        for _ in range(setting.pick(4, 2)):
            matrix @ matrix

    def both() -> None:
        departure = Departure(target, here)
        compute()
        copy_in()
        departure.wait()

    gigabytes = 1e-9 * size
    in_s, out_s = setting.seconds(copy_in), setting.seconds(lambda: Departure(target, here).wait())
    compute_s, both_s = setting.seconds(compute), setting.seconds(both)
    slow_s = setting.seconds(lambda: pageable.to(device))
    hidden = (compute_s + in_s + out_s - both_s) / min(compute_s, in_s + out_s)
    return [
        Measure("to the device, pinned", gigabytes / in_s, "GB/s"),
        Measure("from the device, pinned", gigabytes / out_s, "GB/s"),
        Measure("to the device, not pinned", gigabytes / slow_s, "GB/s"),
        Measure("hidden behind computing", hidden, "", at_least=0.5 if setting.on_cuda else None),
    ]
