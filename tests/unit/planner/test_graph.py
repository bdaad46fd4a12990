"""How long an iteration takes, worked out by hand and by a slower model."""

from random import Random

import pytest

from decod.ids import NodeId
from decod.planner.graph import Link, Task, Timing, dealt_out, finish_times

D, E, A, B, Z = (NodeId(name) for name in "deabz")


def times(costs: dict[Link, float], compute_s: dict[NodeId, float], *paths: str) -> list[float]:
    timing = Timing(costs, compute_s)
    ways = [timing.tasks(tuple(NodeId(name) for name in path)) for path in paths]
    found = finish_times(ways, timing.num_resources)
    assert found is not None
    return found


def test_one_alone_takes_its_links_there_and_back_and_a_pass_at_each_end() -> None:
    """d(i, j) holds half of each end's pass: what the link takes is 10 - 1.5 and 20 - 1.5."""
    costs = {(D, A): 10.0, (A, D): 20.0}
    compute_s = {D: 1.0, A: 2.0}
    assert times(costs, compute_s, "dad") == [2 * (8.5 + 18.5) + 2 + 1 + 2 + 1]
    timing = Timing(costs, compute_s)
    assert timing.alone_s((D, A, D)) == 60.0


def test_who_shares_a_link_takes_turns_on_it_in_each_direction() -> None:
    """With one relay stage activations and gradients go to it in one direction of one link."""
    costs = {(D, A): 10.0, (A, B): 2.0, (B, D): 1.0}
    assert times(costs, {}, "dabd", "dabd") == [26.0, 36.0]
    assert times({(D, A): 10.0, (A, D): 2.0}, {}, "dad", "dad") == [32.0, 42.0]


def test_links_that_end_at_one_node_do_not_wait_for_each_other() -> None:
    costs = {(D, A): 10.0, (A, D): 2.0, (E, A): 10.0, (A, E): 2.0}
    assert times(costs, {}, "dad", "eae") == times(costs, {}, "dad") * 2


def test_a_device_computes_one_pass_at_a_time() -> None:
    """Both are at A after 1 s, and it is busy from then on: until 9 with both forward passes, then
    with the first's gradient, which came at 7, and from 13 on with the second's.
    """
    costs = {(D, A): 3.0, (A, D): 3.0, (E, A): 3.0, (A, E): 3.0}
    compute_s = {D: 0.0, E: 0.0, A: 4.0}
    assert times(costs, compute_s, "dad", "eae") == [14.0, 18.0]


def test_passes_of_nodes_that_nothing_is_known_of_are_like_the_others() -> None:
    costs = {(D, A): 10.0, (A, D): 10.0}
    assert times(costs, {E: 2.0, B: 4.0}, "dad") == times(costs, {D: 3.0, A: 3.0}, "dad")


def slow_times(ways: list[list[Task]]) -> list[float]:
    """Return the same, found by looking for what can begin first, over and over."""
    now_s, steps, free_s = [0.0] * len(ways), [0] * len(ways), dict[int, float]()
    while any(step < len(way) for step, way in zip(steps, ways, strict=True)):
        i = min((i for i, way in enumerate(ways) if steps[i] < len(way)), key=lambda i: now_s[i])
        resource, seconds, _ = ways[i][steps[i]]
        now_s[i] = free_s[resource] = max(now_s[i], free_s.get(resource, 0.0)) + seconds
        steps[i] += 1
    return now_s


@pytest.mark.parametrize("seed", range(20))
def test_times_are_those_of_a_slower_model_and_a_limit_is_noticed(seed: int) -> None:
    rng = Random(seed)
    layers = [[D, E], [A, B], [Z]]
    costs = {
        (begin, end): rng.uniform(1, 9)
        for here, there in zip(layers, [*layers[1:], layers[0]], strict=True)
        for begin in here
        for end in there
    }
    timing = Timing(costs, {node: rng.uniform(0, 2) for node in (A, B)})
    paths = [(home, rng.choice([A, B]), Z, home) for home in rng.choices([D, E], k=5)]
    ways = [timing.tasks(path) for path in paths]
    found = finish_times(ways, timing.num_resources)
    assert found is not None
    assert found == pytest.approx(slow_times(ways))
    last_s = max(found)
    assert all(end_s >= timing.alone_s(p) - 1e-9 for end_s, p in zip(found, paths, strict=True))
    assert finish_times(ways, timing.num_resources, limit_s=last_s + 1e-6) == found
    assert finish_times(ways, timing.num_resources, limit_s=last_s - 1e-6) is None


def test_microbatches_take_free_flows_first_and_then_those_that_are_done_first() -> None:
    owners, costs = [D, E, D], [10.0, 1.0, 4.0]
    assert dealt_out(owners, costs, {D: 4, E: 2}) == [2, 0, 2, 2, 1, 1]
    assert dealt_out(owners, costs, {D: 1}) == [2, 1]
    assert dealt_out(owners, costs, {}) == [2, 0, 1]
