"""A job's time is the device's."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decod.devices import device_named
from decod.worker.device import DeviceClock
from tests.support.devices import ACCELERATOR


@dataclass
class Instant:
    """An event of a device that a test drives."""

    at_s: float
    passed: bool = True

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, later: "Instant") -> float:
        return 1e3 * (later.at_s - self.at_s)


def clock_of(*instants: Instant) -> DeviceClock:
    """Returns a clock with the next instants of a device."""
    coming: list[Any] = list(instants)
    return DeviceClock(lambda: coming.pop(0))


def test_a_job_does_not_count_what_the_device_did_before() -> None:
    clock = clock_of(Instant(2.0), Instant(5.0, passed=False))
    clock.begin()
    clock.end()
    assert clock.busy_s(wall_s=4.5, copy_s=0.5) == pytest.approx(3.5)
    assert clock.busy_s(wall_s=1.0, copy_s=0.5) == 1.0, "nothing takes longer than it took"


def test_a_job_that_told_the_device_nothing_has_the_hosts_time() -> None:
    clock = clock_of(Instant(2.0))
    assert clock.busy_s(1.5, 0.0) == 1.5
    clock.begin()
    assert clock.busy_s(1.5, 0.0) == 1.5


def test_a_device_without_a_clock_has_the_hosts_time() -> None:
    clock = DeviceClock(device_named("cpu").instant)
    clock.begin()
    clock.end()
    assert clock.busy_s(1.5, 0.0) == 1.5


@pytest.mark.gpu
def test_the_devices_clock_measures_its_work() -> None:
    clock = DeviceClock(device_named(ACCELERATOR).instant)
    matrix = torch.randn(2048, 2048, device=ACCELERATOR)
    clock.begin()
    for _ in range(10):
        matrix = (matrix @ matrix).div_(2048)
    clock.end()
    assert 0 < clock.busy_s(wall_s=60.0, copy_s=0.0) < 60.0
