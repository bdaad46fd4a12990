"""Daemons of a run on several hosts: network namespaces that are joined already, or loopback."""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from bench.child import BenchError, Child, Place
from bench.job import Job
from bench.subject import JOIN_STRING, START_MAX_S, Decod, Running, ask_node, find_timing

PORT = 47110
"""Where daemons listen in namespaces of their own."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where one daemon runs."""

    address: str
    namespace: str = ""
    """Empty: this machine, over loopback."""

    @property
    def place(self) -> Place:
        return Place(("ip", "netns", "exec", self.namespace)) if self.namespace else Place()

    @property
    def listen(self) -> str:
        return f"{self.address}:{PORT if self.namespace else 0}"

    def interface(self) -> str:
        """Return the name of the network interface that has the address."""
        if not self.namespace:
            return "lo"
        (link,) = _ip(self.namespace, "addr", "show", "to", f"{self.address}/32")
        return str(link["ifname"])

    def sent_bytes(self) -> int | None:
        """Return how much this host has sent so far; None over loopback, which all share."""
        if not self.namespace:
            return None
        return sum_sent(_ip(self.namespace, "-s", "link", "show"))


LOOPBACK = Host("127.0.0.1")


def find_hosts(names: str) -> list[Host]:
    """Return the hosts of a list such as `home-1,home-2=10.0.0.2`.

    An address that is not given is read from its namespace.

    Raises:
        BenchError: A namespace does not exist, or has no address of its own.
    """
    hosts = []
    for text in names.split(","):
        namespace, _, address = text.strip().partition("=")
        hosts.append(Host(address or first_address(_ip(namespace, "addr", "show")), namespace))
    return hosts


def first_address(links: Sequence[dict[str, Any]]) -> str:
    """Return the first global IPv4 address in what `ip -json addr` prints.

    Raises:
        BenchError: There is none.
    """
    for link in links:
        for address in link.get("addr_info", ()):
            if address.get("family") == "inet" and address.get("scope") == "global":
                return str(address["local"])
    raise BenchError("a namespace has no address of its own: join it to the others first")


def sum_sent(links: Sequence[dict[str, Any]]) -> int:
    """Return the bytes that all but loopback have sent, in what `ip -json -s link` prints."""
    return sum(
        int(link["stats64"]["tx"]["bytes"])
        for link in links
        if "LOOPBACK" not in link.get("flags", ())
    )


def _ip(namespace: str, *arguments: str) -> list[dict[str, Any]]:
    command = ("ip", "-json", "-n", namespace, *arguments)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BenchError(f"{' '.join(command)}: {result.stderr.strip()}")
    return list(json.loads(result.stdout))


@dataclass(slots=True)
class Moment:
    """What the leader said at the end of an iteration."""

    iteration: int
    instant_s: float
    travel_s: float | None
    budget_s: float | None
    sent_bytes: dict[str, int]
    """By node; empty over loopback."""


class OnHosts(Decod):
    """A leader and the same number of relays in each stage, one daemon a host.

    Args:
        name: What the measurement is called.
        hosts: The leader's first, and then stage by stage.
        num_members: Relays in each stage.
        base: Folder of the model beside which an adapter is trained, if one is.
    """

    def __init__(
        self, name: str, hosts: Sequence[Host], num_members: int, base: Path | None = None
    ) -> None:
        self.name = name
        self.base = base
        self.hosts = hosts
        self.num_members = num_members
        self.moments: list[Moment] = []

    def nodes(self) -> list[str]:
        """Return the name of each daemon, in the order of the hosts."""
        relays = range(len(self.hosts) - 1)
        return [
            "data",
            *(f"relay-{i // self.num_members + 1}-{i % self.num_members}" for i in relays),
        ]

    @override
    def start(self, job: Job, num_threads: int, folder: Path, running: list[Child]) -> Running:
        deadline_s = time.monotonic() + START_MAX_S
        options = ("--threads", str(num_threads), "--device", "cpu")
        children: dict[str, Child] = {}
        join = ""
        for name, host in zip(self.nodes(), self.hosts, strict=True):
            task = ["leader", str(job.run_file)]
            if name == "data" and self.base is not None:
                task += ["--base", str(self.base)]
            if name != "data":
                task = ["join", join, "--stage", name.split("-")[1]]
            task += ["--listen", host.listen, "--state-dir", str(folder / name)]
            child = children[name] = Child(
                ("-m", "decod", *task, *options),
                num_threads=num_threads,
                log=folder / f"log-{name}",
                place=host.place,
            )
            running.append(child)
            while not join:
                match = JOIN_STRING.search(child.next_line(deadline_s)[1])
                join = match[1] if match else ""
        return Running(children["data"], children)

    @override
    def loss(self, iteration: int, printed: float, folder: Path) -> float:
        instant_s = time.monotonic()
        sync = ask_node(folder / "data").get("sync") or {}
        sent = {
            name: sent_bytes
            for name, host in zip(self.nodes(), self.hosts, strict=True)
            if (sent_bytes := host.sent_bytes()) is not None
        }
        moment = Moment(iteration, instant_s, sync.get("travel_s"), sync.get("budget_s"), sent)
        self.moments.append(moment)
        return printed

    @override
    def timing(self, folder: Path) -> dict[str, dict[str, float]]:
        found = {name: find_timing(ask_node(folder / name)) for name in self.nodes()}
        return {name: timing for name, timing in found.items() if timing}
