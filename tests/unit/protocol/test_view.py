"""What follows from a view is the same on every node, and fits together."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.protocol.core.view import (
    Member,
    View,
    flow_quota,
    flow_room,
    next_peers,
    previous_peers,
    tree_place,
    watched,
    watchers,
)
from tests.unit.protocol.cast import member, view_of


def build(stages: list[list[int]]) -> View:
    """Return a view with members of these capacities; index 0 holds the data nodes."""
    members: list[Member] = []
    for stage, capacities in enumerate(stages):
        for k, capacity in enumerate(capacities):
            name = f"r{stage}{k:03}" if stage else f"d{k}"
            members.append(member(name, capacity=capacity))
    return view_of(*members, num_stages=len(stages))


capacities_1 = st.lists(st.integers(1, 5), min_size=1, max_size=14)
partly_paused = st.lists(st.integers(0, 5), min_size=1, max_size=14).filter(any)
views = st.tuples(capacities_1, st.lists(partly_paused, min_size=1, max_size=4)).map(
    lambda drawn: build([drawn[0], *drawn[1]])
)
gappy = st.tuples(
    capacities_1, st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=1, max_size=6)
).map(lambda drawn: build([drawn[0], *drawn[1]]))
"""Views in which relay stages may be empty, as while nodes are gathered."""


# --- order ----------------------------------------------------------------------------------------


@given(views, st.randoms(use_true_random=False))
def test_members_are_in_the_same_order_whoever_lists_them(view: View, rng: object) -> None:
    shuffled = list(view.members)
    rng.shuffle(shuffled)  # type: ignore[attr-defined] # Hypothesis's own Random.
    again = view_of(*shuffled, num_stages=view.num_stages)
    assert again == view
    assert again.members[0].node_id == view.leader


# --- trees ----------------------------------------------------------------------------------------


@given(gappy, st.integers(1, 5))
def test_an_announcement_reaches_every_member_exactly_once(view: View, fanout: int) -> None:
    reached: list[NodeId] = []
    todo = [view.leader]
    while todo:
        node = todo.pop()
        reached.append(node)
        todo += tree_place(view, node, fanout=fanout).children
    assert sorted(reached) == sorted(view.by_id)


@given(gappy, st.integers(1, 5))
def test_parents_and_children_agree_and_nobody_has_many(view: View, fanout: int) -> None:
    for node in view.by_id:
        place = tree_place(view, node, fanout=fanout)
        for child in place.children:
            assert tree_place(view, child, fanout=fanout).parent == node
        assert (place.parent is None) == (node == view.leader)
        assert len(place.children) + (place.parent is not None) <= 2 * fanout + 1


# --- watching -------------------------------------------------------------------------------------


@given(gappy, st.integers(1, 4))
def test_everybody_is_watched_by_those_who_think_they_watch(view: View, num: int) -> None:
    for node in view.by_id:
        listening = watchers(view, node, num_watchers=num)
        assert len(listening) == min(num, len(view.members) - 1)
        assert node not in listening
        assert len(set(listening)) == len(listening)
        for watcher in listening:
            assert node in watched(view, watcher, num_watchers=num)
        for other in watched(view, node, num_watchers=num):
            assert node in watchers(view, other, num_watchers=num)


# --- neighbours -----------------------------------------------------------------------------------


@given(views, st.integers(1, 9))
def test_who_may_send_and_who_may_receive_agree(view: View, max_peers: int) -> None:
    for node in view.by_id:
        there = next_peers(view, node, max_peers=max_peers)
        assert len(set(there)) == len(there)
        for peer in there:
            assert node in previous_peers(view, peer, max_peers=max_peers)
        for peer in previous_peers(view, node, max_peers=max_peers):
            assert node in next_peers(view, peer, max_peers=max_peers)


@given(views, st.integers(1, 9))
def test_who_works_is_known_to_somebody_of_the_stage_before(view: View, max_peers: int) -> None:
    """And who is paused knows nobody of another stage, nor is known."""
    for m in view.members:
        assert bool(previous_peers(view, m.node_id, max_peers=max_peers)) == bool(m.capacity)
        assert bool(next_peers(view, m.node_id, max_peers=max_peers)) == bool(m.capacity)


@given(views, st.integers(1, 9))
def test_relays_know_a_bounded_number_of_relays(view: View, max_peers: int) -> None:
    for m in view.members:
        if m.capacity and 0 < m.stage_index < view.num_stages - 1:
            here, there = len(view.workers[m.stage_index]), len(view.workers[m.stage_index + 1])
            bound = max(max_peers, -(-there // here))
            assert len(next_peers(view, m.node_id, max_peers=max_peers)) == min(bound, there)


@given(views)
def test_data_nodes_know_all_of_the_first_stage_and_of_the_last(view: View) -> None:
    first = tuple(m.node_id for m in view.workers[1])
    for data_node in view.data_nodes:
        assert next_peers(view, data_node.node_id, max_peers=1) == first
    for m in view.workers[view.num_stages - 1]:
        all_data = tuple(d.node_id for d in view.data_nodes)
        assert next_peers(view, m.node_id, max_peers=1) == all_data


# --- quotas ---------------------------------------------------------------------------------------


@given(views)
def test_quotas_fill_the_scarcer_side_and_exceed_nobody(view: View) -> None:
    slots = {d.node_id: d.capacity for d in view.data_nodes}
    for roster in view.rosters[1:]:
        given_: Counter[NodeId] = Counter()
        for relay in roster:
            quota = flow_quota(view, relay.node_id)
            assert sum(quota.values()) <= flow_room(view, relay.node_id)
            assert min(quota.values(), default=1) >= 1
            given_.update(quota)
        room = sum(flow_room(view, m.node_id) for m in roster)
        assert room == max(sum(m.capacity for m in roster), len(slots))
        assert sum(given_.values()) == min(room, sum(slots.values()))
        assert all(given_[node] <= slots[node] for node in given_)


@given(views)
def test_scarce_capacity_is_shared_in_proportion(view: View) -> None:
    """Whoever wants n slots of N, of which only C can be carried, gets n C / N of them, or one
    slot more or less for each half-slot that the layout iterations away."""
    slots = {d.node_id: d.capacity for d in view.data_nodes}
    total = sum(slots.values())
    for roster in view.rosters[1:]:
        carried = min(total, sum(flow_room(view, m.node_id) for m in roster))
        for node, wanted in slots.items():
            got = sum(flow_quota(view, m.node_id).get(node, 0) for m in roster)
            share = wanted * carried / total
            assert abs(got - share) <= 0.5 + len(slots) * 0.5 * wanted / total + 0.5
