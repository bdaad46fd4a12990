"""What a volunteer can find out about a node that was killed, and about what it has done."""

import json
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from decod.exit_codes import ExitCode
from tests.support.cluster import Cluster, Daemon, run_decod
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def told(daemon: Daemon, *words: str) -> dict[str, Any]:
    """Returns what a command prints as JSON about a node."""
    result = run_decod(*words, "--json", "--state-dir", daemon.state_dir)
    assert result.returncode == 0, result
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def num_credited(daemon: Daemon) -> int:
    return int(told(daemon, "credit")["total"]["num_microbatches"])


@pytest.mark.slow
def test_a_killed_relay_keeps_its_credit_and_its_records_say_what_they_know(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader()
        relay, *_ = cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        cluster.wait_for(lambda: num_credited(relay), "its credit on the disk")
        shown = run_decod("status", "--state-dir", relay.state_dir).stdout
        assert "You did " in shown
        idle = told(relay, "why", "idle")["answers"][0]
        assert {"compute_share", "wait_share"} <= {each["name"] for each in idle["figures"]}

        relay.send(signal.SIGKILL)
        relay.wait()
        before = num_credited(relay)
        assert before > 0
        (idle,) = told(relay, "why", "idle")["answers"]
        assert "its log ends without a goodbye" in idle["cause"]
        assert not idle["known"]

        for daemon in (relay, leader):
            path = tmp_path / f"{daemon.name}.tar.gz"
            result = run_decod("bugreport", "-y", "-o", path, "--state-dir", daemon.state_dir)
            assert result.returncode == ExitCode.OK, result
            files = unpacked(path)
            checks = {each["check"] for each in json.loads(files["doctor.json"])["checks"]}
            assert {"node", "device", "disk"} <= checks
            secret = (cluster.join_string(leader) or "").split("-")[3]
            key = (daemon.state_dir / "identity.key").read_text().splitlines()[1]
            for name, text in files.items():
                assert secret not in text, name
                assert key not in text, name
        started = json.loads(files["configuration.json"])
        assert started["in_use"]
        assert json.loads(files["status.json"])["iteration"] > 0

        again = cluster.start_relay(relay.name, "--stage", "1")
        cluster.wait_for(lambda: num_credited(again) > before, "more credit than before")


def unpacked(path: Path) -> dict[str, str]:
    """Returns the files of a report, by the name within its folder."""
    found = {}
    with tarfile.open(path) as archive:
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            found[info.name.partition("/")[2]] = file.read().decode()
    return found
