"""Which device a compute process uses, on hosts with an accelerator, a broken one, and none."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decod.devices import Cuda, Device, device_named, first_accelerator
from decod.errors import ConfigError, HardwareError
from decod.worker import device as device_module
from decod.worker.configure import device_facts, parse_device
from decod.worker.device import (
    ChosenDevice,
    cap_memory,
    choose_device,
    free_bytes,
    try_out,
)
from tests.support.devices import ACCELERATOR, cuda_absence

CPU = device_named("cpu")


class Host:
    """A host of a test's choice.

    Args:
        missing: Why no accelerator is visible.
        broken: Why one that is visible does not work.
    """

    def __init__(self, missing: str | None = None, broken: str | None = None) -> None:
        self.missing = missing
        self.broken = broken
        self.tried: list[str] = []

    def first(self) -> Device:
        return self.named("cuda:0")

    def named(self, name: str) -> Device:
        host = self

        class Named(Device):
            kind = "cuda"

            def absence(self) -> str | None:
                return host.missing

            def synchronize(self) -> None:
                host.tried.append(name)
                if why := host.missing or host.broken:
                    raise RuntimeError(why)

        return Named(name)

    def choose(self, asked: str, monkeypatch: pytest.MonkeyPatch) -> ChosenDevice:
        """Choose a device. The CPU computes for all of them."""
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size, device="cpu"))
        monkeypatch.setattr(device_module, "device_of", lambda _: self.named("cuda:0"))
        return choose_device(asked, self.first, self.named)


HOSTS = pytest.mark.parametrize("host", [Host(), Host(missing="none"), Host(broken="it is")])


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "name", "text", "tried"),
    [
        (Host(), "cuda:0", "cuda:0, CPU", ["cuda:0"]),
        (Host(missing="none is visible"), "cpu", "CPU (none is visible)", []),
        (
            Host(broken="no kernel image"),
            "cpu",
            "CPU (CUDA is there but does not work: no kernel image)",
            ["cuda:0"],
        ),
    ],
    ids=["works", "missing", "broken"],
)
def test_auto_takes_an_accelerator_that_works_and_else_the_cpu_and_says_why(
    host: Host, name: str, text: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = host.choose("auto", monkeypatch)
    assert (chosen.name, chosen.text) == (name, text)
    assert host.tried == tried


def test_auto_takes_the_cpu_of_a_torch_for_cpus_alone() -> None:
    chosen = choose_device("auto", lambda: None)
    assert chosen == ChosenDevice(CPU, "CPU (this torch is built for CPUs alone)")


@HOSTS
def test_the_cpu_is_taken_without_a_look_at_others(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial would take memory of a device that the operator keeps for something else."""
    assert host.choose("cpu", monkeypatch) == ChosenDevice(CPU, "CPU")
    assert host.tried == []


@pytest.mark.parametrize("asked", ["cuda", "cuda:1"])
def test_a_device_that_is_named_is_taken_if_it_works(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    host.choose(asked, monkeypatch)
    assert host.tried == [asked]


@pytest.mark.parametrize("asked", ["cuda", "cuda:1"])
@pytest.mark.parametrize("host", [Host(missing="none"), Host(broken="it is")])
def test_nothing_takes_the_place_of_a_device_that_is_named(
    asked: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HardwareError, match=f"E-HW-002 device {asked} cannot be used"):
        host.choose(asked, monkeypatch)


@pytest.mark.parametrize("asked", ["", "Auto", "cuda:x", "rm -rf", 3, None])
def test_what_names_no_device_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match="a device's name with a number"):
        parse_device({"device": asked})


def test_the_node_is_told_what_the_device_is_and_what_is_free_on_it() -> None:
    facts = device_facts(parse_device({"device": "cpu"}))
    assert facts.pop("memory_bytes") > 0
    assert facts.pop("host_memory_bytes") > 0
    assert facts.pop("built_for")
    told = {"torch": torch.__version__, "device": "cpu", "device_text": "CPU"}
    assert facts == told | {"device_uuid": None}


def test_no_more_memory_is_free_than_the_operator_allows() -> None:
    device = parse_device({"device": "cpu"})
    assert device_facts(device, 1 << 20)["memory_bytes"] == 1 << 20
    assert device_facts(device, 1 << 60)["memory_bytes"] < 1 << 60


def test_torch_is_told_the_part_of_a_device_that_its_tensors_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 << 30, 40 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given)
    )
    gpu = Cuda("cuda:1")
    cap_memory(gpu, None)
    cap_memory(CPU, 1 << 30)
    assert told == []
    cap_memory(gpu, 10 << 30)
    # Half a GiB is for CUDA itself, which torch does not count.
    assert told == [(9.5 / 40, "cuda:1")]
    assert free_bytes(gpu, 10 << 30) == int(9.5 * 2**30)
    assert free_bytes(gpu, 30 << 30) == free_bytes(gpu) == 20 << 30


# --- torch's own words ----------------------------------------------------------------------------


def test_a_trial_multiplies_and_looks_at_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_out(CPU).text == "cpu, CPU"
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size, device=device) * 1.5)
    with pytest.raises(HardwareError, match="the product of two matrices on it is wrong"):
        try_out(CPU)


def test_an_error_of_torch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "CUDA error: no kernel image is available\nSearch for it in the manual."
    chosen = Host(broken=said).choose("auto", monkeypatch)
    why = "CUDA is there but does not work: CUDA error: no kernel image is available"
    assert chosen == ChosenDevice(CPU, f"CPU ({why})")


@pytest.mark.parametrize("name", ["tpu:0", "gpu:0", "nonsense", "meta:0"])
def test_a_device_that_torch_does_not_know_is_told(name: str) -> None:
    with pytest.raises(HardwareError, match=f"E-HW-002 device {name} cannot be used"):
        choose_device(name)


def without_devices() -> bool:
    return False


def with_an_old_driver() -> bool:
    """Torch reports no device then, and only warns that a driver is there."""
    said = "CUDA initialization: The driver is too old. (Triggered internally at CUDA.cpp:1.)"
    warnings.warn(said, stacklevel=1)
    return False


@pytest.mark.parametrize(
    ("built", "available", "why"),
    [
        (False, without_devices, "this torch is built without CUDA"),
        (True, without_devices, "no CUDA device is visible"),
        (True, with_an_old_driver, "CUDA is there but does not work: The driver is too old."),
    ],
)
def test_torch_says_why_there_is_no_cuda(
    built: bool, available: Callable[[], bool], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", available)
    chosen = choose_device("auto", lambda: Cuda("cuda:0"))
    assert chosen == ChosenDevice(CPU, f"CPU ({why})")


@pytest.mark.gpu
def test_an_accelerator_that_works_has_a_number_and_a_name() -> None:
    first = first_accelerator()
    assert first is not None
    assert first.absence() is None
    chosen = choose_device(ACCELERATOR.partition(":")[0])
    assert chosen.name == ACCELERATOR
    assert chosen.text.startswith(f"{ACCELERATOR}, ")
    assert choose_device("auto") == chosen


def test_tests_that_need_cuda_skip_for_the_reason_that_auto_gives() -> None:
    """What they skip for is what a node falls back for."""
    absence = cuda_absence()
    chosen = choose_device("auto", lambda: Cuda("cuda:0"))
    assert absence is None or chosen == ChosenDevice(CPU, f"CPU ({absence})")
