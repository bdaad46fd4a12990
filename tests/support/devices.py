"""The devices of a test: the CPU by default, and CUDA with `-m gpu`.

A test with the mark `gpu` skips if no CUDA device is visible (`tests/conftest.py`). It fails if a
device is visible and does not work.
"""

from functools import cache

import pytest

CUDA = "cuda:0"

DEVICES = ("cpu", pytest.param(CUDA, marks=pytest.mark.gpu))

on_devices = pytest.mark.parametrize("device", DEVICES)
"""Run a test on each device. The test takes the argument `device`."""


@cache
def cuda_absence() -> str | None:
    """Return why no CUDA device is visible, or None if one is."""
    # Imported here, since it loads torch, and most tests do not need torch.
    from decod.worker.device import TorchCuda

    return TorchCuda().absence()
