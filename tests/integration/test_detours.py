"""Real daemons, two of which have a slow link: what these exchange goes by way of the data node."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.network import Network, missing
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.netns, pytest.mark.timeout(180)]

LEADER, RELAYS = "leader", ("relay-1", "relay-2")
FAST_MBIT_PER_S, SLOW_MBIT_PER_S = 100.0, 0.8
NUM_ITERATIONS = 4


def test_tensors_go_round_a_slow_link(tmp_path: Path, corpus: Path) -> None:
    """Once it has been measured; and what is learnt is the same."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    hosts = (LEADER, *RELAYS)
    rates = dict.fromkeys(itertools.permutations(hosts, 2), FAST_MBIT_PER_S)
    rates[RELAYS] = rates[RELAYS[::-1]] = SLOW_MBIT_PER_S
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    # Activations large enough to be timed.
    run = replace(run, batch=replace(run.batch, microbatch_size=16))
    size_bytes = run.batch.tokens_per_microbatch * run.model.hidden_size * run.model.dtype.num_bytes
    direct_s = run.batch.num_microbatches * size_bytes * 8 / (SLOW_MBIT_PER_S * 1e6)
    with Network(hosts, rates) as network, Cluster(tmp_path, run, corpus, network) as cluster:
        leader = cluster.start_leader(name=LEADER)
        for index, name in enumerate(RELAYS):
            cluster.start_relay(name, "--stage", str(index + 1))
        assert set(cluster.wait_for_end(timeout_s=150).values()) == {0}
        durations_s = [e["duration_s"] for e in leader.events("iteration.committed")]
        losses, _ = reference(run, corpus, NUM_ITERATIONS)
        assert loss_error(leader.losses(), losses) < 1e-8
    print(f"over the slow link at least {direct_s:.1f} s; iterations took {durations_s} s")
    assert min(durations_s) < direct_s / 2
