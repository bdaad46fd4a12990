"""Hosts behind routers that translate addresses.

It is a `Network` in which some hosts don't hang on the bridge, but behind a router of their own, or
behind two. Routers are namespaces that forward and translate with iptables. Hosts behind them reach
everybody, and who reaches them depends on the kind of translation.
"""

import shutil
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path

from tests.support import network
from tests.support.network import Network, batch, delete, run_command


class Nat(Enum):
    """What a router lets in, and how it translates."""

    FULL_CONE = auto()
    """Whatever comes to the router's address is for the host: others can dial it."""
    RESTRICTED = auto()
    """Only answers come in. The port stays the same where it can (address and port restricted)."""
    SYMMETRIC = auto()
    """Only answers come in. Each connection gets another port."""
    CARRIER = auto()
    """Two routers in a row, of which the carrier's is symmetric."""


class NatNetwork(Network):
    """A network without limits on rates.

    Args:
        hosts: Names of the hosts.
        behind: The routers before some of them.
    """

    def __init__(self, hosts: Sequence[str], behind: Mapping[str, Nat]) -> None:
        super().__init__(hosts, {})
        self.behind = dict(behind)

    def address(self, host: str) -> str:
        """Return the address of a host's own interface. Behind a router, it is a private one."""
        return "192.168.1.2" if host in self.behind else super().address(host)

    def sent_bytes(self, host: str) -> int:
        """Return how many bytes have left a host so far."""
        line = ("cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(run_command((*self.command(host), *line)))

    def remove(self) -> None:
        super().remove()
        for host in self.behind:
            for router in self._routers(host):
                delete(router)

    def _routers(self, host: str) -> list[str]:
        """Return the namespaces of the routers before a host, the host's own first."""
        own = self._namespace(host)
        carriers = [f"{own}-carrier"] if self.behind[host] is Nat.CARRIER else []
        return [f"{own}-router", *carriers]

    def _add_host(self, host: str) -> None:
        kind = self.behind.get(host)
        if kind is None:
            super()._add_host(host)
            return
        namespace, port = self._namespace(host), f"port{self._number(host)}"
        routers = self._routers(host)
        for each in (namespace, *routers):
            run_command(("ip", "netns", "add", each))
        # From the bridge inwards: each router has its `wan` towards the bridge.
        outer, address = routers[-1], super().address(host)
        pair = f"link add name {port} type veth peer name wan netns {outer}"
        batch("ip", self._switch, [pair, f"link set {port} master bridge up"])
        if len(routers) == 2:
            _set_router(outer, f"{address}/24", Nat.SYMMETRIC, ("100.64.0.1", routers[0], "wan"))
            address = "100.64.0.2"
            kind = Nat.RESTRICTED
        lan = ("192.168.1.1", namespace, "eth0")
        _set_router(routers[0], f"{address}/24", kind, lan)
        if len(routers) == 2:
            batch("ip", routers[0], ["route add default via 100.64.0.1"])
        setup = ["link set lo up", "link set eth0 up", "address add 192.168.1.2/24 dev eth0"]
        batch("ip", namespace, [*setup, "route add default via 192.168.1.1"])


def _set_router(router: str, wan: str, kind: Nat, lan: tuple[str, str, str]) -> None:
    """Set up one router: its addresses, and what it lets in.

    Args:
        router: Its namespace.
        wan: Its outer address, with the length of the network's prefix.
        kind: What it lets in.
        lan: Its inner address; the namespace behind it, and the name of that one's interface.
    """
    inner, behind, interface = lan
    batch(
        "ip",
        router,
        [
            f"link add name lan type veth peer name {interface} netns {behind}",
            "link set lo up",
            "link set wan up",
            "link set lan up",
            f"address add {wan} dev wan",
            f"address add {inner}/24 dev lan",
        ],
    )
    run_command((*_in(router), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
    outer = wan.partition("/")[0]
    if kind is Nat.FULL_CONE:
        host = inner.rpartition(".")[0] + ".2"
        rules = [
            f"-t nat -A POSTROUTING -o wan -j SNAT --to-source {outer}",
            f"-t nat -A PREROUTING -i wan -j DNAT --to-destination {host}",
        ]
    else:
        spread = " --random-fully" if kind is Nat.SYMMETRIC else ""
        rules = [
            f"-t nat -A POSTROUTING -o wan -j MASQUERADE{spread}",
            "-A FORWARD -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            "-A FORWARD -i wan -j DROP",
            "-A INPUT -i wan -j DROP",
        ]
    for rule in rules:
        run_command((*_in(router), "iptables", *rule.split()))


def _in(namespace: str) -> tuple[str, ...]:
    return network.inside(Path(namespace))


def missing() -> str | None:
    """Return why there can be no such network here, or None if there can be one."""
    if (reason := network.missing()) is not None:
        return reason
    if shutil.which("iptables") is None:
        return "`iptables` is not installed (package iptables)"
    try:
        with NatNetwork(("a", "b"), {"b": Nat.SYMMETRIC}):
            return None
    except network.NetworkError as error:
        return f"this machine translates no addresses: {error}"
