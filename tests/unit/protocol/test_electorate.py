"""Any two quorums meet; a leader opens no view without one, unless nobody else could lead."""

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import NodeId
from decod.protocol.leadership.quorum import is_quorum

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
