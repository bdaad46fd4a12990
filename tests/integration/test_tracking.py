"""A leader writes its curves for TensorBoard while it trains."""

from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.support.cluster import Cluster
from tests.support.event_files import numbers_of, read_events
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_ITERATIONS = 12


def test_tensorboard_shows_the_losses_of_a_run(tmp_path: Path, corpus: Path) -> None:
    run = make_run(num_iterations=NUM_ITERATIONS, min_nodes_per_stage=1)
    folder = tmp_path / "curves"
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--tensorboard", folder)
        cluster.start_relays(1)
        assert leader.wait() == 0
        losses = leader.losses()
    (path,) = folder.glob(f"{run.name}-*/events.out.tfevents.*")
    events: list[Event] = [event for event in read_events(path) if event.summary.value]
    found = {event.step: numbers_of(event) for event in events}
    assert [*found] == list(range(1, NUM_ITERATIONS + 1))
    for iteration, numbers in found.items():
        assert numbers["loss"] == pytest.approx(losses[iteration], rel=1e-6)
        assert numbers["num_members"] == 1 + run.stages.num_relay_stages
