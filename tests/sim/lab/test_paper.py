"""The paper's experiments, one small piece of each."""

from dataclasses import replace

import pytest

from decod.lab.sim.paper import Row, flow_tests, joining_tests, make_row
from decod.lab.sim.paper_churn import TABLES, churn_scenario, churn_tests
from decod.lab.sim.paper_training import table6, training_tests
from decod.sim.simulation import Simulation
from tests.support.quick import first_of


def silent(_: str) -> None:
    """Nobody waits."""


def by_key(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.policy, row.metric): row for row in rows}


def test_a_row_is_mean_and_spread() -> None:
    assert make_row(1, "flow", "flows", [2.0, 4.0]) == Row("1", "flow", "flows", 3.0, 2.0**0.5)
    assert make_row("a", "flow", "flows", [2.0], 7.0) == Row("a", "flow", "flows", 2.0, 0.0, 7.0)


def test_flow_tests_compare_with_the_exact_routing() -> None:
    told: list[str] = []
    rows = by_key(flow_tests(2, told.append, settings=[1]))
    assert told == ["table V, setting 1"]
    assert {policy for policy, _ in rows} == {"flow", "gwtf", "greedy", "optimal"}
    assert rows["optimal", "cost_ratio_to_optimal"].mean == 1
    assert rows["greedy", "cost_ratio_to_optimal"].mean > 1
    for policy in ("flow", "gwtf", "greedy"):
        assert rows[policy, "flows_ratio_to_maximum"].mean == 1
        assert rows[policy, "mean_cost_per_flow"].mean >= rows["optimal", "mean_cost_per_flow"].mean


def test_joining_tests_stand_beside_the_papers_bound() -> None:
    rows = by_key(joining_tests(1, silent, settings=[1]))
    assert rows["optimal", "ratio_to_optimal"].mean == 1
    assert rows["gwtf", "ratio_to_optimal"].paper == 0.75
    assert {row.paper for key, row in rows.items() if key != ("gwtf", "ratio_to_optimal")} == {None}
    for policy in ("utilisation", "gwtf", "capacity", "random"):
        assert rows[policy, "ratio_to_optimal"].mean <= 1


def test_table_6_has_three_nodes_in_each_of_six_stages() -> None:
    scenario = table6(1, "fixed")
    stages = [host.stage_index for host in scenario.hosts]
    assert [stages.count(stage) for stage in range(6)] == [3] * 6
    assert {host.capacity for host in scenario.hosts} == {4}
    assert table6(1, "flow").links == scenario.links != table6(2, "flow").links
    for (begin, end), spec in scenario.links.overrides.items():
        assert scenario.links.overrides[end, begin] == spec
        assert 50e6 / 8 <= spec.bandwidth_bytes_per_s <= 500e6 / 8


@pytest.mark.parametrize("routing", first_of(["fixed", "flow"]))
def test_table_6_trains_all_that_there_is_room_for(routing: str) -> None:
    rows = by_key(training_tests(1, silent, routings=[routing], num_iterations=5))
    assert rows[routing, "microbatches_per_iteration"].mean == 12
    time_min = rows[routing, "time_per_microbatch_min"]
    assert 0.05 < time_min.mean < 2
    assert time_min.paper == {"fixed": 0.44, "flow": 0.51}[routing]
    assert ((routing, "time_ratio_to_fixed") in rows) == (routing == "fixed")


@pytest.mark.slow
def test_flows_are_as_fast_as_the_fixed_arrangement_once_links_have_been_measured() -> None:
    durations_s = {}
    for routing in ("fixed", "flow"):
        simulation = Simulation(replace(table6(3, routing), num_iterations=4))
        simulation.run()
        durations_s[routing] = [found.duration_s for found in simulation.meter.figures[1:]]
    assert max(durations_s["flow"]) < 1.05 * min(durations_s["fixed"])


@pytest.mark.parametrize("table", [2, 3])
def test_the_cells_of_a_table_differ_in_capacities_and_losses_alone(table: int) -> None:
    scenarios = [churn_scenario(table, cell, 1) for cell in TABLES[table]]
    assert len({str(scenario.links) for scenario in scenarios}) == 1
    assert [bool(scenario.churn) for scenario in scenarios] == [False, True, True] * 2
    for scenario in scenarios:
        stages = [host.stage_index for host in scenario.hosts]
        assert [stages.count(stage) for stage in range(6)] == [2, 4, 3, 3, 3, 3]
    capacities = [{h.capacity for h in s.hosts if h.stage_index} for s in scenarios]
    assert capacities == [{4}] * 3 + [{1, 2, 3}] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)  # Five seconds each on a machine that has nothing else to do.
@pytest.mark.parametrize("index", [1, 2])
def test_under_churn_no_reading_of_swarm_is_faster(index: int) -> None:
    rows = by_key(churn_tests(2, 1, silent, cells=[index], num_iterations=6))
    for policy in ("restart", "closest", "stateless"):
        ratio = rows["flow", f"time_ratio_to_{policy}"]
        assert ratio.mean <= 1
        of_means = rows["flow", f"ratio_of_mean_times_to_{policy}"]
        assert of_means.mean == ratio.mean  # There is one instance.
        assert of_means.paper == {1: 0.802, 2: 0.665}[index]
        done = rows[policy, "microbatches_per_iteration"].mean
        assert rows["flow", "microbatches_per_iteration"].mean >= done
        assert rows[policy, "wasted_ratio"].mean > 0
    assert rows["flow", "wasted_by_living_ratio"].mean <= 0.02
    cell = TABLES[2][index]
    assert rows["flow", "time_per_microbatch_min"].paper == cell.time_min[0]
    assert rows["closest", "time_per_microbatch_min"].paper == cell.time_min[1]
