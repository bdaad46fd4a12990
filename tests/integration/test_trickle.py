"""A relay whose tensors trickle does not stop the run, and is in it again when they don't."""

import time
from functools import partial
from pathlib import Path

import pytest

from tests.support import trickling
from tests.support.cluster import Cluster, takes_part
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(500)]

ASIDE_WITHIN_S = 130.0
"""Two members must have given up a tensor; each takes most of half a minute."""


def test_a_relay_whose_tensors_trickle_is_set_aside_until_they_flow(
    tmp_path: Path, corpus: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        leader = cluster.start_leader()
        relays = [
            cluster.start_relay(name, "--stage", name[6], program=trickling.PROGRAM)
            for name in ("relay-1-0", "relay-1-1", "relay-2-0")
        ]
        for relay in relays:
            cluster.wait_for(partial(takes_part, cluster, relay), f"{relay.name} in the run")
        slow = relays[0]
        flag = slow.state_dir / trickling.FLAG
        flag.touch()
        since_s = time.monotonic()
        (aside,) = cluster.wait_for(
            lambda: leader.events("member.aside"), "it to be set aside", timeout_s=ASIDE_WITHIN_S
        )
        print(f"set aside after {time.monotonic() - since_s:.0f} s: {aside['reason']}")
        assert slow.status()["node"]["id"] == aside["peer"]
        assert "take too long" in aside["reason"]
        cluster.wait_for_iteration(leader.iteration + 5)
        cluster.wait_for(lambda: slow.status()["state"] == "reconnecting", "it to come back")
        flag.unlink()
        cluster.wait_for(slow.is_ready, "its return", timeout_s=120.0)
        assert len(leader.events("member.aside")) == 1
