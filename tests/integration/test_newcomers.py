"""Newcomers who wait until the organiser lets them in, with real daemons."""

import json
import signal
from pathlib import Path

import pytest

from decod.exit_codes import ExitCode
from tests.support.cluster import Cluster, run_decod, takes_part
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def newcomers(cluster: Cluster) -> list[str]:
    folder = ("--state-dir", cluster.leader.state_dir)
    listed = json.loads(run_decod("node", "list", "--json", *folder).stdout)
    return [each["id"] for each in listed if each["state"] == "waiting"]


def test_the_organiser_lets_newcomers_in_or_sends_them_away(corpus: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        run_file = cluster.run_file.read_text()
        cluster.run_file.write_text(run_file.replace("ask = false", "ask = true"))
        leader = cluster.start_leader()
        first = cluster.start_relay("first", "--stage", "1")
        cluster.wait_for(lambda: newcomers(cluster), "the newcomer in the list")
        assert leader.status()["num_newcomers"] == 1
        assert "has not decided yet" in first.stdout
        (waiting,) = newcomers(cluster)
        folder = ("--state-dir", leader.state_dir)
        told = leader.events("member.asking")[-1]["id"]
        assert f"decod node accept {told}" in leader.stderr
        done = run_decod("node", "accept", told, *folder)
        assert "may come in" in done.stdout
        again = run_decod("node", "accept", "a" * 12, *folder)
        assert (again.returncode, "E-CFG-087" in again.stderr) == (ExitCode.CONFIG, True)
        short = run_decod("node", "accept", waiting[:8], *folder)
        assert "at least 12 characters" in short.stderr
        second = cluster.start_relay("second", "--stage", "2")
        cluster.wait_for(
            lambda: waiting not in newcomers(cluster) and newcomers(cluster), "another"
        )
        assert run_decod("node", "refuse", newcomers(cluster)[0], *folder).returncode == 0
        assert second.wait() == ExitCode.REJECTED
        assert "E-REJ-024" in second.stderr
        third = cluster.start_relay("third", "--stage", "2")
        cluster.wait_for(lambda: newcomers(cluster), "a third one")
        run_decod("node", "accept", newcomers(cluster)[0], *folder)
        for daemon in (leader, first, third):
            cluster.wait_for(lambda d=daemon: takes_part(cluster, d), f"{daemon.name} in the run")


def test_nobody_slips_in_while_the_leader_starts_again(corpus: Path, tmp_path: Path) -> None:
    """The newcomer asks all the time, and the leader knows nothing of it after a restart."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        run_file = cluster.run_file.read_text()
        cluster.run_file.write_text(run_file.replace("ask = false", "ask = true"))
        leader = cluster.start_leader()
        cluster.start_relay("first", "--stage", "1")
        cluster.wait_for(lambda: newcomers(cluster), "the newcomer in the list")
        address = leader.status()["node"]["address"]
        leader.send(signal.SIGKILL)
        leader.wait()
        again = cluster.start_leader("--listen", address)
        waiting = cluster.wait_for(lambda: newcomers(cluster), "the newcomer in the list again")
        assert not again.events("member.admitted")
        folder = ("--state-dir", again.state_dir)
        assert run_decod("node", "accept", waiting[0][:12], *folder).returncode == 0
        cluster.wait_for(lambda: again.events("member.admitted"), "the newcomer as a member")
