"""A change of the view is read as it was written, and one that makes no sense is refused."""

from typing import Any

import pytest

from decod.errors import MalformedMessageError
from decod.ids import Iteration, NodeId
from decod.protocol.core.view import Member, Opening, Role, View
from decod.wire import codec
from decod.wire.v1 import control_pb2 as pb
from tests.unit.protocol.cast import committed
from tests.unit.wire.test_codec import NOW, RUN, SENDER, base32, envelope, member


def changed(*, view: pb.View | None = None, **changes: Any) -> pb.Envelope:
    """An opening that changes a view."""
    fields: dict[str, Any] = {"base": "0" * 64, "result": "1" * 64}
    outline = view or pb.View(leader="a" * 52, num_stages=1)
    told = pb.Opening(view=outline, **NOW)
    change = pb.ViewChange(**{**fields, **changes})
    return envelope(
        open=pb.Open(
            closed=pb.Iteration(), outcome=pb.OUTCOME_REPEATED, opening=told, change=change
        )
    )


def mended(**changes: Any) -> pb.Envelope:
    """A Mend that changes a view."""
    change = pb.ViewChange(base="0" * 64, result="1" * 64, **changes)
    outline = pb.View(leader="a" * 52, num_stages=1)
    return envelope(mend=pb.Mend(iteration=pb.Iteration(), view=outline, change=change))


BAD: dict[str, pb.Envelope] = {
    "a change without its base": changed(base=""),
    "a change with half a hash": changed(result="1" * 32),
    "a change of nothing to something": changed(result="0" * 64, gone=["b" * 52]),
    "a change beside a whole view": changed(
        view=pb.View(leader="a" * 52, num_stages=1, members=[member(0)])
    ),
    "gone twice": changed(gone=["b" * 52] * 2),
    "changed twice": changed(changed=[member(1)] * 2),
    "gone and changed": changed(gone=["b" * 52], changed=[member(1)]),
    "gone of no node": changed(gone=["b"]),
    "a changed data node at stage 1": changed(changed=[member(1, role=1)]),
    "a changed data node with a duty": changed(changed=[member(0, duty=pb.DUTY_FRONTAL)]),
    "a changed relay with a data index": changed(changed=[member(1, data_node_index=1)]),
    "a changed name with a space": changed(changed=[member(0, name="bob 2")]),
    "a data node that nobody can dial": changed(changed=[member(0, reach=pb.REACH_OUTBOUND)]),
    "a member that is reached in no known way": changed(changed=[member(1, reach=4)]),
    "electors without the first": changed(electors=pb.ElectorChange()),
    "the first elector without a vote": changed(
        electors=pb.ElectorChange(first="a" * 52, without_vote=["a" * 52])
    ),
    "an elector with and without a vote": changed(
        electors=pb.ElectorChange(first="a" * 52, without_vote=["b" * 52], former=["b" * 52])
    ),
    "a mended view whole and changed": envelope(
        mend=pb.Mend(
            iteration=pb.Iteration(),
            view=pb.View(leader="a" * 52, num_stages=1, members=[member(0)]),
            change=pb.ViewChange(base="0" * 64, result="1" * 64),
        )
    ),
    "a mended view with electors": mended(electors=pb.ElectorChange(first="a" * 52)),
    "a mended view without members": envelope(
        mend=pb.Mend(iteration=pb.Iteration(), view=pb.View(leader="a" * 52, num_stages=1))
    ),
    "what is missed with half a hash": envelope(
        catch_up=pb.CatchUp(iteration=pb.Iteration(), view_hash="0")
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_change_is_malformed(name: str) -> None:
    with pytest.raises(MalformedMessageError, match="it must be"):
        codec.decode(BAD[name])


def test_the_changes_that_the_bad_ones_vary_are_accepted() -> None:
    for good in (changed(gone=["b" * 52]), changed(changed=[member(1)]), mended()):
        codec.decode(good)


def test_an_opening_of_ten_thousand_members_fits_into_a_message() -> None:
    digits = [base32[i % 32] + base32[i // 32 % 32] + base32[i // 1024] for i in range(10_000)]
    members = [
        Member(
            node_id=NodeId(digits[i] + "a" * 49),
            address="192.168.100.100:17700",
            role=Role.RELAY if i else Role.DATA,
            stage_index=1 + i % 8 if i else 0,
            capacity=4,
            data_node_index=-1 if i else 0,
            since_iteration=2**20,
            name="brave-otter",
        )
        for i in range(10_000)
    ]
    view = View.of(members, version=9, leader=members[0].node_id, term=1, num_stages=9)
    message = committed(Iteration(1, 1), Opening(Iteration(2, 1), Iteration(1, 1), view), 1.0, 1)
    envelope = codec.encode(RUN, SENDER, 1, 1, message)
    assert envelope.ByteSize() < 4 * 2**20
    assert codec.decode(envelope).message == message
