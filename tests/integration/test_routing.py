"""Real daemons on hosts with unequal links: flows are cheap, iterations short, slow links left."""

from pathlib import Path

import pytest

from decod.protocol.params import Routing
from tests.support.cluster import Cluster
from tests.support.network import Network, missing
from tests.support.routing_trial import (
    HOSTS,
    SLOWING,
    Measured,
    Trial,
    draw_rates,
    link_to_slow,
    make_run,
    optimum_s,
    slowed,
)

pytestmark = [pytest.mark.processes, pytest.mark.netns, pytest.mark.timeout(400)]

LEFT_AFTER_MAX = 5
"""Iterations, the one in which the link becomes slow included."""


def test_flow_beats_greedy_and_leaves_a_link_that_becomes_slow(
    tmp_path: Path, corpus: Path
) -> None:
    """The same hosts, links, model and seed; only `protocol.routing` differs."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    rates = draw_rates(seed=1)
    found: dict[Routing, Measured] = {}
    for routing in (Routing.GREEDY, Routing.FLOW):
        with (
            Network(HOSTS, rates) as network,
            Cluster(tmp_path / routing, make_run(routing), corpus, network) as cluster,
        ):
            trial = Trial(cluster, network)
            trial.start()
            if routing is Routing.FLOW:
                trial.settle()
            found[routing] = trial.measure()
            print(f"{routing}: {found[routing]}, the optimum costs {optimum_s(rates):.3f} s")
            if routing is Routing.FLOW:
                hop = link_to_slow(rates, trial.hops_in_use(), SLOWING)
                trial.set_rates(slowed(rates, hop, SLOWING))
                num = trial.iterations_until_left(hop, num_max=LEFT_AFTER_MAX)
                print(f"{hop} was left after {num} iterations")
    flow, greedy = found[Routing.FLOW], found[Routing.GREEDY]
    assert flow.cost_s < greedy.cost_s
    assert flow.iteration_s < greedy.iteration_s
