"""Hosts in between, and what a link costs that passes through one."""

import pytest

from decod.ids import NodeId
from decod.planner.cost import Link
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.view import (
    HOSTS_BETWEEN,
    Member,
    Reach,
    Role,
    View,
    hosts_between,
    passed_peers,
)

LEADER, A, B, C = (NodeId(letter * 52) for letter in "labc")


def member(node: NodeId, reach: Reach, role: Role = Role.RELAY) -> Member:
    index = 0 if role is Role.DATA else -1
    stage = 0 if role is Role.DATA else 1
    return Member(node, "h:1", role, stage, 1, data_node_index=index, reach=reach)


def view_of(*relays: Member, leader: Reach = Reach.PASSES_ON) -> View:
    members = [member(LEADER, leader, Role.DATA), *relays]
    return View.of(members, version=1, leader=LEADER, term=1, num_stages=2)


MANY = [member(NodeId(letter * 52), Reach.PASSES_ON) for letter in "defghijkmnop"]


def names(members: list[Member]) -> list[NodeId]:
    return [each.node_id for each in members]


def test_hosts_in_between_pass_on_and_the_leader_is_the_last() -> None:
    view = view_of(member(A, Reach.DIALLED), member(B, Reach.PASSES_ON), member(C, Reach.OUTBOUND))
    assert names(hosts_between(view.members, LEADER, C)) == [B, LEADER]
    assert names(hosts_between(view.members, LEADER, B)) == [LEADER], "nobody for itself"


def test_a_leader_that_does_not_pass_on_is_none() -> None:
    view = view_of(member(B, Reach.PASSES_ON), leader=Reach.DIALLED)
    assert names(hosts_between(view.members, LEADER, C)) == [B]


def test_all_nodes_find_the_same_few_hosts_and_each_goal_has_others() -> None:
    goals = [NodeId(digit * 52) for digit in "234567"]
    chosen = [tuple(names(hosts_between(view_of(*MANY).members, LEADER, g))) for g in goals]
    backwards = [tuple(names(hosts_between(MANY[::-1], LEADER, g))) for g in goals]
    assert [each[:-1] for each in chosen] == backwards, "in whatever order they are known"
    assert all(len(each) == HOSTS_BETWEEN + 1 for each in chosen)
    assert len(set(chosen)) == len(goals)


def test_the_loss_of_a_host_changes_nothing_for_those_that_did_not_use_it() -> None:
    view = view_of(*MANY)
    before = names(hosts_between(view.members, LEADER, C))
    without = [m for m in view.members if m.node_id != before[0]]
    after = names(hosts_between(without, LEADER, C))
    assert after[: HOSTS_BETWEEN - 1] == before[1:HOSTS_BETWEEN]


def test_traffic_passes_another_host_only_between_two_that_nobody_can_dial() -> None:
    view = view_of(member(A, Reach.DIALLED), member(B, Reach.OUTBOUND), member(C, Reach.OUTBOUND))
    assert passed_peers(view, B) == {C}
    assert passed_peers(view, C) == {B}
    assert passed_peers(view, A) == passed_peers(view, LEADER) == frozenset()
    assert passed_peers(view, NodeId("z" * 52)) == frozenset()


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
