"""How long an iteration takes: cases that can be computed by hand."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decod.lab.planner.bottleneck import ResourceKind
from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.advice import advise
from decod.lab.planner.servers.objective import LayoutClock, iteration_time_s
from decod.lab.planner.servers.servers_layout import to_draft
from decod.lab.planner.servers.servers_search import local_layout, plan_layout
from decod.lab.planner.servers.stage_time import share_out
from tests.support.server_problems import (
    MEGABYTE,
    WORK,
    change_host,
    make_layout,
    make_problem,
    training_problems,
)

ALONE = make_layout((4, "s", "s", ""))


def _single(**values: float) -> TrainingProblem:
    return make_problem({"d": 0, "s": 40}, **values)  # type: ignore[arg-type]


def test_a_single_device_computes_one_microbatch_after_the_other() -> None:
    time = iteration_time_s(_single(), ALONE)
    assert time.total_s == pytest.approx(10 * 4 / 40, rel=1e-3)
    assert time.bottleneck.kind == ResourceKind.WORKERS
    assert time.stages[0].shares == ((1, 10),)


def test_two_workers_share_the_work_by_their_speed() -> None:
    """Of 10 microbatches, the fast one does 7 in 0.7 s while the slow one does 3 in 0.6 s."""
    problem = make_problem({"d": 0, "s": 0, "c1": 40, "c2": 20})
    time = iteration_time_s(problem, make_layout((4, "s", "s", "c1 c2")))
    assert time.stages[0].shares == ((2, 7), (3, 3))
    assert time.stages[0].busy_s == pytest.approx(0.7)
    assert time.pipeline_s == pytest.approx(0.7, rel=0.05)


def test_a_stage_counts_as_slower_by_what_it_may_lose() -> None:
    """Half of its speed is a client's that is lost every other time. A quarter is lost then on
    average, and a quarter is the standard deviation: 1 / 0.75 + 0.25 / 0.75^2.
    """
    problem = make_problem({"d": 0, "s": 40, "c": 40})
    layout = make_layout((4, "s", "s", "c"))
    quiet = iteration_time_s(problem, layout).stages[0].busy_s
    lossy = iteration_time_s(change_host(problem, "c", lost_ratio=0.5), layout).stages[0].busy_s
    assert lossy == pytest.approx(quiet * (1 / 0.75 + 0.25 / 0.75**2))


def test_stages_get_fewer_layers_if_they_depend_on_clients_that_may_be_lost() -> None:
    def layers(lost_ratio: float) -> int:
        """Return the layers of the stage with the client, of two."""
        speeds = {"d": 0, "s1": 40, "s2": 40, "c": 40}
        problem = make_problem(speeds, work=replace(WORK, num_layers=12))
        problem = change_host(problem, "c", lost_ratio=lost_ratio)
        layout = plan_layout(problem, random.Random(1), num_stages=2)
        assert layout is not None
        return max(stage.num_layers for stage in layout.stages if stage.clients)

    assert layers(0.0) == 8
    assert layers(0.5) < 8


def test_equal_stages_fill_like_a_pipeline() -> None:
    """M + K - 1 steps of the busiest stage, as in GPipe."""
    problem = make_problem({"d": 0, "s1": 40, "s2": 40})
    layout = make_layout((2, "s1", "s1", ""), (2, "s2", "s2", ""))
    time = iteration_time_s(problem, layout)
    assert time.pipeline_s == pytest.approx((10 + 2 - 1) * 2 / 40, rel=1e-3)
    assert time.fill_s == pytest.approx(2 * 2 / 40, rel=1e-3)


def test_latency_counts_once_for_every_leg() -> None:
    """Data node, server, client, and the same way back, forward and backward."""
    problem = make_problem({"d": 0, "s": 0, "c": 40}, latency_s=1.0)
    time = iteration_time_s(problem, make_layout((4, "s", "s", "c")))
    assert time.fill_s == pytest.approx(8 * 1.0 + 4 / 40, rel=1e-3)
    assert time.aggregation_s == pytest.approx(2.0, rel=1e-3)  # To the server and back.


def test_a_servers_uplink_carries_four_messages_per_microbatch_of_others() -> None:
    problem = make_problem({"d": 0, "s": 0, "c": 4000}, work=WORK)
    problem = change_host(problem, "s", uplink_bytes_per_s=4 * MEGABYTE)
    time = iteration_time_s(problem, make_layout((4, "s", "s", "c")))
    assert time.bottleneck.kind == ResourceKind.UPLINK
    assert time.bottleneck.host_id == "s"
    assert time.bottleneck.busy_s == pytest.approx(10 * 4 / 4, rel=1e-3)


def test_two_servers_halve_the_uplinks_load() -> None:
    problem = make_problem({"d": 0, "s1": 0, "s2": 0, "c": 4000})
    for name in ("s1", "s2"):
        problem = change_host(problem, name, uplink_bytes_per_s=4 * MEGABYTE)
    time = iteration_time_s(problem, make_layout((4, "s1", "s2", "c")))
    assert time.bottleneck.busy_s == pytest.approx(10 * 2 / 4, rel=1e-3)


def test_a_server_that_computes_saves_the_legs_to_itself() -> None:
    problem = change_host(_single(), "s", uplink_bytes_per_s=4 * MEGABYTE)
    # Two messages instead of four: the output and the input's gradient, to the data node.
    assert iteration_time_s(problem, ALONE).stages[0].busy_s == pytest.approx(10 * 2 / 4)


def test_the_only_servers_link_carries_both_hops() -> None:
    time = iteration_time_s(_single(bandwidth=MEGABYTE), ALONE)
    assert time.bottleneck.kind == ResourceKind.LINK
    assert time.bottleneck.busy_s == pytest.approx(20)


def test_gradients_are_sent_averaged_and_exchanged() -> None:
    """Each server gets half of 4 MB from the client, and sends half of the means to the other."""
    problem = make_problem({"d": 0, "s1": 0, "s2": 0, "c": 40}, bandwidth=MEGABYTE)
    layout = make_layout((4, "s1", "s2", "c"))
    at_once = replace(problem, work=replace(WORK, delay=1))
    assert iteration_time_s(at_once, layout).aggregation_s == pytest.approx(2 + 2, rel=1e-3)
    # Without delay, the next batch waits until the client has fetched a half from both.
    assert iteration_time_s(problem, layout).aggregation_s == pytest.approx(6, rel=1e-3)


def test_an_iteration_waits_for_an_overlapped_step() -> None:
    problem = make_problem({"d": 0, "s": 40}, work=replace(WORK, delay=1, step_s=5.0))
    time = iteration_time_s(problem, ALONE)
    assert time.total_s == pytest.approx(20)
    assert time.bottleneck.kind == ResourceKind.STEP


def test_the_head_may_be_the_bottleneck() -> None:
    problem = make_problem({"d": 0, "s": 400}, work=replace(WORK, head_s=1.0))
    time = iteration_time_s(problem, ALONE)
    assert time.bottleneck.kind == ResourceKind.HEAD
    assert time.pipeline_s == pytest.approx(10, rel=0.01)


def test_memory_for_few_microbatches_makes_them_wait_for_each_other() -> None:
    problem = change_host(_single(latency_s=1.0), "s", num_microbatches_max=2)
    time = iteration_time_s(problem, ALONE)
    assert time.bottleneck.kind == ResourceKind.MEMORY
    assert time.pipeline_s == pytest.approx(5 * time.fill_s, rel=0.2)


def test_a_stage_without_worker_takes_for_ever() -> None:
    problem = make_problem({"d": 0, "s": 0, "c": 1})
    assert iteration_time_s(problem, ALONE).total_s == math.inf
    small = change_host(problem, "c", num_layers_max=3)
    assert iteration_time_s(small, make_layout((4, "s", "s", "c"))).total_s == math.inf


def test_a_server_must_hold_its_stage() -> None:
    problem = change_host(_single(), "s", num_layers_max=3)
    assert iteration_time_s(problem, ALONE).total_s == math.inf


def test_data_nodes_share_the_microbatches() -> None:
    slow = {"bandwidth": MEGABYTE}
    one = iteration_time_s(make_problem({"d": 0, "s": 400}, **slow), ALONE)  # type: ignore[arg-type]
    two = iteration_time_s(
        make_problem({"d1": 0, "d2": 0, "s": 400}, **slow),  # type: ignore[arg-type]
        ALONE,
    )
    assert two.bottleneck.busy_s == pytest.approx(one.bottleneck.busy_s / 2)


def test_three_servers_meet_two_by_index() -> None:
    """The paper's example: from 2 to 3, parts of 2/3 and 1/3, then 1/3 and 2/3."""
    clock = LayoutClock(make_problem({"d": 0, "s1": 1, "s2": 1, "s3": 1, "s4": 1, "s5": 1}))
    problem = clock.problem
    latencies = [[float(10 ** (i + j)) * (i != j) for j in range(6)] for i in range(6)]
    clock = LayoutClock(replace(problem, latencies_s=latencies))
    hop = clock.hop((1, 2), (3, 4, 5))
    parts = {(1, 3): 1 / 3, (1, 4): 1 / 6, (2, 4): 1 / 6, (2, 5): 1 / 3}
    expected = sum(2 * 10 ** (i + j) * part for (i, j), part in parts.items())
    assert hop.fill_s == pytest.approx(expected, rel=1e-6)


@given(tasks=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), num=st.integers(1, 60))
def test_tasks_are_shared_out_as_one_by_one(tasks: list[float], num: int) -> None:
    counts = share_out(tasks, num)
    assert sum(counts) == num
    greedy = [0] * len(tasks)
    for _ in range(num):
        best = min(range(len(tasks)), key=lambda i: (greedy[i] + 1) * tasks[i])
        greedy[best] += 1
    longest = max(count * task for count, task in zip(greedy, tasks, strict=True))
    ours = max(count * task for count, task in zip(counts, tasks, strict=True))
    assert ours == pytest.approx(longest, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(problem=training_problems(), seed=st.integers(0, 99))
def test_parts_and_total_agree_and_better_links_never_hurt(
    problem: TrainingProblem, seed: int
) -> None:
    layout = local_layout(problem, random.Random(seed), evaluations=20)
    if layout is None:
        return
    time = iteration_time_s(problem, layout)
    clock = LayoutClock(problem)
    assert clock.time_s(to_draft(problem, layout)) == pytest.approx(time.total_s)
    assert time.fill_s <= time.pipeline_s * (1 + 1e-9)
    assert time.total_s >= time.pipeline_s + time.aggregation_s - 1e-9
    assert time.bottleneck.busy_s > 0
    for stage in time.stages:
        assert sum(count for _, count in stage.shares) == problem.work.num_microbatches
    assert advise(problem, layout).total_s <= time.total_s * 1.5
    faster = replace(
        problem, latencies_s=[[latency / 2 for latency in row] for row in problem.latencies_s]
    )
    assert iteration_time_s(faster, layout).total_s <= time.total_s + 1e-9
    assert problem.indexes(HostKind.DATA) == list(clock.data_nodes)
