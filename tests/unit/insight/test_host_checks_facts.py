"""What `decod doctor` reads of this host, without a GPU and on loopback alone."""

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from decod.daemon.node_folder import nearest_folder
from decod.insight.doctor_asking import node_of
from decod.insight.host_checks import Driver, read_driver, releases_of, try_disk
from decod.insight.network_checks import held_port, is_address, resolve, way_to
from decod.system import clock_synchronised

VERSION = """NVRM version: NVIDIA UNIX{kind}  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.3.0
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


# --- the host -------------------------------------------------------------------------------------


def test_a_host_without_a_card_has_no_driver(tmp_path: Path) -> None:
    assert read_driver(tmp_path) == Driver(release=None, num_devices=0, num_cards=0)


@pytest.mark.parametrize("kind", [" x86_64 Kernel Module", " Open Kernel Module for x86_64"])
def test_driver_and_devices_are_found(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "proc/driver/nvidia/version", VERSION.format(kind=kind))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        write(tmp_path / "dev" / name, "")
    found = read_driver(tmp_path)
    assert (found.release, found.num_devices) == ("550.54.15", 2)


def test_cards_are_found_on_the_bus(tmp_path: Path) -> None:
    """A card of another maker and NVIDIA's sound device are none."""
    bus = tmp_path / "sys/bus/pci/devices"
    devices = [("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1002", "0x030000")]
    for number, (vendor, kind) in enumerate(devices):
        write(bus / f"{number}" / "vendor", f"{vendor}\n")
        write(bus / f"{number}" / "class", f"{kind}\n")
    (bus / "odd").mkdir()
    assert read_driver(tmp_path) == Driver(release=None, num_devices=0, num_cards=1)
    write(tmp_path / "dev/kfd", "")
    assert read_driver(tmp_path).num_amd_cards == 1


def test_the_installed_torch_is_known_without_a_compute_process() -> None:
    found = releases_of(None, "0.0.9")
    assert found.torch is not None
    assert (found.built_for, found.node) == (None, "0.0.9")


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = try_disk(tmp_path)
    assert (found.problem, found.free_bytes > 0) == ("", True)
    later = try_disk(tmp_path / "not" / "yet")
    assert (later.problem, later.folder) == ("", tmp_path / "not" / "yet")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_can_not_be_made_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    assert try_disk(tmp_path / "file" / "state").problem == "Not a directory"


def test_what_can_not_be_looked_at_counts_as_missing(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / ("x" * 300) / "state") == tmp_path


def test_the_kernel_is_asked_about_the_clock() -> None:
    assert clock_synchronised() in (True, False, None)


# --- the network ----------------------------------------------------------------------------------


def test_names_are_resolved_in_their_order() -> None:
    good, bad = asyncio.run(resolve(["localhost", "a..b"]))
    assert good.addresses[0] in ("127.0.0.1", "::1")
    assert not good.problem
    assert (bad.addresses, bool(bad.problem)) == ((), True)


def test_addresses_are_told_from_names() -> None:
    assert is_address("127.0.0.1")
    assert is_address("::1")
    assert not is_address("localhost")


def test_the_way_to_this_host_is_its_loopback() -> None:
    route = way_to("127.0.0.1")
    assert route is not None
    assert (route.target, route.interface) == ("127.0.0.1", "lo")
    assert route.mtu_bytes >= 1280


async def hold(port: int, host: str = "127.0.0.1") -> int:
    """Returns the system's number of the error."""
    async with held_port(host, port) as held:
        assert (held.port == 0) == (held.tried.error != 0)
        return held.tried.error


async def test_a_held_port_notes_that_somebody_connects() -> None:
    async with held_port("127.0.0.1", 0) as held:
        assert not held.dialled.is_set()
        reader, writer = await asyncio.open_connection("127.0.0.1", held.port)
        assert await reader.read() == b""
        assert held.dialled.is_set()
        writer.close()
        assert await hold(held.port) == errno.EADDRINUSE
    assert await hold(held.port) == 0


def test_a_port_must_be_free_for_datagrams_too() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        assert asyncio.run(hold(other.getsockname()[1])) == errno.EADDRINUSE


def test_an_address_of_another_host_can_not_be_used() -> None:
    assert asyncio.run(hold(0, "192.0.2.1")) == errno.EADDRNOTAVAIL


# --- the node of this host ------------------------------------------------------------------------


def status(**changes: Any) -> dict[str, Any]:
    return {
        "decod_version": "0.1.0",
        "run_id": "r" * 26,
        "run_name": "wiki",
        "state": "training",
        "leader": {"address": "h:1"},
        "node": {"name": "brave-otter", "address": "h:3", "device": "cuda:0"},
        "stages": [
            {"index": 0, "nodes": [{"address": "h:2"}, {"address": "h:1"}]},
            {"index": 1, "nodes": [{"address": "h:3"}]},
        ],
        "message": None,
    } | changes


def test_a_node_describes_itself_and_the_others() -> None:
    node = node_of(status())
    assert (node.name, node.state, node.run_name) == ("brave-otter", "training", "wiki")
    assert (node.address, node.device, node.release) == ("h:3", "cuda:0", "0.1.0")
    assert (node.others, node.message) == (("h:1", "h:2"), "")


def test_a_node_without_a_compute_process_is_suspended() -> None:
    assert not node_of(status()).suspended
    own = status()["node"] | {"device_free": True}
    assert node_of(status(node=own)).suspended


def test_a_node_may_be_alone() -> None:
    alone = status(leader={"address": "h:3"}, stages=[])
    assert node_of(alone).others == ()


def test_the_node_of_a_training_script_says_less() -> None:
    told = {"collaboration": 1, "run": "wiki", "run_id": "r", "node_id": "n", "address": "h:3"}
    node = node_of(told)
    assert (node.name, node.run_name, node.address) == ("n", "wiki", "h:3")
    assert (node.device, node.release, node.others) == ("", None, ())
