"""One stage on two devices of the host, beside the same stage on one."""

import torch
from torch import Tensor

from gpu.relay import Relay, run_of
from gpu.result import Measure
from gpu.setting import Setting

_MICROBATCHES = 4
ERROR_MAX = 1e-2
"""Of the sum of gradients, relative: passes in bfloat16 round apart on matrices of other shapes."""


def check_ranks(setting: Setting) -> list[Measure]:
    """Compare gradients and speed. With one CUDA device there is nothing to measure."""
    devices = "cuda:0,cuda:1" if setting.on_cuda else "cpu,cpu"
    if setting.on_cuda and torch.cuda.device_count() < 2:
        return [Measure("devices", 1)]
    one, two = (_measured(setting, each) for each in (setting.device, devices))
    error = float((two[0] - one[0]).norm() / one[0].norm())
    return [
        Measure("devices", 2),
        Measure("gradients, difference", error, at_most=ERROR_MAX),
        Measure("time of passes, one over two devices", one[1] / two[1]),
        Measure("sums and weights travel, with the step", two[2], "s"),
    ]


def _measured(setting: Setting, device: str) -> tuple[Tensor, float, float]:
    """Return the sum of gradients, and the seconds of passes and of a step."""
    relay = Relay(setting, run_of(setting, "1b", setting.pick(4, 2), 4), device)

    def passes() -> None:
        relay.executor.reset()
        for index in range(_MICROBATCHES):
            relay.forward(index)
            relay.backward(index)

    passes_s = setting.seconds(passes)
    (sum_P,) = relay.executor.gather(1)
    found = sum_P.to("cpu", torch.float64)
    step_s = setting.seconds(lambda: relay.step(_MICROBATCHES))
    relay.close()
    return found, passes_s, step_s
