"""Hosts in between, and what a link costs that passes through one."""

import pytest

from decod.ids import NodeId
from decod.planner.cost import Link
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.view import (
    Member,
    Reach,
    Role,
    View,
    hosts_between,
)

LEADER, A, B, C = (NodeId(letter * 52) for letter in "labc")


def member(node: NodeId, reach: Reach, role: Role = Role.RELAY) -> Member:
    index = 0 if role is Role.DATA else -1
    stage = 0 if role is Role.DATA else 1
    return Member(node, "h:1", role, stage, 1, data_node_index=index, reach=reach)


def view_of(*relays: Member, leader: Reach = Reach.PASSES_ON) -> View:
    members = [member(LEADER, leader, Role.DATA), *relays]
    return View.of(members, version=1, leader=LEADER, term=1, num_stages=2)


def names(members: list[Member]) -> list[NodeId]:
    return [each.node_id for each in members]


def test_a_leader_that_does_not_pass_on_is_none() -> None:
    view = view_of(member(B, Reach.PASSES_ON), leader=Reach.DIALLED)
    assert names(hosts_between(view.members, LEADER, C)) == [B]


@pytest.fixture
def table() -> LinkTable:
    table = LinkTable(activation_size_bytes=1_000_000, compute_s=0.0)
    for peer in (A, B):
        table.measured(peer, latency_s=0.01, bandwidth_bytes_per_s=1e7)
    return table


def test_a_link_by_way_of_another_host_counts_with_half_of_its_bandwidth(table: LinkTable) -> None:
    direct = table.cost_s(A)
    table.forget_others(frozenset({A, B, C}), passed=frozenset({B}))
    assert table.cost_s(A) == direct
    assert table.link(B) == Link(0.01, 5e6), "its latency was measured over both halves"
    assert table.cost_s(B) > direct
    table.forget_others(frozenset({A, B, C}))
    assert table.cost_s(B) == direct, "it can be dialled now"


def test_one_that_nobody_has_measured_has_twice_the_usual_latency(table: LinkTable) -> None:
    table.forget_others(frozenset({A, B, C}), passed=frozenset({C}))
    assert table.link(C) == Link(0.02, 5e6)
