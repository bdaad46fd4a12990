"""Any two quorums meet; a leader opens no view without one, unless nobody else could lead."""

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.protocol.leadership.quorum import Quorum, ids_of, is_quorum
from tests.unit.protocol.cast import D0, D1, R1A, R1B, view_of

names = st.sets(st.sampled_from("abcdefg")).map(lambda found: {NodeId(n) for n in found})


@given(members=names, one=names, other=names)
def test_two_quorums_of_the_same_members_meet(
    members: set[NodeId], one: set[NodeId], other: set[NodeId]
) -> None:
    ordered = sorted(members)
    if members and is_quorum(one, ordered) and is_quorum(other, ordered):
        assert one & other & members


@given(members=names, nodes=names)
def test_of_two_halves_exactly_one_is_a_quorum(members: set[NodeId], nodes: set[NodeId]) -> None:
    ordered = sorted(members)
    if members:
        assert is_quorum(nodes, ordered) is not is_quorum(members - nodes, ordered)


def test_a_leader_may_not_lose_most_members_at_once_if_another_could_lead() -> None:
    quorum = Quorum(D0)
    quorum.opened(view_of(D0, D1, R1A, R1B))
    assert quorum.allows(view_of(D0, R1A))
    assert not quorum.allows(view_of(D0))
    assert not quorum.allows(view_of(D0, "r1c", "r1d", "r1e")), "new members are no substitute"
    quorum.committed(view_of(D0, R1A))
    assert quorum.allows(view_of(D0)), "after a commit in the smaller view"


def test_the_only_data_node_may_lose_anybody() -> None:
    quorum = Quorum(D0)
    quorum.opened(view_of(D0, R1A, R1B))
    assert quorum.allows(view_of(D0))
    quorum.opened(view_of(D0, D1, R1A, R1B))
    assert not quorum.allows(view_of(D0)), "d1 could be elected by the relays"


def test_members_that_leave_are_not_needed() -> None:
    quorum = Quorum(D0)
    quorum.opened(view_of(D0, D1, R1A, R1B))
    for node in (D1, R1A, R1B):
        quorum.dismiss(node)
    assert quorum.allows(view_of(D0))


def test_electors_are_told_where_they_are_not_the_view() -> None:
    quorum, first = Quorum(D0), view_of(D0, D1, R1A, R1B)
    quorum.opened(first)
    assert quorum.told_with(first) == ()
    assert quorum.told_with(view_of(D0, D1, R1A)) == ids_of(first)
