"""Planners of the servers organisation: valid layouts, and how near to the best they are."""

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.exact import exact_layout
from decod.lab.planner.servers.moves import Mover, arranged
from decod.lab.planner.servers.objective import iteration_time_s
from decod.lab.planner.servers.paper_planner import paper_layout
from decod.lab.planner.servers.servers_layout import ServersLayout, broken_rules, to_draft
from decod.lab.planner.servers.servers_search import local_layout, plan_layout
from decod.lab.sim.random_hosts import draw_small_problem
from tests.support.server_problems import (
    WORK,
    change_host,
    make_layout,
    make_problem,
    training_problems,
)

NUM_INSTANCES = 8


def _time_s(problem: TrainingProblem, layout: ServersLayout | None) -> float:
    assert layout is not None
    assert broken_rules(problem, layout) == []
    return iteration_time_s(problem, layout).total_s


def test_layouts_are_close_to_the_best() -> None:
    """scripts/bench_planner_servers.py shows the same for 100 instances."""
    ratios = []
    for seed in range(NUM_INSTANCES):
        problem = draw_small_problem(random.Random(seed))
        best = exact_layout(problem)
        found = plan_layout(problem, random.Random(seed), evaluations=5000)
        assert (best is None) == (found is None)
        if best is not None:
            ratios.append(_time_s(problem, found) / _time_s(problem, best))
    assert len(ratios) > NUM_INSTANCES / 2
    assert min(ratios) >= 1 - 1e-9
    assert statistics.mean(ratios) <= 1.03
    assert max(ratios) <= 1.15


def test_the_exact_search_prunes_nothing_that_is_best() -> None:
    """The search by chance looks at every kind of layout, and never finds a better one."""
    for seed in range(8):
        problem = draw_small_problem(random.Random(seed))
        best = exact_layout(problem)
        if best is None:
            continue
        for number in range(1, 4):
            other = local_layout(problem, random.Random(seed), num_stages=number, evaluations=500)
            if other is not None:
                assert len(other.stages) == number
                found_s, best_s = _time_s(problem, other), _time_s(problem, best)
                assert best_s <= found_s * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(problem=training_problems(), seed=st.integers(0, 99))
def test_every_layout_is_valid(problem: TrainingProblem, seed: int) -> None:
    for layout in (
        paper_layout(problem, random.Random(seed)),
        plan_layout(problem, random.Random(seed), evaluations=100),
        local_layout(problem, random.Random(seed), evaluations=50),
    ):
        if layout is not None:
            assert broken_rules(problem, layout) == []


@settings(max_examples=25, deadline=None)
@given(problem=training_problems(), seed=st.integers(0, 99))
def test_no_move_breaks_a_rule_or_loses_a_host(problem: TrainingProblem, seed: int) -> None:
    rng = random.Random(seed)
    layout = paper_layout(problem, rng)
    if layout is None:
        return
    # Unlimited, because moves leave memory to the objective.
    hosts = [replace(host, num_layers_max=None) for host in problem.hosts]
    problem = replace(problem, hosts=hosts)
    now = arranged(problem, to_draft(problem, layout))
    mover = Mover(rng, num_stages_open=True)
    for _ in range(60):
        proposed = mover.propose(now, rng.randrange(len(now.stages)))
        if proposed is None:
            continue
        now = proposed
        used = [host for stage in now.stages for host in (*stage.servers, *stage.clients)]
        everyone = sorted([*used, *now.idle_servers, *now.idle_clients])
        assert everyone == sorted(
            problem.indexes(HostKind.RELIABLE) + problem.indexes(HostKind.UNRELIABLE)
        )
        assert sum(stage.num_layers for stage in now.stages) == problem.work.num_layers
        for stage in now.stages:
            assert stage.num_layers >= 1
            assert stage.frontal
            assert stage.backward
            both = set(stage.frontal) & set(stage.backward)
            assert not both or len(stage.servers) == 1


@pytest.mark.parametrize("planner", [plan_layout, local_layout, paper_layout])
def test_the_same_seed_gives_the_same_layout(planner: object) -> None:
    problem = draw_small_problem(random.Random(3))
    first, second = (planner(problem, random.Random(5)) for _ in range(2))  # type: ignore[operator]
    assert first == second


def test_a_number_of_stages_is_kept() -> None:
    problem = make_problem({"d": 0, "s1": 10, "s2": 10, "s3": 10, "c1": 10})
    for number in (1, 2, 3):
        for layout in (
            plan_layout(problem, random.Random(0), num_stages=number, evaluations=200),
            paper_layout(problem, random.Random(0), num_stages=number),
            exact_layout(problem, num_stages=number),
        ):
            assert layout is not None
            assert len(layout.stages) == number
    assert plan_layout(problem, random.Random(0), num_stages=4) is None
    assert paper_layout(problem, random.Random(0), num_stages=4) is None
    assert exact_layout(problem, num_stages=4) is None


def test_a_client_that_would_hold_up_the_aggregation_stays_idle() -> None:
    problem = make_problem({"d": 0, "s": 40, "c": 40}, work=replace(WORK, layer_bytes=1e9))
    slow = change_host(problem, "c", uplink_bytes_per_s=1e6)
    assert plan_layout(slow, random.Random(0), evaluations=200) == make_layout((4, "s", "s", ""))
    assert plan_layout(problem, random.Random(0), evaluations=200) == make_layout(
        (4, "s", "s", "c")
    )


def test_memory_forces_a_second_stage() -> None:
    problem = make_problem({"d": 0, "s1": 0, "s2": 0, "c1": 10, "c2": 10})
    for name in ("c1", "c2"):
        problem = change_host(problem, name, num_layers_max=2)
    layout = plan_layout(problem, random.Random(0), evaluations=500)
    assert layout is not None
    assert [stage.num_layers for stage in layout.stages] == [2, 2]
    assert exact_layout(problem, num_stages=1) is None


def test_faults_of_a_layout_are_named() -> None:
    problem = make_problem({"d": 0, "s1": 10, "s2": 10, "c": 10})
    small = change_host(problem, "s1", num_layers_max=2)
    cases = {
        (4, "", "", "c"): "it has no reliable host",
        (4, "s1", "", ""): "it has no backward server",
        (4, "c", "c", ""): "'c' is a host of kind unreliable, not reliable",
        (4, "s1", "s1", "s2"): "'s2' is a host of kind reliable, not unreliable",
        (4, "s1 s2", "s2", ""): "'s2' has both duties",
        (4, "s1 s1", "s2", ""): "'s1' has a duty twice",
        (4, "x", "x", ""): "there is no host 'x'",
        (0, "s1", "s1", ""): "it has no layer",
        (3, "s1", "s1", ""): "the stages have 3 layers, not 4",
    }
    for stage, expected in cases.items():
        faults = [fault.what for fault in broken_rules(problem, make_layout(stage))]
        assert any(fault.startswith(expected) for fault in faults), (stage, faults)
    twice = make_layout((2, "s1", "s1", "c"), (2, "s2", "s2", "c"))
    assert "'c' stands there twice" in [fault.what for fault in broken_rules(problem, twice)]
    assert [fault.what for fault in broken_rules(small, make_layout((4, "s1", "s1", "")))] == [
        "'s1' can hold 2 layers"
    ]
    assert broken_rules(problem, make_layout((4, "s1", "s2", "c"))) == []
