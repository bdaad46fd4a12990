"""A relay pauses by itself for rules and its schedule, and is changed while it runs."""

import signal
import time
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support import busy_gpu, unhurried
from tests.support.cluster import (
    Cluster,
    Daemon,
    assert_refused,
    run_decod,
    stage_nodes,
    takes_part,
)
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def closed_now() -> str:
    """Returns a schedule that opens in two hours."""
    opens = datetime.now().astimezone() + timedelta(hours=2)
    return f"{opens:%H:%M}-{opens + timedelta(hours=1):%H:%M}"


class Scene:
    """A run with two relays in its first stage; others may use the GPU of one of them."""

    def __init__(self, cluster: Cluster, busy: Path) -> None:
        self.cluster, self.busy = cluster, busy
        self.leader = cluster.start_leader(program=unhurried.PROGRAM)
        other = cluster.start_relay("relay-1-0", "--stage", "1")
        cluster.start_relay("relay-2-0", "--stage", "2")
        self.relay = self.start("--pause-when", "busy-gpu")
        cluster.wait_for(lambda: self.relay.is_ready() and self.state() == "training", "its work")
        # The last relay of a stage may not pause.
        cluster.wait_for(partial(takes_part, cluster, other), "the other's work")

    def start(self, *options: str) -> Daemon:
        program = busy_gpu.program(self.busy)
        stage = ("--stage", "1", "--upload-max", "50Mbit")
        return self.cluster.start_relay("relay-1-1", *stage, *options, program=program)

    def state(self) -> object:
        """Returns the relay's state as the leader sees it."""
        nodes = stage_nodes(self.leader.status())
        return next((node["state"] for node in nodes if node["name"] == "relay-1-1"), None)

    def causes(self) -> list[str]:
        return [cause["name"] for cause in self.relay.status()["pausing"]["causes"]]

    def wait_for(self, state: str) -> None:
        self.cluster.wait_for(lambda: self.state() == state, state)

    def run(self, *command: str, of: Daemon | None = None) -> "CompletedProcess[str]":
        return run_decod(*command, "--state-dir", (of or self.relay).state_dir)


def test_a_relay_pauses_while_others_use_its_gpu(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path / "run", make_run(min_nodes_per_stage=1), corpus) as cluster:
        scene = Scene(cluster, tmp_path / "busy")
        relay, leader = scene.relay, scene.leader
        start_s = time.monotonic()
        scene.busy.touch()
        cluster.wait_for(lambda: relay.events("pause.wanted"), "the cause", timeout_s=5.0)
        cluster.wait_for(lambda: relay.events("capacity.agreed"), "the leader", timeout_s=5.0)
        print(f"paused {time.monotonic() - start_s:.1f} s after the cause")
        assert time.monotonic() - start_s < 5.0
        scene.wait_for("paused")
        shown = scene.run("status")
        assert "paused: others keep the GPU 90 % busy and hold 6.0 GiB" in shown.stdout
        assert "pausing" not in leader.status(), "what a host does is nobody else's business"
        assert "still paused: others keep the GPU" in scene.run("resume").stdout
        assert scene.state() == "paused"

        # A person's pause stays when the cause has gone.
        assert scene.run("pause").returncode == 0
        scene.busy.unlink()
        cluster.wait_for(lambda: not scene.causes(), "the end of the cause")
        cluster.wait_for_iteration(leader.iteration + 3)
        assert scene.state() == "paused"
        assert scene.run("resume").returncode == 0
        scene.wait_for("training")


def test_a_running_relay_is_set_and_keeps_that_over_a_restart(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path / "run", make_run(min_nodes_per_stage=1), corpus) as cluster:
        scene = Scene(cluster, tmp_path / "busy")
        schedule = closed_now()
        closed = scene.run("set", f"schedule={schedule}", "threads=2")
        assert closed.returncode == 0, closed
        assert "from now on" in closed.stdout
        scene.wait_for("paused")
        shown = scene.run("status").stdout
        assert f"paused: outside its schedule, {schedule}, until 20" in shown
        refused = scene.run("set", "schedule=always", "upload=fast")
        assert_refused(refused, exit_code=3, holds=["E-CFG-056", "20Mbit"])
        assert scene.causes() == ["schedule"], "all is changed or nothing"
        assert "a restart with" in scene.run("set", "schedule=always", "upload=20Mbit").stdout
        scene.wait_for("training")

        scene.relay.send(signal.SIGTERM)
        assert scene.relay.wait() == 0
        again = scene.start()
        cluster.wait_for(again.try_status, "its answer")
        shown = scene.run("set").stdout
        found = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
        assert found["upload"] == "50Mbit (--upload-max of this start)"
        assert found["schedule"] == "always (decod set)"
        assert found["threads"] == "1 (--threads of this start)"
        assert found["download"] == "no limit (default)"
        assert found["pause_when"] == "none (--pause-when of this start)"

        # A data node has caps, but no pauses.
        refused = scene.run("set", "pause_when=hot", of=scene.leader)
        assert_refused(refused, exit_code=3, holds=["E-CFG-055", "data node"])
        assert scene.run("set", "download=100Mbit", of=scene.leader).returncode == 0
        cluster.wait_for_iteration(scene.leader.iteration + 2)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_damaged_settings_file_stops_the_start(tmp_path: Path, dry: tuple[str, ...]) -> None:
    (tmp_path / "settings.json").write_text('{"upload": "20Mbit",}')
    result = run_decod("join", "decod1-x", "--state-dir", tmp_path, *dry)
    assert_refused(result, exit_code=3, holds=["E-CFG-051", "settings.json:1:", "reference.md"])
