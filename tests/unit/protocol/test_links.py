"""Costs of links: what is measured, what is told, what is estimated, and that both ends agree."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.planner.cost import Link, link_cost_s
from decod.protocol.core.jobs import Backward, Forward
from decod.protocol.core.link_table import LinkTable, Terms
from tests.unit.protocol.cast import R1A, R2A, R2B, mb

MEGABYTE = 1_000_000
ANYTHING = st.floats()


def table(*, size_bytes: int = MEGABYTE, compute_s: float = 1.0) -> LinkTable:
    return LinkTable(activation_size_bytes=size_bytes, compute_s=compute_s)


def know(links: LinkTable, peer: NodeId, latency_s: float, bandwidth: float) -> None:
    links.measured(peer, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


def test_after_the_stage_was_rebuilt_its_first_pass_counts_at_once() -> None:
    links = table()
    for duration_s in (0.2,) * 9:
        links.computed(Forward(mb(0)), duration_s)
        links.computed(Backward(mb(0)), duration_s)
    assert links.compute_s == pytest.approx(0.2)
    links.rebuilt()
    links.computed(Forward(mb(0)), 0.5)
    links.computed(Backward(mb(0)), 0.7)
    assert links.compute_s == pytest.approx(0.6)


# --- both ends ------------------------------------------------------------------------------------


def exchange(here: LinkTable, me: NodeId, there: LinkTable, peer: NodeId) -> None:
    """Let both ends report to each other."""
    there.reported(me, here.tell(peer))
    here.reported(peer, there.tell(me))


@settings(max_examples=50)
@given(st.lists(ANYTHING, min_size=6, max_size=6))
def test_both_ends_agree_whatever_was_measured(values: list[float]) -> None:
    here, there = table(compute_s=values[0]), table(compute_s=values[1])
    know(here, R2A, values[2], values[3])
    know(there, R1A, values[4], values[5])
    exchange(here, R1A, there, R2A)
    assert here.cost_s(R2A) == there.cost_s(R1A)


# --- what is measured -----------------------------------------------------------------------------


def test_a_link_cut_to_a_tenth_shows_it_after_three_transfers() -> None:
    links = table()
    for _ in range(20):
        links.transferred(0.0, R2A, size_bytes=MEGABYTE, duration_s=0.1)
    for _ in range(3):
        assert links.link(R2A).bandwidth_bytes_per_s == pytest.approx(1e7)
        links.transferred(0.0, R2A, size_bytes=MEGABYTE, duration_s=1.0)
    assert links.link(R2A).bandwidth_bytes_per_s == pytest.approx(1e6)
    assert links.moved(R2A)


# --- estimates and bounds -------------------------------------------------------------------------


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
