"""Costs of links: what is measured, what is told, what is estimated, and that both ends agree."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.ids import MicrobatchId, NodeId
from decod.planner.cost import Link, link_cost_s, transfer_rate
from decod.protocol.core import jobs
from decod.protocol.core.durations import STALE_S, Recent
from decod.protocol.core.link_table import LinkTable, Terms
from tests.unit.protocol.cast import D0, R1A, R1B, R2A, R2B

MEGABYTE = 1_000_000
M = MicrobatchId(1, 0, 0)
ANYTHING = st.floats()


def table(*, size_bytes: int = MEGABYTE, compute_s: float = 1.0) -> LinkTable:
    return LinkTable(activation_size_bytes=size_bytes, compute_s=compute_s)


def know(links: LinkTable, peer: NodeId, latency_s: float, bandwidth: float) -> None:
    links.measured(peer, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


# --- both ends ------------------------------------------------------------------------------------


def exchange(here: LinkTable, me: NodeId, there: LinkTable, peer: NodeId) -> None:
    """Let both ends report to each other."""
    there.reported(me, here.tell(peer))
    here.reported(peer, there.tell(me))


def test_both_ends_come_to_the_same_cost() -> None:
    """0.1 s and 1 MB/s there, 0.3 s and 3 MB/s back; they compute for 1 s and 3 s."""
    here, there = table(compute_s=1.0), table(compute_s=3.0)
    know(here, R2A, 0.1, 1e6)
    know(there, R1A, 0.3, 3e6)
    exchange(here, R1A, there, R2A)
    assert here.cost_s(R2A) == pytest.approx(2.0 + 0.2 + (1 + 1 / 3) / 2)
    assert here.cost_s(R2A) == there.cost_s(R1A)


@settings(max_examples=50)
@given(st.lists(ANYTHING, min_size=6, max_size=6))
def test_both_ends_agree_whatever_was_measured(values: list[float]) -> None:
    here, there = table(compute_s=values[0]), table(compute_s=values[1])
    know(here, R2A, values[2], values[3])
    know(there, R1A, values[4], values[5])
    exchange(here, R1A, there, R2A)
    assert here.cost_s(R2A) == there.cost_s(R1A)


def test_both_ends_agree_between_reports_too() -> None:
    """What is newer than the last report, and not worth another, must not make them differ."""
    here, there = table(), table()
    know(here, R2A, 0.1, 1e6)
    exchange(here, R1A, there, R2A)
    for _ in range(5):
        know(here, R2A, 0.105, 0.95e6)
    assert here.link(R2A) == Link(0.105, 0.95e6)
    assert not here.moved(R2A)
    assert here.cost_s(R2A) == there.cost_s(R1A)


def test_until_the_peer_reports_its_end_is_taken_to_be_like_this_one() -> None:
    links = table()
    know(links, R2A, 0.2, 2e6)
    assert links.cost_s(R2A) == pytest.approx(1.0 + 0.2 + 0.5)
    assert links.cost_s(R2A, peer_compute_s=3.0) == pytest.approx(2.0 + 0.2 + 0.5)
    links.offered(R2A, 5.0)
    assert links.cost_s(R2A) == pytest.approx(3.0 + 0.2 + 0.5)
    links.reported(R2A, Terms(Link(0.2, 2e6), 7.0))
    assert links.cost_s(R2A, peer_compute_s=3.0) == pytest.approx(4.0 + 0.2 + 0.5)


# --- what is measured -----------------------------------------------------------------------------


def test_a_transfer_is_latency_there_and_back_and_its_bytes() -> None:
    assert transfer_rate(MEGABYTE, duration_s=0.7, latency_s=0.1) == pytest.approx(2e6)


def test_a_transfer_that_had_half_of_the_link_hid_its_latency_behind_the_other() -> None:
    for share, rate in ((0.5, 4e6), (0.75, 1 / 0.275 * 1e6), (0.25, 8e6)):
        found = transfer_rate(MEGABYTE, duration_s=0.5, latency_s=0.1, share=share)
        assert found == pytest.approx(rate)


@pytest.mark.parametrize("latency_s", [0.5, 100.0, math.inf])
def test_a_transfer_that_seems_to_take_no_time_has_an_end_to_its_rate(latency_s: float) -> None:
    assert transfer_rate(MEGABYTE, duration_s=1.0, latency_s=latency_s) == pytest.approx(1e7)
    assert math.isfinite(transfer_rate(MEGABYTE, duration_s=0.0, latency_s=latency_s))


def test_the_latency_that_was_measured_is_taken_off_and_no_guess() -> None:
    links = table()
    links.transferred(0.0, R2A, size_bytes=MEGABYTE, duration_s=0.5)
    assert links.link(R2A).bandwidth_bytes_per_s == pytest.approx(2e6)
    links.measured(R2B, latency_s=0.125, bandwidth_bytes_per_s=None)
    links.transferred(0.0, R2B, size_bytes=MEGABYTE, duration_s=0.5)
    assert links.link(R2B).bandwidth_bytes_per_s == pytest.approx(4e6)


def test_small_tensors_say_nothing_of_the_bandwidth() -> None:
    links = table()
    links.transferred(0.0, R2A, size_bytes=(1 << 16) - 1, duration_s=1.0)
    links.transferred(0.0, R2A, size_bytes=1 << 20, duration_s=0.0)
    assert not links.bandwidth_measured(R2A)
    links.transferred(0.0, R2A, size_bytes=1 << 16, duration_s=1.0)
    assert links.link(R2A).bandwidth_bytes_per_s == 1 << 16


def test_a_link_cut_to_a_tenth_shows_it_after_three_transfers() -> None:
    links = table()
    for _ in range(20):
        links.transferred(0.0, R2A, size_bytes=MEGABYTE, duration_s=0.1)
    for _ in range(3):
        assert links.link(R2A).bandwidth_bytes_per_s == pytest.approx(1e7)
        links.transferred(0.0, R2A, size_bytes=MEGABYTE, duration_s=1.0)
    assert links.link(R2A).bandwidth_bytes_per_s == pytest.approx(1e6)
    assert links.moved(R2A)


@pytest.mark.parametrize("outlier_s", [0.001, 100.0])
def test_one_outlier_moves_nothing(outlier_s: float) -> None:
    links = table()
    durations = [0.1] * 4 + [outlier_s] + [0.1] * 3
    for at_s, duration_s in enumerate(durations):
        links.transferred(float(at_s), R2A, size_bytes=MEGABYTE, duration_s=duration_s)
        assert links.link(R2A).bandwidth_bytes_per_s == pytest.approx(1e7)


def test_a_queued_round_trip_is_no_latency() -> None:
    """The least of the last five; one that lasts shows when all five have it."""
    links = table()
    for latency_s in (0.02, 0.9, 0.021, 2.0, 0.5):
        links.measured(R2A, latency_s=latency_s, bandwidth_bytes_per_s=None)
    assert links.link(R2A).latency_s == 0.02
    for _ in range(5):
        links.measured(R2A, latency_s=0.2, bandwidth_bytes_per_s=None)
    assert links.link(R2A).latency_s == 0.2


def test_what_is_stale_does_not_outvote_what_is_new() -> None:
    recent = Recent()
    for at_s in range(5):
        recent.add(float(at_s), 1.0)
    assert not recent.stale(4.0 + STALE_S)
    assert recent.stale(4.5 + STALE_S)
    recent.add(4.5 + STALE_S, 7.0)
    assert (recent.median, recent.least) == (7.0, 7.0)


# --- compute time ---------------------------------------------------------------------------------


def test_a_relays_compute_time_is_half_of_both_passes() -> None:
    links = table(compute_s=9.0)
    links.computed(jobs.Forward(M), 1.0)
    assert links.compute_s == 9.0, "half a microbatch says little"
    links.computed(jobs.Backward(M), 2.0)
    assert links.compute_s == 1.5


def test_a_data_nodes_compute_time_is_half_of_all_its_passes() -> None:
    links = table()
    for job, duration_s in (
        (jobs.Embed(M), 1.0),
        (jobs.Head(M), 4.0),
        (jobs.EmbedBackward(M), 2.0),
    ):
        links.computed(job, duration_s)
    assert links.compute_s == 3.5


def test_a_host_that_slows_down_shows_it_after_three_microbatches() -> None:
    links = table()
    for factor in [1.0] * 20 + [10.0] * 3:
        links.computed(jobs.Forward(M), 1.0 * factor)
        links.computed(jobs.Backward(M), 2.0 * factor)
    assert links.compute_s == 15.0
    links.computed(jobs.Forward(M), 0.001)
    assert links.compute_s == 15.0, "one outlier moves nothing"


# --- estimates and bounds -------------------------------------------------------------------------


def test_a_link_where_nothing_was_ever_timed_is_one_of_the_internet() -> None:
    """50 ms and 100 Mbit/s; a megabyte takes 80 ms."""
    assert table().cost_s(R1A) == pytest.approx(1.0 + 0.05 + 0.08)


def test_an_unknown_link_is_taken_for_the_median_of_the_known() -> None:
    links = table()
    for peer, latency_s, bandwidth in ((R1A, 0.1, 1e6), (R1B, 0.2, 5e6), (R2A, 0.9, 9e6)):
        know(links, peer, latency_s, bandwidth)
    assert links.link(R2B) == Link(0.2, 5e6)
    links.measured(R2B, latency_s=0.4, bandwidth_bytes_per_s=None)
    assert links.link(R2B) == Link(0.4, 5e6)


def test_what_a_peer_estimates_counts_for_its_direction() -> None:
    """The peer's links are ten times slower than ours, so its unknown way to us may be too."""
    links = table()
    know(links, R1A, 0.1, 10e6)
    links.reported(R2B, Terms(Link(0.1, 1e6), 1.0))
    assert links.cost_s(R2B) == pytest.approx(1.0 + 0.1 + (1 / 10 + 1) / 2)


@given(st.lists(ANYTHING, min_size=6, max_size=6), st.integers(0, 1 << 40))
def test_a_cost_is_finite_whatever_a_peer_says(values: list[float], size_bytes: int) -> None:
    links = table(size_bytes=size_bytes, compute_s=values[0])
    know(links, R2A, values[1], values[2])
    links.reported(R2A, Terms(Link(values[3], values[4]), values[5]))
    for cost_s in (links.cost_s(R2A), links.floor_s(R2A), links.cost_s(R2B)):
        assert math.isfinite(cost_s)
        assert cost_s >= 0


def test_bounds_hold_in_the_formula_itself() -> None:
    nothing, nan = Link(math.inf, 0.0), Link(math.nan, math.nan)
    for forth, back in itertools.product((nothing, nan), repeat=2):
        cost_s = link_cost_s(
            compute_here_s=math.nan, compute_there_s=-1, forth=forth, back=back, size_bytes=10**6
        )
        assert cost_s == pytest.approx(1800 + 60 + 1000)


# --- reports --------------------------------------------------------------------------------------


def test_a_change_by_more_than_a_tenth_is_worth_a_report() -> None:
    links = table()
    assert links.moved(R2A), "nothing has been said yet"
    know(links, R2A, 0.2, 2e6)
    links.tell(R2A)
    for latency_s, bandwidth, moved in (
        (0.2, 1.85e6, False),
        (0.2, 1.8e6, True),
        (0.2, 2.3e6, True),
        (0.23, 2e6, True),
        (0.2, 2e6, False),
    ):
        for _ in range(5):
            know(links, R2A, latency_s, bandwidth)
        assert links.moved(R2A) == moved, (latency_s, bandwidth)


def test_a_change_that_hardly_counts_is_worth_nothing() -> None:
    """On a local network 0.3 ms and 0.6 ms are the same beside a second of computing."""
    links = table(size_bytes=0)
    links.measured(D0, latency_s=0.0003, bandwidth_bytes_per_s=None)
    links.tell(D0)
    for _ in range(5):
        links.measured(D0, latency_s=0.0006, bandwidth_bytes_per_s=None)
    assert not links.moved(D0)


def test_who_has_left_is_forgotten() -> None:
    links = table()
    know(links, R2A, 0.2, 2e6)
    know(links, R2B, 0.4, 4e6)
    links.forget_others(frozenset({R2B}))
    assert not links.bandwidth_measured(R2A)
    assert links.link(R2A) == Link(0.4, 4e6)
