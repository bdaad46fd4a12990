"""The paper's random instances have the sizes that its tables give."""

import pytest

from decod.lab.sim.instances import TABLE_4, TABLE_5, table4, table5


@pytest.mark.parametrize("setting", TABLE_5)
def test_flow_tests_are_as_in_table_5(setting: int) -> None:
    row = TABLE_5[setting]
    graph = table5(setting, seed=3)
    stages = [graph.stage(index) for index in range(row.num_stages + 1)]
    assert len(stages[0]) == row.num_sources
    assert {len(stage) for stage in stages[1:]} == {row.num_relays // row.num_stages}
    relays = [node for stage in stages[1:] for node in stage]
    assert {node.capacity for node in relays} <= set(range(*row.capacity))
    assert {*graph.costs.values()} <= set(range(*row.link_cost))
    wanted = sum(node.capacity for node in stages[0])
    assert wanted == min(sum(node.capacity for node in stage) for stage in stages[1:])
    capacities = [node.capacity for node in stages[0]]
    assert max(capacities) - min(capacities) <= 1


@pytest.mark.parametrize("setting", TABLE_4)
def test_joining_tests_are_as_in_table_4(setting: int) -> None:
    row = TABLE_4[setting]
    graph, newcomers = table4(setting, seed=3)
    assert len(graph.nodes) == 97
    sizes = [len(graph.stage(index)) for index in range(1, row.num_stages + 1)]
    assert min(sizes) >= 1
    assert (len(set(sizes)) > 1) == row.uneven
    assert len(newcomers) == 20
    for index, newcomer in enumerate(newcomers):
        assert {*newcomer.costs.values()} <= set(range(*row.link_cost))
        assert len(newcomer.costs) == 97 + index


def test_seeds_and_settings_differ_and_repeat() -> None:
    assert table5(1, 0).costs == table5(1, 0).costs != table5(1, 1).costs
    assert table4(1, 0)[1] == table4(1, 0)[1] != table4(1, 1)[1]
    assert table5(1, 0).costs != table5(5, 0).costs
