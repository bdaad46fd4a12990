"""Each bottleneck of the collaborative optimizer is named, and its predicted gain comes true."""

from dataclasses import replace

import pytest

from decod.insight.analysis_report import Selection, report_of, select
from decod.insight.iteration_model import Cause, speed
from decod.insight.optimizer_model import OptimizerModel
from decod.insight.round_files import Records
from tests.support.timed_rounds import SimulatedOptimizer, SimulatedPeer, with_peer

PEERS = tuple(SimulatedPeer(name=name) for name in ("ant", "bee", "cat", "dog"))
BALANCED = SimulatedOptimizer(peers=PEERS)
SLOW_DATA = replace(BALANCED, peers=tuple(replace(peer, data_s=0.3) for peer in PEERS))
SLOW_LINKS = replace(BALANCED, peers=tuple(replace(peer, uplink_bytes_per_s=2e6) for peer in PEERS))
SLOW_PEER = with_peer(BALANCED, "cat", uplink_bytes_per_s=1e6)
SLOW_MATCHMAKING = replace(BALANCED, matchmaking_s=6.0)
HEAVY_STEPS = replace(
    BALANCED, local_updates=True, optimizer_s=0.1, matchmaking_s=0.01, arithmetic_s=0.0
)

TOLERANCE = 0.06
"""Steps are whole, so the last of a round may be longer or shorter than the model's share of it."""


def selection_of(run: SimulatedOptimizer) -> Selection:
    return select(Records(rounds=run.rows()))


def model_of(run: SimulatedOptimizer) -> OptimizerModel:
    model = selection_of(run).model
    assert isinstance(model, OptimizerModel)
    return model


@pytest.mark.parametrize(
    ("run", "cause", "word"),
    [
        (BALANCED, Cause.COMPUTE, "nothing holds the run back but its devices"),
        (SLOW_DATA, Cause.DATA, "Data hold the run back"),
        (SLOW_LINKS, Cause.AVERAGING, "Averaging holds the run back"),
        (SLOW_PEER, Cause.PEER, "all wait"),
        (SLOW_MATCHMAKING, Cause.MATCHMAKING, "Matchmaking holds the run back"),
    ],
)
def test_the_report_names_what_holds_the_run_back(
    run: SimulatedOptimizer, cause: Cause, word: str
) -> None:
    report = report_of(selection_of(run))
    assert report.main_cause is cause
    assert word in report.verdict
    assert report.slow_peer == ("cat" if cause is Cause.PEER else "")
    assert sum(report.causes.values()) == pytest.approx(report.modelled_round_s)
    assert report.modelled_round_s == pytest.approx(report.round_s, rel=TOLERANCE)
    if cause is Cause.PEER:
        assert "for cat" in report.verdict


def faster(run: SimulatedOptimizer, **changed: float) -> SimulatedOptimizer:
    return replace(run, peers=tuple(replace(peer, **changed) for peer in run.peers))


@pytest.mark.parametrize(
    ("run", "what", "changed"),
    [
        (SLOW_DATA, "load data ahead", faster(SLOW_DATA, data_s=0.0)),
        (SLOW_LINKS, "set target_batch_size=512", replace(SLOW_LINKS, target=512)),
        (SLOW_LINKS, "set target_batch_size=1024", replace(SLOW_LINKS, target=1024)),
        (SLOW_LINKS, 'set compression="bf16"', replace(SLOW_LINKS, compression="bf16")),
        (SLOW_LINKS, 'set compression="int8"', replace(SLOW_LINKS, compression="int8")),
        (SLOW_LINKS, 'set compression="int4"', replace(SLOW_LINKS, compression="int4")),
        (SLOW_LINKS, "set overlap=True", replace(SLOW_LINKS, overlap=True)),
        (
            SLOW_LINKS,
            "set use_local_updates=True and target_batch_size=1024",
            replace(SLOW_LINKS, target=1024, local_updates=True),
        ),
        (
            SLOW_PEER,
            "give cat a faster uplink",
            with_peer(SLOW_PEER, "cat", uplink_bytes_per_s=1e8),
        ),
        (
            SLOW_PEER,
            "go on without cat",
            replace(SLOW_PEER, peers=tuple(p for p in SLOW_PEER.peers if p.name != "cat")),
        ),
        (SLOW_MATCHMAKING, "set target_batch_size=1024", replace(SLOW_MATCHMAKING, target=1024)),
        (HEAVY_STEPS, "double gradient_accum", replace(HEAVY_STEPS, accumulation_steps=2)),
        (
            BALANCED,
            "have 8 peers",
            replace(BALANCED, peers=(*PEERS, *(replace(p, name=p.name * 2) for p in PEERS))),
        ),
    ],
)
def test_a_predicted_gain_comes_true(
    run: SimulatedOptimizer, what: str, changed: SimulatedOptimizer
) -> None:
    (predicted,) = [each for each in model_of(run).changes() if each.what.startswith(what)]
    assert predicted.samples_per_s == pytest.approx(changed.samples_per_s(), rel=TOLERANCE)
    gain = changed.samples_per_s() / run.samples_per_s() - 1
    assert predicted.gain == pytest.approx(gain, rel=2 * TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("run", "best"),
    [
        (SLOW_DATA, "load data ahead"),
        (SLOW_PEER, "give cat a faster uplink"),
        (SLOW_MATCHMAKING, "set target_batch_size"),
    ],
)
def test_what_helps_most_comes_first(run: SimulatedOptimizer, best: str) -> None:
    changes = [c for c in report_of(selection_of(run)).changes if not c.what.startswith("have")]
    firsts = [each.what for each in changes[:2]]
    assert any(what.startswith(best) for what in firsts) or any(
        "target_batch_size" in what for what in firsts
    ), firsts


def test_an_overlapped_average_costs_only_what_training_does_not_hide() -> None:
    hidden = model_of(replace(BALANCED, overlap=True))
    assert hidden.causes()[Cause.MATCHMAKING] == 0
    shown = model_of(replace(SLOW_LINKS, overlap=True))
    assert shown.round_s == pytest.approx(shown.exchange_s + 0.04, rel=TOLERANCE)
    assert shown.causes()[Cause.AVERAGING] > shown.round_s / 2


@pytest.mark.parametrize("run", [BALANCED, SLOW_LINKS])
def test_one_peers_file_tells_the_speed_and_says_what_it_can_not_tell(
    run: SimulatedOptimizer,
) -> None:
    alone = [row for row in run.rows() if row.name == "bee"]
    model = select(Records(rounds=alone)).model
    assert speed(model) == pytest.approx(run.samples_per_s(), rel=TOLERANCE)
    assert "records of 3 of 4 peers are missing" in model.unknown()[0]


def test_a_loop_that_does_not_tell_data_from_passes_is_named_and_counts_as_computing() -> None:
    split = model_of(SLOW_DATA)
    rows = [
        replace(row, data_s=None, forward_s=None, backward_s=None, unsplit_s=passes_s)
        for row in SLOW_DATA.rows()
        if (passes_s := (row.data_s or 0.0) + (row.forward_s or 0.0) + (row.backward_s or 0.0))
    ]
    report = report_of(select(Records(rounds=rows)))
    assert report.main_cause is Cause.COMPUTE
    assert report.causes[Cause.COMPUTE] == pytest.approx(split.accumulation_s)
    (said,) = [each for each in report.unknown if "optimizer.watch(model)" in each]
    assert all(peer.name in said for peer in PEERS)


def test_a_lone_peer_is_told_that_averages_cost_is_unknown() -> None:
    model = model_of(replace(BALANCED, peers=PEERS[:1]))
    assert "a lone peer averages with nobody" in model.unknown()[-1]
    assert model.with_peers(2).round_s < model.round_s


def test_a_model_does_not_change_when_it_predicts() -> None:
    model = model_of(SLOW_LINKS)
    before = model.round_s
    model.changes()
    assert model.round_s == before
