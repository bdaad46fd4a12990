"""The fake accelerator notices what a GPU would only sometimes punish. Run it with
`DECOD_TEST_DEVICE=fake:0`."""

import pytest
import torch

from decod.devices import device_named
from tests.support.devices import ACCELERATOR, IS_FAKE, refused_waits

pytestmark = pytest.mark.skipif(not IS_FAKE, reason="DECOD_TEST_DEVICE is not fake:0")


def test_tensors_of_different_devices_do_not_mix() -> None:
    here, host = torch.ones(4, device=ACCELERATOR), torch.ones(4)
    with pytest.raises(RuntimeError, match="at least two devices, fake:0 and cpu"):
        here + host
    with pytest.raises(RuntimeError, match="at least two devices, fake:0 and fake:1"):
        here + host.to("fake:1")
    with pytest.raises(TypeError, match="can't convert fake:0 device type tensor to numpy"):
        here.numpy()


def test_a_copy_is_not_there_before_somebody_waits() -> None:
    value, host = torch.arange(4.0, device=ACCELERATOR), torch.zeros(4).pin_memory()
    host.copy_(value, non_blocking=True)
    assert not host.any()
    torch.accelerator.current_stream(ACCELERATOR).record_event().synchronize()
    assert host.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("records", [True, False])
def test_memory_that_another_stream_copies_from_is_recorded_there(records: bool) -> None:
    side, host = torch.Stream(ACCELERATOR), torch.zeros(4).pin_memory()
    value = torch.ones(4, device=ACCELERATOR)
    with side:
        host.copy_(value, non_blocking=True)
    if records:
        value.record_stream(side)
    del value
    if records:
        side.synchronize()
        assert host.all()
    else:
        with pytest.raises(RuntimeError, match="record_stream was not called"):
            side.synchronize()


def test_waits_for_the_whole_device_are_refused_on_demand() -> None:
    value = torch.ones((), device=ACCELERATOR)
    with refused_waits():
        for wait in (value.item, device_named(ACCELERATOR).synchronize, value.cpu):
            with pytest.raises(RuntimeError, match="waits for the whole device"):
                wait()
    assert value.item() == 1


def test_memory_is_bounded_and_counted() -> None:
    device = device_named(ACCELERATOR)
    free_bytes, allocated_bytes = device.free_bytes(), device.allocated_bytes()
    tensor = torch.empty(1 << 20, device=ACCELERATOR)
    assert device.allocated_bytes() - allocated_bytes == 4 << 20
    assert free_bytes - device.free_bytes() == 4 << 20
    del tensor
    assert device.free_bytes() == free_bytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free_bytes, device=ACCELERATOR)
