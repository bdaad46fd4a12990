"""`decod service` under a real systemd: a node is back after whatever befalls its host."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.net.join_string import JoinString
from tests.support import unhurried
from tests.support.cluster import Cluster, stage_nodes
from tests.support.machine import Machine, MachineError, missing
from tests.support.members import host_key
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

UNIT = "decod.service"
STATE_DIR = "/var/lib/decod"
AT_ONCE = "[Service]\nRestartSec=1\n"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    machine = Machine(tmp_path / "machine")
    try:
        machine.boot()
    except (MachineError, AssertionError) as error:
        machine.switch_off()
        pytest.skip(f"systemd does not start in namespaces here: {error}")
    with_machine = machine
    yield with_machine
    machine.switch_off()


@pytest.fixture
def cluster(tmp_path: Path, corpus: Path) -> Iterator[Cluster]:
    """A run that trains beside the machine, and needs nobody of it."""
    run = make_run(min_nodes_per_stage=1)
    with Cluster(tmp_path / "run", run, corpus) as cluster:
        cluster.start_leader(program=unhurried.PROGRAM)
        cluster.start_relays(1)
        cluster.wait_for_iteration(1)
        yield cluster


def member(cluster: Cluster) -> dict[str, Any] | None:
    """Returns what the leader says of the machine's node, None for a stranger."""
    nodes = stage_nodes(cluster.leader.status())
    return next((node for node in nodes if node["name"] == "served"), None)


def install(machine: Machine, cluster: Cluster, *, join: str | None = None) -> None:
    """Installs a relay as a service of the machine, as an operator does."""
    file = cluster.folder / "join.txt"
    file.write_text(join or cluster.join_string(cluster.leader) or "", encoding="utf-8")
    node = ("--name", "served", "--stage", "1", "--threads", "1", "--listen", "127.0.0.1:0")
    machine.configure(UNIT, "fast", AT_ONCE)
    installed = machine.decod(
        "service", "install", "--run-as", "root", "join", "--join-file", file, *node, check=False
    )
    print(installed.stdout, installed.stderr)
    assert join is not None or installed.returncode == 0, installed


def wait_until_works(machine: Machine, cluster: Cluster) -> str:
    """Returns the node's id, once it is a member that works."""

    def look() -> str | None:
        node = member(cluster)
        # systemd forgets what an earlier process has said.
        works = re.match(r"(training|aggregating), stage 1", machine.show(UNIT, "StatusText"))
        return str(node["id"]) if node is not None and works else None

    start_s = time.monotonic()
    found = cluster.wait_for(look, "the machine's node", timeout_s=120.0)
    print(f"at work after {time.monotonic() - start_s:.1f} s")
    assert machine.show(UNIT, "ActiveState") == "active", machine.log(UNIT)
    cluster.wait_for_iteration(cluster.leader.iteration + 2)
    return str(found)


@pytest.mark.slow
def test_a_node_is_installed_is_back_after_a_reboot_and_is_removed(
    machine: Machine, cluster: Cluster
) -> None:
    install(machine, cluster)
    was = wait_until_works(machine, cluster)
    the_join_string_is_seen_by_nobody(machine, cluster)

    # It says goodbye, and is who it was afterwards.
    machine.shut_down()
    cluster.wait_for(lambda: member(cluster) is None, "its goodbye")
    assert not cluster.leader.events("member.lost")
    machine.boot()
    assert wait_until_works(machine, cluster) == was

    stopped = machine.decod("service", "stop")
    assert stopped.returncode == 0
    cluster.wait_for(lambda: member(cluster) is None, "its goodbye")
    assert "left the run" in machine.decod("service", "logs").stdout
    machine.decod("service", "uninstall")
    assert machine.run("systemctl", "cat", UNIT, check=False).returncode != 0
    assert machine.path(f"{STATE_DIR}/identity.key").exists()
    assert not machine.path("/etc/decod/decod.join").exists()


@pytest.mark.slow
def test_a_node_is_back_after_a_crash_a_hang_and_while_the_clock_is_set(
    machine: Machine, cluster: Cluster
) -> None:
    install(machine, cluster)
    was = wait_until_works(machine, cluster)

    # The process is killed.
    before = machine.show(UNIT, "MainPID")
    machine.signal(UNIT, signal.SIGKILL)
    cluster.wait_for(lambda: machine.show(UNIT, "MainPID") not in ("0", before), "another process")
    assert wait_until_works(machine, cluster) == was
    assert machine.show(UNIT, "NRestarts") == "1"

    # The process hangs: its manager notices.
    machine.configure(UNIT, "watchful", "[Service]\nWatchdogSec=6\n")
    machine.run("systemctl", "restart", UNIT)
    assert wait_until_works(machine, cluster) == was
    before = machine.show(UNIT, "MainPID")
    machine.signal(UNIT, signal.SIGSTOP)
    cluster.wait_for(lambda: machine.show(UNIT, "MainPID") not in ("0", before), "another process")
    assert "watchdog" in machine.log(UNIT).lower()
    assert wait_until_works(machine, cluster) == was

    # The clock is set, an hour forth and back again.
    command = machine.show(UNIT, "ExecStart")
    arguments = command.partition("argv[]=")[2].partition(" ; ")[0].partition("-m decod ")[2]
    skewed = f"{sys.executable} -m tests.support.skewed 3600 {arguments}"
    machine.configure(UNIT, "clock", f"[Service]\nExecStart=\nExecStart={skewed}\n")
    machine.run("systemctl", "restart", UNIT)
    assert wait_until_works(machine, cluster) == was


def the_join_string_is_seen_by_nobody(machine: Machine, cluster: Cluster) -> None:
    secret = (cluster.join_string(cluster.leader) or "").partition("@")[0]
    listed = machine.run("ps", "-eo", "args", "-ww").stdout
    assert "decod join " in listed
    assert secret not in listed
    path = machine.path("/etc/decod/decod.join")
    assert path.read_text(encoding="utf-8").startswith(secret)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_run_that_is_another_now_ends_a_service_and_one_that_is_away_does_not(
    machine: Machine, cluster: Cluster
) -> None:
    join = JoinString.parse(cluster.join_string(cluster.leader) or "")
    elsewhere = replace(join, addresses=("127.0.0.1:1",))
    install(machine, cluster, join=str(elsewhere))
    cluster.wait_for(lambda: int(machine.show(UNIT, "NRestarts")) >= 2, "its repeated starts")
    assert machine.show(UNIT, "ExecMainStatus") in ("0", "4")

    other = replace(join, root=host_key("another root").public)
    install(machine, cluster, join=str(other))
    # systemd may go on counting from before, if it was about to start the service again.
    before = machine.show(UNIT, "NRestarts")
    cluster.wait_for(lambda: machine.show(UNIT, "ActiveState") == "failed", "its end")
    assert machine.show(UNIT, "ExecMainStatus") == "5"
    assert machine.show(UNIT, "NRestarts") == before
    assert "E-REJ-005" in machine.decod("service", "logs").stdout


def test_a_service_of_a_user_and_a_leader_that_goes_on(
    machine: Machine, tmp_path: Path, corpus: Path
) -> None:
    """A leader is shut down with its machine; afterwards it goes on where it was."""
    manager = """[Service]
Type=notify
ExecStart=/usr/lib/systemd/systemd --user
Environment=XDG_RUNTIME_DIR=/run/user/0 HOME=/var/home
ExecStartPre=/bin/mkdir -p /run/user/0 /var/home
Delegate=yes
KillMode=mixed
[Install]
WantedBy=multi-user.target
"""
    machine.path("/etc/systemd/system/manager.service").write_text(manager, encoding="utf-8")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", "manager.service")
    own = {"XDG_RUNTIME_DIR": "/run/user/0", "HOME": "/var/home"}
    cluster = Cluster(tmp_path / "run", make_run(min_nodes_per_stage=1), corpus)
    run_file = cluster.run_file
    state_dir, joins = "/var/home/state", "/var/home/join.txt"

    def decod(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return machine.run(sys.executable, "-m", "decod", *arguments, environment=own)

    where = ("--state-dir", state_dir, "--listen", "127.0.0.1:0", "--write-join", joins)
    installed = decod("service", "install", "--user", "leader", run_file, "--threads", "1", *where)
    assert "started it" in installed.stdout
    assert "enable-linger" in installed.stdout, "nobody keeps track of users here"
    text = decod("service", "install", "--user", "--print", "leader", run_file).stdout
    assert "--resume auto" in text
    assert "NoNewPrivileges" not in text

    def iteration() -> int:
        shown = decod("status", "--state-dir", state_dir, "--json")
        return int(json.loads(shown.stdout)["iteration"])

    def volunteer(before: str = "") -> str:
        """Have the run's stages served, not that of `before` any more; returns the join string."""

        def handed_out() -> str:
            path = machine.path(joins)
            join = path.read_text(encoding="utf-8").strip() if path.exists() else ""
            return join if join != before else ""

        join = cluster.wait_for(handed_out, "the join string")
        for stage in (1, 2):
            name = f"relay-{len(cluster.daemons)}"
            cluster.start(name, "join", join, "--stage", str(stage))
        return join

    with cluster:
        first = volunteer()
        cluster.wait_for(lambda: iteration() >= 3, "three iterations")
        decod("service", "stop", "--user")
        assert [daemon.wait() for daemon in cluster.daemons] == [0, 0]
        decod("service", "start", "--user")
        reached = iteration()
        assert reached >= 3
        volunteer(first)  # A resumed run is another run.
        cluster.wait_for(lambda: iteration() >= reached + 3, "three more")
        decod("service", "uninstall", "--user")
