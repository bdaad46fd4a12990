"""Data nodes that others can't reach are not let in. Operators are told why and what to do."""

import socket
import subprocess
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support import unhurried
from tests.support.cluster import DECOD, Cluster, assert_refused, run_decod, stage_nodes
from tests.support.network import Network, missing
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def training(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    run = make_run(min_nodes_per_stage=1, num_data_nodes=2)
    folder = tmp_path_factory.mktemp("training")
    with Cluster(folder, run, corpus) as living:
        living.start_leader(program=unhurried.PROGRAM)
        yield living


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    return ["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"), "--threads", "1"]


def join_string(cluster: Cluster) -> str:
    found = cluster.join_string(cluster.leader)
    assert found is not None
    return found


def assert_no_candidate(cluster: Cluster) -> None:
    """Checks that the leader has let nobody in but itself."""
    joined = {record["peer"] for record in cluster.leader.events("candidate.joined")}
    assert joined == {cluster.leader.status()["node"]["id"]}


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody else will."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield closed.getsockname()[1]


def as_data_node(cluster: Cluster) -> list[str]:
    """Returns a command that joins as a data node, which others must be able to dial."""
    return ["leader", str(cluster.run_file), "--join", cluster.invite(Role.DATA)]


def test_a_closed_port_is_told(training: Cluster, place: list[str], closed_port: int) -> None:
    place += ["--advertise", f"127.0.0.1:{closed_port}"]
    result = run_decod(*as_data_node(training), *place)
    address = f"127.0.0.1:{closed_port}"
    holds = ["E-NET-013", f"at {address}: nobody listens there", "--advertise", "firewall"]
    assert_refused(result, exit_code=4, holds=holds)
    assert_no_candidate(training)


def test_an_address_of_another_node_is_told(training: Cluster, place: list[str]) -> None:
    (leader,) = JoinString.parse(join_string(training)).addresses
    result = run_decod(*as_data_node(training), *place, "--advertise", leader)
    assert_refused(result, exit_code=4, holds=["E-NET-013", "another node answers there"])
    assert_no_candidate(training)


@pytest.mark.slow
def test_an_address_where_somebody_else_listens_is_told(
    training: Cluster, place: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = run_decod(*as_data_node(training), *place, "--advertise", address)
    assert_refused(result, exit_code=4, holds=["E-NET-013", "no answer within 4 s"])
    assert_no_candidate(training)


@pytest.mark.slow
@pytest.mark.netns
def test_volunteers_with_a_wrong_address_train_and_are_told(tmp_path: Path, corpus: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    hosts = ("leader", "near", "far")
    rates = dict.fromkeys(permutations(hosts, 2), 100.0)
    with (
        Network(hosts, rates) as network,
        Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus, network) as cluster,
    ):
        leader = cluster.start_leader()
        alone = cluster.start_relay("near", "--stage", "1", "--listen", "127.0.0.1:0")
        # An address that is no host's, as one of a home network is to the world outside.
        unknown = cluster.start_relay("far", "--stage", "2", "--advertise", "10.99.0.77:7700")
        cluster.wait_for_iteration(2)
        assert "--listen 0.0.0.0:" in alone.stdout
        assert "nobody can dial this node at 10.99.0.77:7700" in unknown.stdout
        reach = {node["name"]: node["reach"] for node in stage_nodes(leader.status())}
        assert (reach["near"], reach["far"]) == ("outbound", "outbound")


@pytest.mark.netns
def test_a_leader_whose_address_means_every_host_itself_is_told_so_as_is_who_finds_it(
    tmp_path: Path, corpus: Path
) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    hosts = ("leader", "far")
    rates = dict.fromkeys(permutations(hosts, 2), 100.0)
    with (
        Network(hosts, rates) as network,
        Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus, network) as cluster,
    ):
        leader = cluster.start_leader("--listen", "0.0.0.0:7700", "--advertise", "127.0.0.1:7700")
        first = join_string(cluster)
        # The organiser corrects the join string by hand, and the leader goes on as it is.
        corrected = first.replace("@127.0.0.1:", f"@{network.address('leader')}:")
        state = str(tmp_path / "far")
        command = [*network.command("far"), *DECOD, "join", corrected, "--state-dir", state]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        holds = ["E-NET-037", "it is at 127.0.0.1:7700", "--advertise"]
        assert_refused(result, exit_code=4, holds=holds)
        told = [record["reason"] for record in leader.events("address.doubtful")]
        assert len(told) == 2
        assert told[0].startswith("nodes of other hosts can't reach this one at 127.0.0.1:7700")
        assert told[1].startswith(f"a node at {network.address('far')} asks this one")
        assert all("--advertise" in each for each in told)


@pytest.mark.netns
def test_without_a_default_route_hosts_of_a_lan_find_each_other(
    tmp_path: Path, corpus: Path
) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    hosts = ("leader", "far", "near")
    rates = dict.fromkeys(permutations(hosts, 2), 100.0)
    with (
        Network(hosts, rates) as network,
        Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus, network) as cluster,
    ):
        leader = cluster.start_leader("--listen", "0.0.0.0:7700")
        for name in ("far", "near"):
            cluster.start_relay(name, "--listen", "0.0.0.0:7700")
        cluster.wait_for_iteration(1)
        addresses = {node["address"] for node in stage_nodes(leader.status())}
        assert addresses == {f"{network.address(host)}:7700" for host in hosts}
        assert JoinString.parse(join_string(cluster)).addresses == (
            f"{network.address('leader')}:7700",
        )
        assert not leader.events("address.doubtful")
