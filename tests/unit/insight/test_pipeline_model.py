"""Each bottleneck of a pipeline is named, and its predicted gain comes true."""

from dataclasses import replace

import pytest

from decod.insight.analysis_report import Selection, report_of, select
from decod.insight.iteration_model import Cause
from decod.insight.pipeline_model import PipelineModel
from decod.insight.round_files import Records
from tests.support.timed_rounds import SimulatedNode, SimulatedPipeline, with_node

LEADER = SimulatedNode(name="leader", stage=0, forward_s=0.004, backward_s=0.008)
NODES = (
    LEADER,
    *(
        SimulatedNode(name=f"relay-{stage}-{index}", stage=stage)
        for stage in (1, 2)
        for index in range(2)
    ),
)
BALANCED = SimulatedPipeline(nodes=NODES, num_microbatches=32, transfer_s=0.01)
SLOW_DATA = with_node(BALANCED, "leader", data_s=0.06)
SLOW_RELAY = with_node(BALANCED, "relay-2-1", forward_s=0.05, backward_s=0.1)
SLOW_UPLINK = with_node(BALANCED, "leader", send_s=0.05)
SLOW_LINKS = replace(BALANCED, nodes=tuple(replace(node, send_s=0.08) for node in NODES))
SLOW_AVERAGES = replace(BALANCED, transfer_s=2.0)
SLOW_START = replace(BALANCED, start_s=3.0)
FEW_MICROBATCHES = replace(BALANCED, num_microbatches=2)

TOLERANCE = 0.08
"""The latency of a pipeline changes a little when another resource becomes the busiest."""


def selection_of(run: SimulatedPipeline) -> Selection:
    return select(Records(rounds=run.rows()))


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        (BALANCED, Cause.COMPUTE),
        (SLOW_DATA, Cause.DATA),
        (SLOW_RELAY, Cause.PEER),
        (SLOW_UPLINK, Cause.LINKS),
        (SLOW_LINKS, Cause.LINKS),
        (SLOW_AVERAGES, Cause.AVERAGING),
        (SLOW_START, Cause.MATCHMAKING),
        (FEW_MICROBATCHES, Cause.LATENCY),
    ],
)
def test_the_report_names_what_holds_the_run_back(run: SimulatedPipeline, cause: Cause) -> None:
    report = report_of(selection_of(run))
    assert report.main_cause is cause
    assert report.slow_peer == ("relay-2-1" if cause is Cause.PEER else "")
    assert sum(report.causes.values()) == pytest.approx(report.modelled_round_s)
    assert report.modelled_round_s == pytest.approx(report.round_s)


THIRD = SimulatedNode(name="relay-2-2", stage=2)


@pytest.mark.parametrize(
    ("run", "what", "changed"),
    [
        (
            SLOW_DATA,
            "put the prepared data on a faster disk",
            with_node(SLOW_DATA, "leader", data_s=0.0),
        ),
        (
            SLOW_RELAY,
            "replace relay-2-1",
            with_node(SLOW_RELAY, "relay-2-1", forward_s=0.01, backward_s=0.02),
        ),
        (SLOW_UPLINK, "give leader a faster uplink", with_node(SLOW_UPLINK, "leader", send_s=0.0)),
        (
            SLOW_LINKS,
            'set activations.compression = "bf16"',
            replace(SLOW_LINKS, nodes=tuple(replace(n, send_s=0.04) for n in NODES)),
        ),
        (
            SLOW_AVERAGES,
            'set sync.method = "diloco" and sync.every = 8',
            replace(SLOW_AVERAGES, every=8),
        ),
        (SLOW_AVERAGES, "send averages as bf16", replace(SLOW_AVERAGES, transfer_s=1.0)),
        (
            SLOW_START,
            "double batch.num_microbatches",
            replace(SLOW_START, num_microbatches=64),
        ),
        (
            FEW_MICROBATCHES,
            "double batch.num_microbatches",
            replace(FEW_MICROBATCHES, num_microbatches=4),
        ),
    ],
)
def test_a_predicted_gain_comes_true(
    run: SimulatedPipeline, what: str, changed: SimulatedPipeline
) -> None:
    model = selection_of(run).model
    (predicted,) = [each for each in model.changes() if each.what.startswith(what)]
    assert predicted.samples_per_s == pytest.approx(changed.samples_per_s(), rel=TOLERANCE)


def test_another_relay_takes_its_share_of_the_busiest_stage() -> None:
    heavy = replace(
        BALANCED,
        num_microbatches=96,
        nodes=tuple(
            replace(node, forward_s=0.02, backward_s=0.04) if node.stage == 2 else node
            for node in NODES
        ),
    )
    model = selection_of(heavy).model
    (predicted,) = [each for each in model.changes() if each.what == "add a relay to stage 2"]
    third = replace(THIRD, forward_s=0.02, backward_s=0.04)
    changed = replace(heavy, nodes=(*heavy.nodes, third))
    assert predicted.samples_per_s == pytest.approx(changed.samples_per_s(), rel=TOLERANCE)


def test_the_leaders_file_alone_can_not_name_a_relay() -> None:
    alone = [row for row in SLOW_RELAY.rows() if row.name == "leader"]
    report = report_of(select(Records(rounds=alone)))
    assert report.main_cause is Cause.LATENCY
    assert not report.slow_peer
    assert "records of 4 of 5 nodes are missing" in report.unknown[0]


def test_nodes_of_one_name_are_told_apart() -> None:
    rows = [replace(row, name="x") for row in BALANCED.rows()]
    names = select(Records(rounds=rows)).names
    assert names[0] == "x (id-leader)"
    assert len(set(names)) == len(NODES)


def test_only_the_newest_rounds_count_and_a_repeated_round_counts_once() -> None:
    before, after = SLOW_START.rows(10), BALANCED.rows(20)[10 * len(NODES) :]
    again = [replace(row, time_s=row.time_s + 1e6) for row in after[: len(NODES)]]
    selected = select(Records(rounds=[*before, *after, *again]), rounds_max=10)
    assert [rows[0].round for rows in selected.rounds] == list(range(11, 21))
    model = selected.model
    assert isinstance(model, PipelineModel)
    assert model.start_s == pytest.approx(BALANCED.start_s)
    assert all(len(rows) == len(NODES) for rows in selected.rounds)
