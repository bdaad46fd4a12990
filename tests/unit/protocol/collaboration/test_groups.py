"""Rows and columns of peers: everybody gets the average of all, and nobody counts twice."""

import pytest

from decod.ids import NodeId
from decod.protocol.collaboration.groups import GROUP_MAX, Groups, num_rows

SIZES = [1, 2, 3, GROUP_MAX, GROUP_MAX + 1, 23, 24, 35, 36, 64, 100, 257]


def groups_of(num_peers: int, num_listeners: int = 0) -> Groups:
    peers = [NodeId(f"peer{k}") for k in range(num_peers)]
    listeners = [NodeId(f"listener{k}") for k in range(num_listeners)]
    return Groups.of(peers, num_rows(num_peers), listeners)


@pytest.mark.parametrize("num_peers", SIZES)
def test_everybody_gets_one_average(num_peers: int) -> None:
    groups = groups_of(num_peers, num_listeners=7)
    if len(groups.rows) == 1:
        assert groups.audience(0) == groups.listeners
        return
    gets = [
        node
        for index in range(groups.num_columns)
        for node in (*groups.column(index), *groups.audience(index))
    ]
    assert len(gets) == len({*gets}) == num_peers + 7
    for index in range(groups.num_columns):
        assert all(groups.column_of(node) == index for node in groups.audience(index))
