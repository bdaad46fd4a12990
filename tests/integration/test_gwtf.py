"""Real daemons with `routing = "gwtf"`: they redirect flows over sockets while they train."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

DEAR = (sys.executable, "-u", "-m", "tests.support.dear", "0.5")
"""Beside it the other relay of its stage costs next to nothing, and has room for all flows."""

_ROOM = ("--capacity", "8")


def test_flows_are_redirected_and_the_run_learns_what_one_process_learns(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run()
    protocol = replace(run.protocol, routing="gwtf", negotiation_interval_s=0.1)
    run = replace(run, protocol=protocol)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        dear = cluster.start_relay("relay-1-0", "--stage", "1", *_ROOM, program=DEAR)
        for name, stage in (("relay-1-1", "1"), ("relay-2-0", "2"), ("relay-2-1", "2")):
            cluster.start_relay(name, "--stage", stage, *_ROOM)
        beside = cluster.daemons[2]

        cluster.wait_for(lambda: beside.events("flow.redirected"), "a flow that is redirected")
        assert not dear.events("flow.redirected")
        cluster.wait_for(lambda: leader.events("flows.settled"), "an opening with found flows")
        cluster.wait_for_iteration(leader.iteration + 5)
        leader.end_run()
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes

        losses = leader.losses()
        assert sorted(losses) == [*range(1, len(losses) + 1)]
        expected, _ = reference(run, corpus, len(losses))
        assert loss_error(losses, expected) < 1e-8
