"""Which device a compute process uses, on hosts with CUDA, with a broken one, and with none."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from decod.errors import ConfigError, HardwareError
from decod.worker.configure import device_facts, parse_device
from decod.worker.device import (
    ChosenDevice,
    Cuda,
    TorchCuda,
    cap_memory,
    choose_device,
    free_bytes,
)
from tests.support.devices import CUDA, cuda_absence


@dataclass
class FakeCuda:
    """CUDA on a host of a test's choice."""

    missing: str | None = None
    """Why no device is visible."""
    broken: str | None = None
    """Why a device that is visible does not work."""
    tried: list[str] = field(default_factory=list)

    def absence(self) -> str | None:
        return self.missing

    def try_out(self, name: str) -> ChosenDevice:
        self.tried.append(name)
        if why := self.missing or self.broken:
            raise HardwareError(f"device {name} cannot be used", why=why, fix="", code="E-HW-002")
        found = CUDA if name == "cuda" else name
        return ChosenDevice(found, f"{found}, Fake 9000")


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "name", "text", "tried"),
    [
        (FakeCuda(), "cuda:0", "cuda:0, Fake 9000", ["cuda:0"]),
        (FakeCuda(missing="none is visible"), "cpu", "CPU (none is visible)", []),
        (
            FakeCuda(broken="no kernel image"),
            "cpu",
            "CPU (CUDA is there but does not work: no kernel image)",
            ["cuda:0"],
        ),
    ],
    ids=["works", "missing", "broken"],
)
def test_auto_takes_cuda_where_it_works_and_else_the_cpu_and_says_why(
    cuda: FakeCuda, name: str, text: str, tried: list[str]
) -> None:
    assert choose_device("auto", cuda) == ChosenDevice(name, text)
    assert cuda.tried == tried


@pytest.mark.parametrize(
    "cuda", [FakeCuda(), FakeCuda(missing="none"), FakeCuda(broken="it is")], ids=str
)
def test_the_cpu_is_taken_without_a_look_at_cuda(cuda: FakeCuda) -> None:
    """A trial would take memory of a device that the operator keeps for something else."""
    assert choose_device("cpu", cuda) == ChosenDevice("cpu", "CPU")
    assert cuda.tried == []


@pytest.mark.parametrize(("asked", "name"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_cuda_device_that_is_named_is_taken_if_it_works(asked: str, name: str) -> None:
    assert choose_device(asked, FakeCuda()).name == name


@pytest.mark.parametrize("asked", ["cuda", "cuda:1"])
@pytest.mark.parametrize("cuda", [FakeCuda(missing="none"), FakeCuda(broken="it is")], ids=str)
def test_nothing_takes_the_place_of_a_cuda_device_that_is_named(asked: str, cuda: FakeCuda) -> None:
    with pytest.raises(HardwareError, match=f"E-HW-002 device {asked} cannot be used"):
        choose_device(asked, cuda)


@pytest.mark.parametrize("asked", ["tpu", "", "Auto", 3, None])
def test_what_names_no_device_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match="it is auto, cpu, or cuda with a number"):
        parse_device({"device": asked})


def test_the_node_is_told_what_the_device_is_and_what_is_free_on_it() -> None:
    facts = device_facts(parse_device({"device": "cpu"}))
    assert facts.pop("memory_bytes") > 0
    assert facts.pop("host_memory_bytes") > 0
    built = torch.backends.cuda.is_built()
    told = {"torch": torch.__version__, "device": "cpu", "device_text": "CPU"}
    assert facts == told | {"has_cuda": built, "device_uuid": None}


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
    gpu = ChosenDevice("cuda:1", "cuda:1, a GPU")
    cap_memory(gpu, None)
    cap_memory(ChosenDevice("cpu", "CPU"), 1 << 30)
    assert told == []
    cap_memory(gpu, 10 << 30)
    # Half a GiB is for CUDA itself, which torch does not count.
    assert told == [(9.5 / 40, "cuda:1")]
    assert free_bytes(gpu, 10 << 30) == int(9.5 * 2**30)
    assert free_bytes(gpu, 30 << 30) == free_bytes(gpu) == 20 << 30


# --- the fake is like torch -----------------------------------------------------------------------


class HiddenCuda(TorchCuda):
    """CUDA as torch shows it in a process that sees no device."""

    def absence(self) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            return super().absence()

    def try_out(self, name: str) -> ChosenDevice:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "ones", fail_as_torch_does)
            return super().try_out(name)


class BrokenCuda(HiddenCuda):
    """CUDA as torch shows it where a device is listed and can't be used."""

    def absence(self) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.cuda, "is_built", lambda: True)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return TorchCuda.absence(self)


def fail_as_torch_does(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error: no kernel image is available\nSearch for it in the manual.")


@pytest.mark.parametrize("cuda", [FakeCuda(missing="none"), HiddenCuda()], ids=["fake", "torch"])
def test_cuda_that_is_absent_says_so_and_can_not_be_tried(cuda: Cuda) -> None:
    assert cuda.absence()
    with pytest.raises(HardwareError, match="E-HW-002 device cuda:0 cannot be used"):
        cuda.try_out("cuda:0")


@pytest.mark.parametrize("cuda", [FakeCuda(broken="it is"), BrokenCuda()], ids=["fake", "torch"])
def test_cuda_that_is_broken_is_visible_and_fails_its_trial(cuda: Cuda) -> None:
    assert cuda.absence() is None
    with pytest.raises(HardwareError, match="E-HW-002 device cuda:0 cannot be used"):
        cuda.try_out("cuda:0")


@pytest.mark.parametrize(
    "cuda", [FakeCuda(), pytest.param(TorchCuda(), marks=pytest.mark.gpu)], ids=["fake", "torch"]
)
def test_cuda_that_works_is_visible_and_has_a_number_and_a_name(cuda: Cuda) -> None:
    assert cuda.absence() is None
    device = cuda.try_out("cuda")
    assert device.name == CUDA
    assert device.text.startswith(f"{CUDA}, ")
    assert choose_device("auto", cuda) == device


# --- torch's own words ----------------------------------------------------------------------------


def test_an_error_of_torch_is_told_in_one_line() -> None:
    device = choose_device("auto", BrokenCuda())
    why = "CUDA is there but does not work: CUDA error: no kernel image is available"
    assert device == ChosenDevice("cpu", f"CPU ({why})")


def test_a_driver_that_torch_warns_of_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reports no device then, and only warns that a driver is there."""

    def warn() -> bool:
        said = "CUDA initialization: The driver is too old. (Triggered internally at CUDA.cpp:1.)"
        warnings.warn(said, stacklevel=1)
        return False

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    why = "CUDA is there but does not work: The driver is too old."
    assert choose_device("auto", TorchCuda()) == ChosenDevice("cpu", f"CPU ({why})")


def test_a_build_of_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a host with a GPU would seem to have none."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert choose_device("auto", TorchCuda()).text == "CPU (this torch is built without CUDA)"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_trial_multiplies_and_looks_at_the_product(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, in the place of a device."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a name")
    if wrong:
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size, device=device) * 1.5)
        with pytest.raises(HardwareError, match="the product of two matrices on it is wrong"):
            TorchCuda().try_out("cpu")
    else:
        assert TorchCuda().try_out("cpu") == ChosenDevice("cpu", "cpu, a name")
    assert waited == [torch.device("cpu")]


def test_tests_that_need_cuda_skip_for_the_reason_that_auto_gives() -> None:
    """What they skip for is what a node falls back for."""
    absence = cuda_absence()
    device = choose_device("auto", TorchCuda())
    assert absence is None or device == ChosenDevice("cpu", f"CPU ({absence})")
