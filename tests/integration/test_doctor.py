"""`decod doctor` beside a run: on a volunteer's host before it joins, and while its node runs."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, Daemon, run_decod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

HERE = ("--listen", "127.0.0.1:0", "--device", "cpu")


def examine(state_dir: Path, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """Returns what `decod doctor` says, by the name of the check."""
    result = run_decod("doctor", "--json", "--state-dir", state_dir, *arguments)
    assert result.returncode == code, result
    assert "Traceback" not in result.stderr
    found = {each["check"]: each for each in json.loads(result.stdout)["checks"]}
    assert all((each["level"] == "OK") == (each["remedy"] is None) for each in found.values())
    return found


def join_string(cluster: Cluster) -> str:
    found = cluster.join_string(cluster.leader)
    assert found is not None
    return found


def copy_papers(daemon: Daemon, folder: Path) -> None:
    """Makes a folder that of the same member. Its own node goes on, and is left alone."""
    shutil.copy(daemon.state_dir / "identity.key", folder)
    shutil.copytree(daemon.state_dir / "memberships", folder / "memberships")


def relay_of(cluster: Cluster) -> Daemon:
    return cluster.daemons[1]


def test_a_host_is_examined_without_a_run(tmp_path: Path) -> None:
    found = examine(tmp_path / "state", *HERE)
    assert found["device"]["level"] == found["port"]["level"] == found["disk"]["level"] == "OK"
    assert found["device"]["found"].startswith("CPU, ")
    assert "decod doctor JOINSTRING" in found["run"]["remedy"]
    assert "reach" not in found
    assert not list(tmp_path.iterdir())


def test_a_volunteer_asks_the_run_before_it_joins(training: Cluster, tmp_path: Path) -> None:
    """Without papers nobody dials it, and the token has as many uses as before."""
    found = examine(tmp_path / "state", join_string(training), *HERE)
    assert found["node"]["found"].startswith("none runs")
    assert found["run"]["level"] == found["clock"]["level"] == "OK"
    assert "within 1 s of the clock of 127.0.0.1:" in found["clock"]["found"]
    assert "only members are dialled" in found["reach"]["found"]
    assert found["nat"]["found"].startswith("unknown")
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_fails(training: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        options = ("--listen", place, "--device", "cpu")
        found = examine(tmp_path, join_string(training), *options, code=4)
    assert found["port"]["level"] == "FAIL"
    assert place in found["port"]["found"]
    assert found["run"]["level"] == "OK"


def test_a_run_that_is_gone_fails(training: Cluster, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        head = join_string(training).partition("@")[0]
        gone = f"{head}@127.0.0.1:{closed.getsockname()[1]}"
        found = examine(tmp_path, gone, *HERE, code=4)
    assert "nobody listens there" in found["run"]["found"]
    assert "E-NET-" in found["run"]["found"]


@pytest.mark.parametrize("given", [True, False], ids=["join string", "no join string"])
def test_the_node_of_this_host_is_dialled(training: Cluster, given: bool) -> None:
    relay = relay_of(training)
    found = examine(relay.state_dir, *((join_string(training),) if given else ()))
    assert found["node"]["found"].startswith("relay-1-0 is in run ")
    assert found["device"]["found"] == "cpu, in use by the node"
    address = relay.status()["node"]["address"]
    assert found["reach"]["level"] == "OK"
    assert f"reaches this host at {address}" in found["reach"]["found"]
    assert relay.is_ready()


def test_a_member_that_does_not_run_is_dialled(training: Cluster, tmp_path: Path) -> None:
    copy_papers(relay_of(training), tmp_path)
    found = examine(tmp_path, join_string(training), *HERE)
    assert found["reach"]["level"] == "OK"
    leader = training.leader.status()["node"]["address"]
    assert found["reach"]["found"].startswith(f"the node at {leader} reaches this host at 127.")


def test_a_member_that_can_not_be_reached_is_told(training: Cluster, tmp_path: Path) -> None:
    copy_papers(relay_of(training), tmp_path)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        wrong = f"127.0.0.1:{closed.getsockname()[1]}"
        found = examine(tmp_path, join_string(training), *HERE, "--advertise", wrong)
    assert found["reach"]["level"] == "WARN"
    assert f"at {wrong}: nobody listens there" in found["reach"]["found"]
    assert "open TCP and UDP port" in found["reach"]["remedy"]
