"""Losses that are drawn by iteration, and what SWARM is taken to do about them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from decod.lab.sim.cluster import Cluster, Peer, Trip
from decod.lab.sim.paper_churn import TABLES, churn_scenario
from decod.lab.sim.swarm import Closest, Pipelines, Trainers
from decod.sim.kernel import seeded
from decod.sim.meter import IterationFigures
from decod.sim.scenario import Churn, Instants, Scenario, draw_churn

STAGES = {f"relay-{k}": k % 3 for k in range(9)}


def test_as_many_crash_and_come_back_as_the_chance_says() -> None:
    drawn = draw_churn(seeded(1, "churn"), STAGES, ratio=0.1, num_iterations=2000)
    crashes = [churn for churn in drawn if not churn.returns]
    assert 0.8 * 2000 * 4.5 * 0.1 < len(crashes) < 1.1 * 2000 * 4.5 * 0.1, "half are there"
    assert abs(len(drawn) - 2 * len(crashes)) <= len(STAGES)
    assert all(0 <= churn.at_ratio < 1 for churn in drawn)


@pytest.mark.parametrize("seed", range(5))
def test_no_crash_takes_the_last_that_holds_a_stages_state(seed: int) -> None:
    holds_from = dict.fromkeys(STAGES, 0)
    for churn in draw_churn(seeded(seed, "churn"), STAGES, ratio=0.3, num_iterations=200):
        if churn.returns:
            assert churn.host not in holds_from
            holds_from[churn.host] = churn.iteration + 2
            continue
        del holds_from[churn.host]
        stage = STAGES[churn.host]
        left = [n for n, since in holds_from.items() if STAGES[n] == stage]
        assert any(holds_from[name] <= churn.iteration for name in left)


def test_instants_are_shares_of_the_usual_length() -> None:
    churn = Churn(iteration=3, host="relay-1", at_ratio=0.5, returns=False)
    instants = Instants([churn])
    assert instants.opened(0.0, 1) == []
    assert instants.opened(100.0, 2) == []
    assert instants.opened(140.0, 3) == [(35.0, churn)], "half of the median of 100 and 40"


def one_loss(at_ratio: float, *, cell: int = 0) -> Scenario:
    """Return a run of 3 iterations whose second loses a relay, at this share of its length."""
    scenario = churn_scenario(2, TABLES[2][cell], 1, num_iterations=3)
    churn = Churn(iteration=2, host="relay-1", at_ratio=at_ratio, returns=False)
    return replace(scenario, churn=(churn,))


def second(policy: type[Pipelines | Trainers], scenario: Scenario) -> IterationFigures:
    figures = Cluster(scenario, policy).run()
    assert [found.num_microbatches for found in figures][::2] == [8, 8]
    return figures[1]


@pytest.mark.parametrize("policy", [Pipelines, Closest, Trainers])
def test_without_losses_nothing_is_wasted(policy: type[Pipelines | Trainers]) -> None:
    found = second(policy, replace(one_loss(0.5), churn=()))
    assert (found.num_microbatches, found.wasted_s, found.lost_s) == (8, 0.0, 0.0)


def test_a_stateless_backward_computes_the_forward_pass_again() -> None:
    plain, again = (second(p, replace(one_loss(0.5), churn=())) for p in (Pipelines, Trainers))
    forward_s = 8 * 5 * 0.05
    assert again.useful_s == pytest.approx(plain.useful_s + forward_s)
    assert again.communication_s > 1.5 * plain.communication_s, "all by way of the trainer"


def test_what_the_backward_pass_misses_is_begun_again_by_all() -> None:
    early, late = (second(Pipelines, one_loss(at_ratio)) for at_ratio in (0.01, 0.5))
    assert early.num_microbatches == 8
    assert early.wasted_s == 0.0, "nothing had been computed there: others are chosen"
    assert late.wasted_s > late.lost_s > 0, "work of relays that live is thrown away too"
    assert late.duration_s > early.duration_s


def test_a_gradient_that_is_lost_with_its_relay_does_not_count() -> None:
    """Neither reading of SWARM computes it again; the step goes on without it."""
    for policy in (Pipelines, Trainers):
        found = second(policy, one_loss(0.6))
        assert found.num_microbatches < 8
        assert found.wasted_s == found.lost_s > 0


def test_a_loss_is_found_as_late_as_decods_machines_find_it() -> None:
    """By who sends something, or else by silence."""
    scenario, known_s = one_loss(0.5), list[float]()

    class Told(Pipelines):
        def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
            known_s.append(cluster.kernel.now_s)
            super().crashed(peer, under_way)

    cluster = Cluster(scenario, Told)
    cluster.run()
    first = cluster.figures[0].duration_s
    config = scenario.protocol
    silence_s = config.heartbeat_timeout_s + config.probe_timeout_s
    assert 3.0 < known_s[0] - 1.5 * first <= silence_s + 1e-9


def test_links_are_known_once_something_has_crossed_them() -> None:
    scenario = replace(one_loss(0.5), churn=(), num_iterations=1)
    cluster = Cluster(scenario, Pipelines)
    data, first = cluster.peers["data-1"], cluster.of_stage(1)
    guesses = {cluster.cost_s(data, relay) for relay in first}
    assert len(guesses) == 1, "nothing tells one from another"
    cluster.run()
    assert len({cluster.cost_s(data, relay) for relay in first}) > 1


def test_the_closest_is_asked_whatever_is_under_way_to_it() -> None:
    """And the next closest as soon as it has no room; nobody learns anything, or needs to."""
    scenario = replace(one_loss(0.5, cell=3), churn=(), num_iterations=1)
    asked = list[tuple[Peer, Peer, tuple[Peer, ...]]]()

    class Asked(Cluster):
        def send(
            self, trip: Trip, sender: Peer, receiver: Peer, *args: Any, **options: Any
        ) -> None:
            if receiver.stage_index == sender.stage_index + 1:
                asked.append((sender, receiver, tuple(options["refused_by"])))
            super().send(trip, sender, receiver, *args, **options)

    cluster = Asked(scenario, Closest)
    cluster.run()
    assert len(asked) == 8 * 5
    assert sum(bool(refused_by) for _, _, refused_by in asked) > 8, "relays hold 1 to 3"
    for sender, receiver, refused_by in asked:
        distance_s = cluster.distance_s(sender, receiver)
        nearer = [p for p in cluster.of_stage(receiver.stage_index) if p is not receiver]
        nearer = [p for p in nearer if cluster.distance_s(sender, p) < distance_s]
        assert set(refused_by) == set(nearer)


@pytest.mark.parametrize("policy", [Pipelines, Closest, Trainers])
def test_no_loss_brings_a_reading_of_swarm_to_a_stand(policy: type[Pipelines | Trainers]) -> None:
    """In the fourth run a relay is lost that is to send again for another that is lost."""
    for seed in range(4):
        assert len(Cluster(churn_scenario(2, TABLES[2][5], seed), policy).run()) == 25
