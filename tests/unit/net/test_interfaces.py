"""Which of a host's addresses others are told."""

import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from decod.config.node_config import NodeConfig
from decod.daemon.reachability import address_doubt, misleads
from decod.errors import ConfigError
from decod.net import interfaces
from decod.net.interfaces import is_loopback, is_own, outward_addresses, own_addresses

ANY = "0.0.0.0"
LAN = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.77.1", "fe80::1%eth0"]}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host without a default route. Tests change its interfaces."""
    told = SimpleNamespace(addresses=dict(LAN), down=set(), leaves=None)

    def entry(address: str) -> SimpleNamespace:
        return SimpleNamespace(
            address=address, family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )

    def net_if_addrs() -> dict[str, list[SimpleNamespace]]:
        return {name: list(map(entry, found)) for name, found in told.addresses.items()}

    def net_if_stats() -> dict[str, SimpleNamespace]:
        return {name: SimpleNamespace(isup=name not in told.down) for name in told.addresses}

    monkeypatch.setattr(
        interfaces,
        "psutil",
        SimpleNamespace(net_if_addrs=net_if_addrs, net_if_stats=net_if_stats),
    )
    monkeypatch.setattr(interfaces, "_leaving", lambda _: told.leaves)
    return told


def test_without_a_way_to_the_internet_the_interface_counts(host: SimpleNamespace) -> None:
    assert outward_addresses(ANY) == ["192.168.77.1"]
    assert address_doubt(NodeConfig(listen_host=ANY), "192.168.77.1:7700") == ""


def test_with_a_way_to_the_internet_its_address_is_the_only_one(host: SimpleNamespace) -> None:
    host.leaves = "10.1.2.3"
    host.addresses["eth1"] = ["10.1.2.3"]
    assert outward_addresses(ANY) == ["10.1.2.3"]
    assert address_doubt(NodeConfig(listen_host=ANY), "10.1.2.3:7700") == ""


def test_of_several_the_likeliest_is_taken_and_the_others_are_named(host: SimpleNamespace) -> None:
    host.addresses = {
        "docker0": ["172.17.0.1"],
        "usb0": ["169.254.3.4"],
        "wlan0": ["10.0.0.9"],
        **LAN,
        "eth1": ["10.5.5.5"],
    }
    host.down.add("eth1")
    assert outward_addresses(ANY) == ["10.0.0.9", "192.168.77.1", "172.17.0.1", "169.254.3.4"]
    doubt = address_doubt(NodeConfig(listen_host=ANY), "10.0.0.9:7700")
    assert "others are told 10.0.0.9, and not 192.168.77.1, 172.17.0.1, 169.254.3.4" in doubt
    assert "--advertise" in doubt
    chosen = NodeConfig(listen_host=ANY, advertise="192.168.77.1:7700")
    assert address_doubt(chosen, "192.168.77.1:7700") == ""


def test_a_host_of_both_kinds_tells_an_address_of_ipv6_first(host: SimpleNamespace) -> None:
    host.addresses["eth0"].append("fd00::7")
    assert outward_addresses("::") == ["fd00::7", "192.168.77.1"]


def test_no_loopback_address_is_told_without_a_word(host: SimpleNamespace) -> None:
    host.addresses = {"lo": ["127.0.0.1", "::1"]}
    assert outward_addresses(ANY) == []
    alone = address_doubt(NodeConfig(listen_host=ANY), "127.0.0.1:7700")
    assert "can't reach this one at 127.0.0.1:7700" in alone
    assert "give --advertise HOST:PORT" in alone
    assert "--listen" not in alone  # It listens everywhere already.
    chosen = NodeConfig(listen_host="127.0.0.1")
    assert "--listen 0.0.0.0:7700, or give --advertise" in address_doubt(chosen, "127.0.0.1:7700")
    wrong = NodeConfig(listen_host=ANY, advertise="localhost:7700")
    assert "give --advertise" in address_doubt(wrong, "localhost:7700")
    # Among nodes of this host, nothing is wrong with it.
    assert address_doubt(chosen, "127.0.0.1:7701", ["127.0.0.1:7700"]) == ""
    assert address_doubt(chosen, "127.0.0.1:7701", ["10.0.0.9:7700"]) != ""


def test_an_address_that_stands_for_all_is_none_to_tell_others() -> None:
    for text in ("0.0.0.0:7700", "[::]:7700"):
        with pytest.raises(ConfigError, match="others cannot connect to") as caught:
            NodeConfig(advertise=text)
        assert caught.value.code == "E-CFG-020"


def test_only_an_asker_of_another_host_is_led_astray(host: SimpleNamespace) -> None:
    assert "--advertise" in misleads("127.0.0.1:7700", "192.168.77.2")
    for asker in ("127.0.0.1", "192.168.77.1", "::1", ""):
        assert misleads("127.0.0.1:7700", asker) == ""
    assert misleads("192.168.77.1:7700", "192.168.77.2") == ""


def test_the_loopback_has_many_names() -> None:
    for name in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1", ANY, "::"):
        assert is_loopback(name), name
    for name in ("10.0.0.9", "::ffff:10.0.0.9", "example.org"):
        assert not is_loopback(name), name
    assert "127.0.0.1" in own_addresses()
    assert is_own("127.0.0.1")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`, for a namespace"
)
def test_a_real_host_without_a_default_route() -> None:
    lay_out = (
        "ip link set lo up && ip link add lan0 type veth peer name lan1 && ip link set lan0 up && "
        'ip link set lan1 up && ip addr add 192.168.77.1/24 dev lan0 && exec "$0" -c "$1"'
    )
    code = "from decod.net.interfaces import *; print(outward_addresses('0.0.0.0'))"
    made = subprocess.run(
        ["unshare", "-n", "sh", "-c", lay_out, sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == "['192.168.77.1']"
