"""Members who reach each other through an overlay network alone, in network namespaces.

Each host has a home network of its own, with a default route, whose addresses mean nothing to the
others. The overlay is one more address of each.
"""

from pathlib import Path

import pytest

from decod.net.address import split_address
from tests.support.cluster import Cluster, stage_nodes
from tests.support.network import Network, batch, missing
from tests.support.quick import first_of
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.netns, pytest.mark.processes, pytest.mark.timeout(300)]

NUM_ITERATIONS = 4
HOSTS = ("leader", "relay-1", "relay-2")


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)


class OverlayNetwork(Network):
    """A network whose hosts have only addresses of an overlay in common.

    Args:
        overlay: The beginning of the overlay's addresses, such as `100.64.7.`.
        prefix: How many bits its hosts have in common.
    """

    def __init__(self, overlay: str, prefix: int) -> None:
        super().__init__(HOSTS, {})
        self._overlay = overlay
        self._prefix = prefix

    def overlay_address(self, host: str) -> str:
        return f"{self._overlay}{self._number(host)}"

    def _add_host(self, host: str) -> None:
        super()._add_host(host)
        home = f"192.168.{100 + self._number(host)}"
        nodad = " nodad" if ":" in self._overlay else ""
        setup = [
            f"address delete {self.address(host)}/24 dev eth0",
            f"address add {home}.2/24 dev eth0",
            f"route add default via {home}.1",
            f"address add {self.overlay_address(host)}/{self._prefix} dev eth0{nodad}",
        ]
        batch("ip", self._namespace(host), setup)


@pytest.mark.parametrize(
    "overlay", first_of([("100.64.7.", 10, "0.0.0.0"), ("fd7a:115c:a1e0::", 64, "[::]")])
)
def test_members_train_through_an_overlay(
    overlay: tuple[str, int, str], tmp_path: Path, corpus: Path
) -> None:
    """Volunteers name no address: a node learns its own from who sees it."""
    begin, prefix, anywhere = overlay
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    with (
        OverlayNetwork(begin, prefix) as network,
        Cluster(tmp_path, run, corpus, network) as cluster,
    ):
        own = network.overlay_address("leader")
        announced = f"[{own}]:7700" if ":" in own else f"{own}:7700"
        leader = cluster.start_leader("--listen", f"{anywhere}:7700", "--advertise", announced)
        assert (cluster.join_string(leader) or "").endswith(f"@{announced}")
        for stage, name in enumerate(HOSTS[1:], 1):
            cluster.start_relay(name, "--stage", str(stage), "--listen", f"{anywhere}:0")
        cluster.wait_for_iteration(1)
        found = {node["name"]: node["address"] for node in stage_nodes(leader.status())}
        assert found.keys() == set(HOSTS)
        for name, address in found.items():
            assert split_address(address)[0] == network.overlay_address(name), found
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses, _ = reference(run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8
