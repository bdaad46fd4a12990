"""The pinned beginning of the arena grows with what is used, and no further than it may."""

import os

import pytest
import torch

from decod.devices import device_named
from decod.protocol.core.job_codec import Region
from decod.system import anonymous_file
from decod.worker.device import Arena, PinnedPrefix, pinned_prefix
from tests.support.devices import ACCELERATOR

MIB = 1 << 20


class Driver:
    """A driver that pins everything, until it refuses."""

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.error = error
        self.num_asked = 0

    def register(self, address: int, num_bytes: int) -> int:
        assert address not in self.pinned
        self.num_asked += 1
        if not self.error:
            self.pinned[address] = num_bytes
        return self.error

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def prefix(self, max_bytes: int) -> PinnedPrefix:
        return PinnedPrefix(max_bytes, self.register, self.unregister)


def test_it_doubles_so_that_it_grows_seldom() -> None:
    driver = Driver()
    prefix = driver.prefix(1 << 40)
    for mebibytes in range(1, 1000):
        prefix.cover(4096, mebibytes * MIB, 1 << 40)
        assert driver.pinned[4096] >= mebibytes * MIB
    assert driver.num_asked <= 5
    assert driver.pinned[4096] <= 2 * 1000 * MIB


def test_it_ends_where_the_mapping_or_the_limit_does() -> None:
    driver = Driver()
    prefix = driver.prefix(100 * MIB)
    prefix.cover(4096, MIB, 10 * MIB)
    assert driver.pinned == {4096: 10 * MIB}
    prefix.cover(8192, 90 * MIB, 1 << 40)
    assert driver.pinned == {8192: 100 * MIB}, "another mapping of the same file"
    prefix.cover(8192, 101 * MIB, 1 << 40)
    assert driver.pinned == {8192: 100 * MIB}
    assert driver.num_asked == 2


def test_a_driver_that_refuses_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(error=712)
    prefix = driver.prefix(1 << 40)
    prefix.cover(4096, MIB, 1 << 30)
    prefix.cover(4096, 900 * MIB, 1 << 30)
    assert driver.num_asked == 1
    assert "712" in caplog.text


def test_the_arena_pins_what_is_named() -> None:
    descriptor = anonymous_file("arena")
    try:
        os.ftruncate(descriptor, 4 * MIB)
        driver, arena = Driver(), Arena(descriptor)
        arena.pin(driver.prefix(1 << 40))
        tensor = arena.tensor(Region(64, 4000), torch.float32, (1000,))
        assert driver.pinned == {tensor.data_ptr() - 64: 4 * MIB}
        os.ftruncate(descriptor, 8 * MIB)
        grown = arena.tensor(Region(5 * MIB, 4000), torch.float32, (1000,))
        assert driver.pinned == {grown.data_ptr() - 5 * MIB: 8 * MIB}
    finally:
        os.close(descriptor)


@pytest.mark.gpu
def test_a_device_copies_from_the_arena() -> None:
    """CUDA pins it. Other devices copy by way of their driver's buffers."""
    descriptor = anonymous_file("arena")
    try:
        os.ftruncate(descriptor, 4 * MIB)
        arena = Arena(descriptor)
        device = device_named(ACCELERATOR)
        arena.pin(pinned_prefix(device))
        tensor = arena.tensor(Region(0, MIB), torch.uint8, (MIB,))
        assert tensor.is_pinned() == (device.pinning is not None)
        tensor.fill_(7)
        assert bool((tensor.to(device.name, non_blocking=True) == 7).all())
    finally:
        os.close(descriptor)
