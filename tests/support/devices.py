"""The devices of a test: the CPU, and an accelerator.

The accelerator is CUDA's first device, for tests with the mark `gpu` and `-m gpu`. Such a test
skips if no CUDA device is visible (`tests/conftest.py`). It fails if one is visible and does not
work. With `DECOD_TEST_DEVICE=fake:0` in the environment it is that of `fake_accelerator`, on which
all those tests run without a GPU, and without the mark.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

ACCELERATOR = os.environ.get("DECOD_TEST_DEVICE", "cuda:0")
IS_FAKE = ACCELERATOR.startswith("fake")

DEFAULT_DEVICE = ACCELERATOR if IS_FAKE else "cpu"
"""For tests that name none."""

_GPU = pytest.param(ACCELERATOR, marks=pytest.mark.gpu)
DEVICES = (_GPU,) if IS_FAKE else ("cpu", _GPU)

on_devices = pytest.mark.parametrize("device", DEVICES)
"""Run a test on each device. The test takes the argument `device`."""


@contextmanager
def refused_waits() -> Iterator[None]:
    """Raise at whatever waits for the whole accelerator, and not for an event."""
    import torch

    if IS_FAKE:
        torch.ops.fake_accelerator.refuse_waits(True)
    else:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if IS_FAKE:
            torch.ops.fake_accelerator.refuse_waits(False)
        else:
            torch.cuda.set_sync_debug_mode("default")


@cache
def cuda_absence() -> str | None:
    """Return why no CUDA device is visible, or None if one is."""
    # Imported here, since it loads torch, and most tests do not need torch.
    from decod.devices import Cuda

    return Cuda("cuda:0").absence()
