"""Real daemons on hosts with unequal links: flows are cheap, iterations short, slow links left.

It takes two minutes, nearly all of them on slow links. `tests/sim/test_routing.py` asks the same of
simulated hosts in every run of the tests.
"""

from pathlib import Path

import pytest

from tests.support.network import missing
from tests.support.routing_trial import compare, draw_rates, optimum_s

pytestmark = [pytest.mark.processes, pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(400)]

LEFT_AFTER_MAX = 5
"""Iterations, the one in which the link becomes slow included."""


def test_flow_beats_greedy_and_leaves_a_link_that_becomes_slow(
    tmp_path: Path, corpus: Path
) -> None:
    """The same hosts, links, model and seed; only `protocol.routing` differs."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    rates = draw_rates(seed=1)
    found = compare(tmp_path, corpus, rates, num_max=LEFT_AFTER_MAX)
    print(f"{found}; the optimum costs {optimum_s(rates):.3f} s")
    flow, greedy = found.by_routing["flow"], found.by_routing["greedy"]
    assert flow.cost_s < greedy.cost_s
    assert flow.iteration_s < greedy.iteration_s
    assert found.left_after is not None, f"flows still use {found.slowed}"
