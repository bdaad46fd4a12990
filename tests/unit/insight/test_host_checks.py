"""What `decod doctor` says about releases, driver, device, disk and clock."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from decod.exit_codes import ExitCode
from decod.insight.host_checks import (
    TORCH_MIN,
    Clock,
    Diagnosis,
    Driver,
    Level,
    OperatingSystem,
    Releases,
    TriedDevice,
    TriedFolder,
    check_clock,
    check_device,
    check_disk,
    check_driver,
    check_system,
    check_versions,
    disk_needs_bytes,
)
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30

NO_DRIVER = Driver(release=None, num_devices=0, num_cards=0)
DRIVER = Driver(release="550.54.15", num_devices=1, num_cards=1)
RELEASES = Releases(python="3.12.1", decod="0.1.0", torch="2.10.0+cu128", built_for="CUDA 12.8")
GPU = TriedDevice(
    asked="auto",
    name="cuda:0",
    text="cuda:0, NVIDIA X",
    free_bytes=24 * GIB,
    torch="2.10.0+cu128",
    built_for="CUDA 12.8",
)
CPU = replace(GPU, name="cpu", text="CPU (no CUDA device is visible)")
DISK = TriedFolder(folder=Path("/state"), free_bytes=100 * GIB)


def assert_told(told: Diagnosis, level: Level, *texts: str) -> None:
    assert told.level is level, told
    for text in texts:
        assert text in f"{told.found}. Try: {told.remedy}", told


# --- the system -----------------------------------------------------------------------------------


def test_linux_needs_nothing() -> None:
    told = check_system(OperatingSystem(name="Linux", release="6.1.0-18-amd64"))
    assert_told(told, Level.OK, "Linux 6.1.0-18-amd64")


@pytest.mark.parametrize(
    ("networking", "level", "text"),
    [
        ("nat", Level.WARN, "networkingMode=mirrored"),
        ("", Level.WARN, "networking unknown"),
        ("mirrored", Level.OK, "must not sleep"),
    ],
)
def test_wsl_is_recognised_and_its_traps_are_named(
    networking: str, level: Level, text: str
) -> None:
    release = "5.15.167.4-microsoft-standard-WSL2"
    found = OperatingSystem(name="Linux", release=release, wsl_networking=networking)
    assert_told(check_system(found), level, text)


def test_the_first_wsl_and_a_mac_are_told() -> None:
    first = OperatingSystem(name="Linux", release="4.4.0-19041-Microsoft")
    assert_told(check_system(first), Level.WARN, "no GPU computes", "--set-version")
    mac = OperatingSystem(name="Darwin", release="24.1.0")
    assert_told(check_system(mac), Level.WARN, "not been tried yet", "docs/install.md#macos")


# --- releases -------------------------------------------------------------------------------------


def test_releases_that_fit_are_named() -> None:
    told = check_versions(RELEASES, DRIVER)
    assert_told(told, Level.OK, "decod 0.1.0, Python 3.12.1, torch 2.10.0+cu128")


@pytest.mark.parametrize("torch", [None, "2.9.1", "1.13", "odd"])
def test_a_missing_or_old_torch_fails(torch: str | None) -> None:
    told = check_versions(replace(RELEASES, torch=torch), NO_DRIVER)
    assert_told(told, Level.FAIL, torch or "missing", "2.10 or newer", "pip install")
    assert told.exit_code is ExitCode.HARDWARE


@pytest.mark.parametrize("torch", ["2.10.0", "2.13.0+cpu", "3.0"])
def test_newer_releases_of_torch_do(torch: str) -> None:
    assert_told(check_versions(replace(RELEASES, torch=torch), NO_DRIVER), Level.OK)


def test_the_oldest_torch_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={TORCH_MIN[0]}.{TORCH_MIN[1]}" in project["dependencies"]


def test_a_torch_without_cuda_is_told_where_there_is_a_driver() -> None:
    plain = replace(RELEASES, torch="2.10.0+cpu", built_for="CPU")
    assert_told(check_versions(plain, DRIVER), Level.WARN, "built for CPU", "PyPI")
    assert_told(check_versions(plain, NO_DRIVER), Level.OK)
    assert_told(check_versions(replace(plain, built_for=None), DRIVER), Level.OK)


def test_a_torch_without_rocm_is_told_where_there_is_a_card_of_amd() -> None:
    plain = replace(RELEASES, torch="2.10.0+cpu", built_for="CPU")
    radeon = replace(NO_DRIVER, num_amd_cards=1)
    assert_told(check_versions(plain, radeon), Level.WARN, "a card of AMD", "for ROCm")
    rocm = replace(plain, built_for="ROCm 6.4")
    assert_told(check_versions(rocm, radeon), Level.OK, "for ROCm 6.4")
    assert_told(check_driver(radeon), Level.OK, "1 AMD card")


def test_a_node_of_another_release_is_told() -> None:
    told = check_versions(replace(RELEASES, node="0.0.9"), DRIVER)
    assert_told(told, Level.WARN, "still runs decod 0.0.9", "restart")
    assert_told(check_versions(replace(RELEASES, node="0.1.0"), DRIVER), Level.OK)


# --- driver and device ----------------------------------------------------------------------------


def test_a_driver_is_named_with_its_devices() -> None:
    assert_told(check_driver(DRIVER), Level.OK, "NVIDIA 550.54.15, 1 device")
    assert_told(check_driver(replace(DRIVER, num_devices=8)), Level.OK, "8 devices")
    assert_told(check_driver(NO_DRIVER), Level.OK, "no NVIDIA card")


def test_a_card_without_a_driver_is_told() -> None:
    told = check_driver(replace(NO_DRIVER, num_cards=2))
    assert_told(told, Level.WARN, "2 NVIDIA cards and no driver", "nvidia-smi")


def test_a_driver_without_devices_is_told_as_in_a_container() -> None:
    assert_told(check_driver(replace(DRIVER, num_devices=0)), Level.WARN, "--gpus all")


def test_the_device_is_named_with_its_free_memory() -> None:
    assert_told(check_device(GPU, DRIVER), Level.OK, "cuda:0, NVIDIA X, 24.0 GiB free")
    assert_told(check_device(CPU, NO_DRIVER), Level.OK, "CPU (no CUDA device is visible)")


def test_a_cpu_that_was_not_asked_for_is_told_where_there_is_a_driver() -> None:
    assert_told(check_device(CPU, DRIVER), Level.WARN, "no CUDA device is visible", "nvidia-smi")
    assert_told(check_device(replace(CPU, asked="cpu"), DRIVER), Level.OK)


def test_a_device_that_is_nearly_full_is_told() -> None:
    assert_told(check_device(replace(GPU, free_bytes=GIB - 1), DRIVER), Level.WARN, "end other")
    assert_told(check_device(replace(GPU, free_bytes=GIB), DRIVER), Level.OK)


# --- disk -----------------------------------------------------------------------------------------


def test_a_disk_with_room_is_fine() -> None:
    assert_told(check_disk(DISK, 100 * GIB), Level.OK, "/state: 100.0 GiB free")


def test_a_disk_with_little_room_is_told() -> None:
    told = check_disk(DISK, 101 * GIB)
    assert_told(told, Level.WARN, "a node writes up to 101.0 GiB", "free some space")


def test_a_folder_that_can_not_be_written_fails() -> None:
    told = check_disk(replace(DISK, problem="Read-only file system"), GIB)
    assert_told(told, Level.FAIL, "nothing can be written: Read-only file system", "--state-dir")
    assert told.exit_code is ExitCode.CONFIG


def test_a_larger_model_needs_more_room() -> None:
    large = RunConfig(
        model=ModelConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=81, num_attention_heads=64
        ),
        stages=StagesConfig(num_relay_stages=2, num_first_blocks=0),
    )
    assert disk_needs_bytes(RunConfig()) < disk_needs_bytes(None) < disk_needs_bytes(large)


# --- clock ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "level", "text"),
    [
        (0.2, Level.OK, "within 1 s of the clock of h:1"),
        (-60.0, Level.OK, "within 60 s"),
        (61.0, Level.WARN, "61 s ahead of the clock of h:1"),
        (-7200.0, Level.WARN, "7,200 s behind the clock of h:1"),
        (-7201.0, Level.FAIL, "papers of members are not valid here"),
    ],
)
def test_the_clock_is_compared_with_another(ahead_s: float, level: Level, text: str) -> None:
    told = check_clock(Clock(ahead_s=ahead_s, asked="h:1", synchronised=False))
    assert_told(told, level, text)
    assert told.exit_code is (ExitCode.REJECTED if level is Level.FAIL else ExitCode.OK)


@pytest.mark.parametrize(
    ("synchronised", "level", "text"),
    [
        (True, Level.OK, "a time service keeps it"),
        (False, Level.WARN, "timedatectl"),
        (None, Level.WARN, "nobody can tell"),
    ],
)
def test_without_another_the_kernel_is_believed(
    synchronised: bool | None, level: Level, text: str
) -> None:
    assert_told(check_clock(Clock(synchronised=synchronised)), level, text)
