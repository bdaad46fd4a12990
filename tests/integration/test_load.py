"""A run on a machine that has far too much else to do keeps its members."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.protocol_config import ProtocolConfig
from tests.support.cluster import Cluster
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

LOAD = 30
LOADED_S = 120.0


@contextmanager
def busy(num: int) -> Iterator[None]:
    """Has processes compute that want a processor each."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(num)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


def test_under_a_load_of_30_nobody_is_removed(tmp_path: Path, corpus: Path) -> None:
    """With default settings."""
    run = replace(make_run(min_nodes_per_stage=2), protocol=ProtocolConfig(min_nodes_per_stage=2))
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        cluster.start_relays(2)
        cluster.wait_for_iteration(3)
        with busy(LOAD):
            begin_s, begun = time.monotonic(), leader.iteration
            cluster.wait_for(
                lambda: time.monotonic() - begin_s > LOADED_S,
                "the time to pass",
                timeout_s=2 * LOADED_S,
            )
            done = leader.iteration - begun
        assert not [event["reason"] for event in leader.events("member.lost")]
        assert done >= 1
        print(f"{done} iterations in {LOADED_S:.0f} s at a load of {LOAD}")
