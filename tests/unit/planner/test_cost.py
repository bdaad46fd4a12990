"""The cost of a link, by hand."""

import pytest

from decod.planner.cost import Link, link_cost_s


def test_the_cost_of_a_link_is_a_mean_over_both_ends_and_directions() -> None:
    """Computing (0.2 + 0.4) / 2 = 0.3; latency (0.01 + 0.03) / 2 = 0.02;
    transfer (10^6 / 10^6 + 10^6 / (4 * 10^6)) / 2 = 0.625. Together 0.945 s."""
    cost_s = link_cost_s(
        compute_here_s=0.2,
        compute_there_s=0.4,
        forth=Link(0.01, 1e6),
        back=Link(0.03, 4e6),
        size_bytes=1_000_000,
    )
    assert cost_s == pytest.approx(0.945)


def test_a_link_costs_the_same_in_both_directions() -> None:
    forth, back = Link(0.01, 1e6), Link(0.3, 9e6)
    there = link_cost_s(
        compute_here_s=1.0, compute_there_s=2.0, forth=forth, back=back, size_bytes=1000
    )
    home = link_cost_s(
        compute_here_s=2.0, compute_there_s=1.0, forth=back, back=forth, size_bytes=1000
    )
    assert there == home


def test_the_hops_of_a_path_add_up_to_every_nodes_whole_compute_time() -> None:
    """With links that cost nothing, a round trip over three nodes costs what they compute."""
    free = Link(0.0, 1.0)
    times_s = [1.0, 2.0, 4.0]
    total_s = sum(
        link_cost_s(compute_here_s=here, compute_there_s=there, forth=free, back=free, size_bytes=0)
        for here, there in zip(times_s, times_s[1:] + times_s[:1], strict=True)
    )
    assert total_s == sum(times_s)
