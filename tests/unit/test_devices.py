"""What kinds of devices differ in, as far as that can be told without them."""

import pytest
import torch

from decod.config.node_config import check_device
from decod.devices import KINDS, Accelerator, Cuda, device_named


def test_every_kind_can_be_asked_for_by_its_name() -> None:
    for kind in KINDS:
        check_device(kind)
        assert type(device_named(kind)) is KINDS[kind]
    assert type(device_named("npu:0")) is Accelerator


def test_a_device_of_which_torch_says_nothing_has_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of CUDA's, in torch 2.13."""

    def unknown(_: str) -> None:
        raise RuntimeError("Backend doesn't support getting device capabilities.")

    monkeypatch.setattr(torch.accelerator, "get_device_capability", unknown)
    assert Cuda("cuda:77").has_float64


def test_a_device_whose_first_call_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch puts some calls off, and raises an error of its own for those."""
    from decod.errors import HardwareError
    from decod.worker.device import try_out

    def fail(*_: object, **__: object) -> None:
        raise torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(HardwareError, match="E-HW-002 device cuda:0 cannot be used"):
        try_out(device_named("cuda:0"))
