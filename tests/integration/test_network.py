"""The hosts and links that other tests lay out are what they say."""

import subprocess
import sys
import time

import pytest

from tests.support.network import Network, Pair, missing

pytestmark = [pytest.mark.processes, pytest.mark.netns, pytest.mark.timeout(60)]

_RECEIVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
print("done", flush=True)
"""
_SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 7000)).sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)


def mbit_per_s(network: Network, begin: str, end: str, num_bytes: int = 500_000) -> float:
    """Returns the rate at which one host sends to another."""
    with subprocess.Popen(
        (*network.command(end), sys.executable, "-c", _RECEIVE), stdout=subprocess.PIPE
    ) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        send = (sys.executable, "-c", _SEND, network.address(end), str(num_bytes))
        start_s = time.monotonic()
        subprocess.run((*network.command(begin), *send), check=True, timeout=30)
        receiver.stdout.readline()
        duration_s = time.monotonic() - start_s
    return num_bytes * 8e-6 / duration_s


def test_each_direction_has_its_rate_and_can_get_another() -> None:
    rates: dict[Pair, float] = {("a", "b"): 20.0, ("b", "a"): 4.0, ("a", "c"): 10.0}
    with Network(("a", "b", "c"), rates) as network:
        for pair, rate in rates.items():
            # An interpreter's start is in the time, so slower is all that noise can make it.
            assert 0.4 * rate < mbit_per_s(network, *pair) <= 1.1 * rate, pair
        network.set_rate("a", "b", 2.0)
        assert 0.7 * 2.0 < mbit_per_s(network, "a", "b") <= 1.1 * 2.0
        assert mbit_per_s(network, "a", "c") > 0.4 * 10.0, "only that one"


def test_nothing_is_left_after_a_failure() -> None:
    seen: list[str] = []

    def fail() -> None:
        with Network(("a", "b"), {("a", "b"): 1.0}) as network:
            seen.append(network.command("a")[-1])
            assert seen[0] in namespaces()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert seen[0] not in namespaces()


def namespaces() -> str:
    return subprocess.run(("ip", "netns"), capture_output=True, check=True, text=True).stdout
