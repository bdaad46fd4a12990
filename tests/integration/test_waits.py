"""Whatever lasts says what it waits for, within two seconds: ten waits, with real daemons."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import DECOD, Cluster, Daemon, child_environment, run_decod, takes_part
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

_RUN = make_run(min_nodes_per_stage=1)
_SLOW = 20.0
"""Seconds until this is a failure on a slow machine."""


@pytest.fixture
def cluster(corpus: Path, tmp_path: Path) -> Iterator[Cluster]:
    protocol = replace(_RUN.protocol, heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
    with Cluster(tmp_path, replace(_RUN, protocol=protocol), corpus) as made:
        yield made


def explained(cluster: Cluster, told: Callable[[], str], *words: str) -> None:
    """Wait until a text has all words, and print how long it took."""
    begun_s = time.monotonic()

    def line() -> str | None:
        lines = told().splitlines()
        return next((line for line in lines if all(each in line for each in words)), None)

    found = cluster.wait_for(line, words[0], timeout_s=_SLOW)
    print(f"after {time.monotonic() - begun_s:.1f} s: {found.strip()}")


def status_of(daemon: Daemon) -> Callable[[], str]:
    """Return what `decod status` prints of a daemon, be it an error."""

    def told() -> str:
        shown = run_decod("status", "--state-dir", daemon.state_dir)
        return shown.stdout + shown.stderr

    return told


@contextmanager
def running(
    folder: Path, *arguments: str | Path, **environment: str
) -> Iterator[Callable[[], str]]:
    """Yield what a `decod` command has said so far on standard error. It is killed at the end."""
    path = folder / "said"
    with path.open("wb") as said:
        process = subprocess.Popen(
            [*DECOD, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**child_environment(), **environment},
        )
        try:
            yield path.read_text
        finally:
            process.kill()
            process.wait()


def in_training(cluster: Cluster, *names: str) -> list[Daemon]:
    """Start the leader and a relay of stage 1, 2 and so on for each name, and let them train."""
    cluster.start_leader()
    relays = [
        cluster.start_relay(name, "--stage", str(stage)) for stage, name in enumerate(names, 1)
    ]
    for relay in relays:
        cluster.wait_for(lambda r=relay: takes_part(cluster, r), f"{relay.name} in the run")
    cluster.wait_for_iteration(1)
    return relays


def test_a_run_whose_leader_does_not_answer(cluster: Cluster) -> None:
    cluster.start_leader().send(signal.SIGSTOP)
    relay = cluster.start_relay("early")
    explained(cluster, status_of(relay), "it waits for an answer from the run", "so far")
    cluster.leader.send(signal.SIGCONT)


def test_an_organiser_who_has_not_decided(cluster: Cluster) -> None:
    text = cluster.run_file.read_text(encoding="utf-8")
    cluster.run_file.write_text(text.replace("ask = false", "ask = true"), encoding="utf-8")
    cluster.start_leader()
    relay = cluster.start_relay("newcomer")
    explained(cluster, status_of(relay), "the organiser to let this host in", "so far")
    left = run_decod("drain", "--state-dir", relay.state_dir)
    assert (left.returncode, left.stdout) == (0, "left the run: it was in no run yet\n")
    assert relay.wait() == 0


def test_torch_that_takes_its_time(cluster: Cluster) -> None:
    cluster.start_leader()
    relay = cluster.start_relay("slow")
    cluster.wait_for(relay.compute_pid, "the compute process")
    pid = relay.compute_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    explained(cluster, status_of(relay), "waiting for torch to load", "so far")
    os.kill(pid, signal.SIGCONT)


def test_a_leader_without_enough_relays(cluster: Cluster) -> None:
    leader = cluster.start_leader()
    cluster.start_relay("alone", "--stage", "1")
    explained(cluster, status_of(leader), "stage 2 has 0 of 1")


def test_a_stage_that_has_lost_its_last_member(cluster: Cluster) -> None:
    _, second = in_training(cluster, "first", "second")
    second.send(signal.SIGKILL)
    explained(cluster, status_of(cluster.leader), "stage 2")


def test_a_leader_that_falls_silent(cluster: Cluster) -> None:
    first, _ = in_training(cluster, "first", "second")
    cluster.leader.send(signal.SIGSTOP)
    explained(cluster, status_of(first), "nothing has come from the leader")
    cluster.leader.send(signal.SIGCONT)


def test_a_member_that_drains(cluster: Cluster, tmp_path: Path) -> None:
    _, second = in_training(cluster, "first", "second")
    with running(tmp_path, "drain", "--yes", "--state-dir", second.state_dir) as said:
        explained(cluster, said, "waiting for another member of stage 2: leaves in")


def test_an_export_and_a_text_for_which_a_stage_does_not_answer(
    cluster: Cluster, tmp_path: Path
) -> None:
    _, second = in_training(cluster, "first", "second")
    folder = ("--state-dir", cluster.leader.state_dir)
    second.send(signal.SIGSTOP)
    with running(tmp_path, "export", tmp_path / "model", *folder) as said:
        explained(cluster, said, "the leader puts the model together", "so far")
        explained(cluster, status_of(cluster.leader), "waiting for the weights of all stages")
    with running(tmp_path, "generate", "Once", *folder) as said:
        explained(cluster, said, "the leader puts the model together", "so far")
    second.send(signal.SIGCONT)


def test_a_hub_that_hangs(cluster: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        asked = ("generate", "--model", "someone/model", "Once")
        with running(tmp_path, *asked, HF_ENDPOINT=hub, HF_HUB_OFFLINE="0") as said:
            explained(cluster, said, "asking the Hub for someone/model", "so far")
