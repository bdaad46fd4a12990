"""Caps on what a relay uses, measured while the run goes on."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decod.run.training_config import BatchConfig
from decod.train.checkpoint.places import size_of_folder
from tests.support.cluster import Cluster, run_decod
from tests.support.network import Network, missing
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

CAP_MBIT = 8.0
HOSTS = ("leader", "relay-1-0", "relay-2-0")
NUM_ITERATIONS = 8
MINUTE_S = 60.0


def counted(network: Network, host: str, direction: str) -> int:
    """Returns the bytes that a host's interface has sent (`tx`) or received (`rx`)."""
    show = ("ip", "-n", network.namespace(host).name, "-s", "-j", "link", "show")
    links = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
    return sum(each["stats64"][direction]["bytes"] for each in links if each["ifname"] != "lo")


@pytest.mark.netns
@pytest.mark.parametrize(("name", "direction"), [("upload", "tx"), ("download", "rx")])
def test_a_relay_stays_below_its_cap_while_the_run_goes_on(
    tmp_path: Path, corpus: Path, name: str, direction: str
) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    batch = BatchConfig(sequence_length=32, microbatch_size=32, num_microbatches=8)
    run = replace(make_run(min_nodes_per_stage=1), batch=batch)
    access = dict.fromkeys(HOSTS, 1000.0)
    with Network(HOSTS, {}, access) as network, Cluster(tmp_path, run, corpus, network) as cluster:
        leader = cluster.start_leader()
        relay = cluster.start_relay("relay-1-0", "--stage", "1", f"--{name}-max", "8Mbit")
        cluster.start_relay("relay-2-0", "--stage", "2")

        def measured(now: Callable[[], int], *, least_s: float = 0.0) -> float:
            """Returns the rate over some iterations, and so many seconds, in Mbit/s."""
            begun = leader.iteration + 2
            cluster.wait_for_iteration(begun, timeout_s=60.0)
            before, start_s = now(), time.monotonic()
            cluster.wait_for_iteration(begun + NUM_ITERATIONS, timeout_s=120.0)
            cluster.wait_for(
                lambda: time.monotonic() - start_s >= least_s, "the end", timeout_s=2 * MINUTE_S
            )
            return 8e-6 * (now() - before) / (time.monotonic() - start_s)

        rate = measured(lambda: counted(network, "relay-1-0", direction), least_s=MINUTE_S)
        if name == "upload":
            # All members hear who makes the iterations longer, and over which links.
            slow = cluster.wait_for(lambda: relay.status()["slow"], "a name", timeout_s=30.0)
            assert [(one["name"], one["by"]) for one in slow] == [("relay-1-0", "sending")]
            held_up = {one["from"] for one in leader.status()["links"] if one["holds_up"]}
            assert held_up == {slow[0]["id"]}
        result = run_decod("set", f"{name}=default", "--state-dir", relay.state_dir)
        assert result.returncode == 0, result
        free = measured(lambda: counted(network, "relay-1-0", direction))
        print(f"{name}: {rate:.2f} Mbit/s with a cap of {CAP_MBIT:g}, {free:.2f} without one")
        assert rate <= 1.05 * CAP_MBIT
        # The cap was what held it back, and its end counts at once.
        assert rate >= 0.5 * CAP_MBIT
        assert free >= 1.5 * CAP_MBIT
        assert not leader.events("member.lost")


def test_a_relays_folder_stays_below_its_cap_while_the_run_goes_on(
    tmp_path: Path, corpus: Path
) -> None:
    # A stage's state takes 25 MiB, so its folder has room for two of them.
    run = make_run(min_nodes_per_stage=1)
    run = replace(run, model=replace(run.model, hidden_size=224, intermediate_size=576))
    most_bytes = 0
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader()
        relay = cluster.start_relay("relay-1-0", "--stage", "1", "--disk-max", "64MiB")
        cluster.start_relay("relay-2-0", "--stage", "2")

        def refused() -> bool:
            nonlocal most_bytes
            most_bytes = max(most_bytes, size_of_folder(relay.state_dir))
            return len(relay.events("state.unkept")) > 0

        cluster.wait_for(refused, "a state that does not fit", timeout_s=120.0)
        end = leader.iteration + NUM_ITERATIONS
        cluster.wait_for(lambda: refused() and leader.iteration >= end, "more", timeout_s=120.0)
        assert "decod set disk" in relay.status()["states"]["problem"]
        assert not leader.events("member.lost")
    print(f"disk: {most_bytes / 2**20:.1f} MiB with a cap of 64")
    assert 32 << 20 < most_bytes <= 64 << 20
