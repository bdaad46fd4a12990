"""The paper's heuristic, step by step (section 3.3.3)."""

import itertools
import random
from dataclasses import replace

import pytest

from decod.lab.planner.hosts import TrainingProblem
from decod.lab.planner.servers.clustering import mean_between, shortest_path, split_top_down
from decod.lab.planner.servers.layers import layers_by_power
from decod.lab.planner.servers.paper_planner import paper_layout
from tests.support.server_problems import make_problem


def _two_sites(hosts: dict[str, float], far: set[str]) -> TrainingProblem:
    """A problem in which some hosts are 1 s from the others; all else is 1 ms apart."""
    problem = make_problem(hosts)
    apart = [host.host_id in far for host in problem.hosts]
    latencies = [
        [0.0 if i == j else 1.0 if apart[i] != apart[j] else 0.001 for j in range(len(apart))]
        for i in range(len(apart))
    ]
    return replace(problem, latencies_s=latencies)


def test_clusters_are_split_where_hosts_are_far_apart() -> None:
    places = [0, 1, 2, 50, 51, 60]
    distances = [[float(abs(a - b)) for b in places] for a in places]
    levels = list(split_top_down(distances))
    assert [len(level) for level in levels] == [1, 2, 3, 4, 5, 6]
    assert sorted(map(tuple, levels[1])) == [(0, 1, 2), (3, 4, 5)]
    assert sorted(map(tuple, levels[2])) == [(0, 1, 2), (3, 4), (5,)]
    for level in levels:
        assert sorted(place for cluster in level for place in cluster) == list(range(6))


def test_the_path_through_clusters_is_as_short_as_can_be() -> None:
    rng = random.Random(0)
    for _ in range(10):
        points = [rng.random() for _ in range(6)]
        edges = [[abs(a - b) for b in points] for a in points]
        ends = [rng.random() for _ in points]

        def length(path: tuple[int, ...] | list[int]) -> float:
            inner = sum(edges[a][b] for a, b in itertools.pairwise(path))  # noqa: B023
            return inner + ends[path[0]] + ends[path[-1]]  # noqa: B023

        found = shortest_path(edges, ends, rng)
        assert length(found) == pytest.approx(min(map(length, itertools.permutations(range(6)))))


def test_hosts_of_a_site_share_a_stage_and_clients_join_the_nearest() -> None:
    hosts = {"d": 0, "s1": 10, "s2": 10, "s3": 10, "s4": 10, "c1": 10, "c2": 10}
    problem = _two_sites(hosts, far={"s3", "s4", "c2"})
    layout = paper_layout(problem, random.Random(0), num_stages=2)
    assert layout is not None
    by_clients = {stage.clients: set(stage.servers) for stage in layout.stages}
    assert by_clients == {("c1",): {"s1", "s2"}, ("c2",): {"s3", "s4"}}
    assert [stage.num_layers for stage in layout.stages] == [2, 2]


def test_a_server_faces_the_stage_that_is_nearer() -> None:
    """s1 and s2 are one stage: s1 is nearer to the data node, s2 to the other stage."""
    problem = make_problem({"d": 0, "s1": 10, "s2": 10, "s3": 10})
    places = [0.0, 1.0, 1.2, 9.0]
    latencies = [[abs(a - b) for b in places] for a in places]
    layout = paper_layout(replace(problem, latencies_s=latencies), random.Random(0), num_stages=2)
    assert layout is not None
    pair = next(stage for stage in layout.stages if len(stage.servers) == 2)
    assert {pair.frontal, pair.backward} == {("s1",), ("s2",)}
    single = next(stage for stage in layout.stages if len(stage.servers) == 1)
    assert single.frontal == single.backward == ("s3",)


def test_an_empty_duty_gets_the_slowest_server() -> None:
    """With one stage, both neighbours are the data node, so that all servers would be frontal."""
    problem = make_problem({"d": 0, "s1": 30, "s2": 10, "s3": 20})
    layout = paper_layout(problem, random.Random(0), num_stages=1)
    assert layout is not None
    assert layout.stages[0].frontal == ("s1", "s3")
    assert layout.stages[0].backward == ("s2",)


def test_equation_2_weighs_delay_against_computation() -> None:
    """Near hosts get a stage each. With a site far away, a second stage costs too much."""
    near = make_problem({"d": 0, "s1": 1, "s2": 1})
    far = _two_sites({"d": 0, "s1": 100, "s2": 100}, far={"s2"})
    found = paper_layout(near, random.Random(0))
    assert found is not None
    assert len(found.stages) == 2
    found = paper_layout(far, random.Random(0))
    assert found is not None
    assert len(found.stages) == 1


def test_a_stage_without_device_gets_a_client_of_another() -> None:
    hosts = {"d": 0, "s1": 0, "s2": 0, "c1": 10, "c2": 10}
    layout = paper_layout(_two_sites(hosts, far={"s2"}), random.Random(0), num_stages=2)
    assert layout is not None
    assert sorted(len(stage.clients) for stage in layout.stages) == [1, 1]


def test_layers_go_by_power_and_room() -> None:
    assert layers_by_power([1, 3], 8) == [2, 6]
    assert layers_by_power([1, 3], 8, [8, 4]) == [4, 4]
    assert layers_by_power([0, 3], 8) == [1, 7]
    assert layers_by_power([1, 1, 1], 2) is None
    assert layers_by_power([1, 1], 8, [3, 4]) is None
    assert layers_by_power([1, 1], 2, [0, 9]) is None


def test_the_mean_edge_is_over_all_pairs() -> None:
    assert mean_between([[0, 1, 2], [1, 0, 4], [2, 4, 0]], [0, 1], [2]) == 3
