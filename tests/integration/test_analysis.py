"""Real runs are recorded, and `decod analyse` names the bottlenecks that a test has built in."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.exit_codes import ExitCode
from decod.insight.round_files import read_records
from decod.journal.journal_file import FOLDER
from decod.run.run_config import RunConfig
from decod.run.training_config import ActivationCompression, ActivationsConfig
from tests.support import slowed
from tests.support.cluster import DECOD, Cluster, run_decod
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

RUN = make_run(num_iterations=12, min_nodes_per_stage=1)


def analysed(folder: Path, *options: str) -> dict[str, Any]:
    result = run_decod("analyse", folder, "--json", *options)
    assert result.returncode == ExitCode.OK, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def train(
    folder: Path,
    run: RunConfig,
    corpus: Path,
    *,
    slow: Mapping[str, tuple[str, ...]],
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run a leader, and as many relays in each of two stages as the run asks for.

    Args:
        folder: For the run.
        run: The run.
        corpus: Its data.
        slow: Programs of slow nodes, by their names.
        options: The leader's.

    Returns:
        The report.
    """
    with Cluster(folder, run, corpus) as cluster:
        cluster.start_leader(*options, program=slow.get("leader", DECOD))
        for stage in (1, 2):
            for index in range(run.protocol.min_nodes_per_stage):
                name = f"relay-{stage}-{index}"
                program = slow.get(name, DECOD)
                cluster.start_relay(name, "--stage", str(stage), program=program)
        codes = cluster.wait_for_end(timeout_s=150.0)
        assert set(codes.values()) == {0}, codes
    return analysed(folder, "--rounds", "8")


def test_each_node_records_its_iterations(tmp_path: Path, corpus: Path) -> None:
    with Cluster(tmp_path, RUN, corpus) as cluster:
        leader = cluster.start_leader()
        cluster.start_relays(1)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        losses = leader.losses()
    for daemon in cluster.daemons:
        records = read_records([daemon.state_dir])
        assert not records.num_problems
        assert [row.round for row in records.rounds] == list(range(2, 13))
        for row in records.rounds:
            assert row.name == daemon.name
            assert row.samples == row.round_samples == 16
            assert row.loss == pytest.approx(losses[row.round], abs=1e-6)
            parts = (row.data_s, row.forward_s, row.backward_s, row.optimizer_s)
            assert all(part is not None for part in parts)
            assert sum(part or 0.0 for part in parts) <= row.round_s
            assert 0 < (row.averaging_s or 0.0) < row.round_s
            # 8 microbatches of 2 sequences, 32 positions, 32 float64, to the next node and back.
            assert row.sent_bytes == row.received_bytes == 2 * 8 * 2 * 32 * 32 * 8
            assert 0 < (row.sending_s or 0.0) <= row.round_s
            assert (row.data_s or 0.0) > 0 if daemon.name == "leader" else row.data_s == 0
    whole, alone = analysed(tmp_path), analysed(cluster.leader.state_dir / FOLDER)
    assert [peer["name"] for peer in whole["peers"]] == ["leader", "relay-1-0", "relay-2-0"]
    assert sum(whole["causes"].values()) == pytest.approx(whole["modelled_round_s"])
    assert whole["unknown"] == []
    assert "records of 2 of 3 nodes are missing" in alone["unknown"][0]


SLOW_DATA = {"leader": slowed.program("data", 0.2)}
SLOW_RELAY = {"relay-2-0": slowed.program("passes", 0.15)}
SLOW_UPLINK = ("--upload-max", "1Mbit")
SMALL = replace(RUN, activations=ActivationsConfig(compression=ActivationCompression.BF16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "options", "cause", "what", "changed"),
    [
        (SLOW_DATA, (), "data", "put the prepared data", {"slow": {}}),
        (SLOW_RELAY, (), "peer", "replace relay-2-0", {"slow": {}}),
        ({}, SLOW_UPLINK, "links", 'set activations.compression = "bf16"', {"run": SMALL}),
    ],
)
def test_a_bottleneck_is_named_and_its_removal_gains_what_was_predicted(
    tmp_path: Path,
    corpus: Path,
    slow: dict[str, tuple[str, ...]],
    options: tuple[str, ...],
    cause: str,
    what: str,
    changed: dict[str, Any],
) -> None:
    how: dict[str, Any] = {"run": RUN, "slow": slow, "options": options, "corpus": corpus}
    before = train(tmp_path / "before", **how)
    assert before["main_cause"] == cause, before
    (change,) = [each for each in before["changes"] if each["what"].startswith(what)]
    after = train(tmp_path / "after", **(how | changed))
    assert after["samples_per_s"] > 1.5 * before["samples_per_s"]
    # All nodes share this machine's processors with other tests.
    assert change["samples_per_s"] == pytest.approx(after["samples_per_s"], rel=0.5), before
