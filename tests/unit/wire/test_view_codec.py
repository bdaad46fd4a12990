"""A change of the view is read as it was written, and one that makes no sense is refused."""

from typing import Any

import pytest

from decod.errors import MalformedMessageError
from decod.wire import codec
from decod.wire.v1 import control_pb2 as pb
from tests.unit.wire.test_codec import envelope, member


def changed(*, view: pb.View | None = None, **changes: Any) -> pb.Envelope:
    """An opening that changes a view."""
    fields: dict[str, Any] = {"base": "0" * 64, "result": "1" * 64}
    outline = view or pb.View(leader="a" * 52, num_stages=1)
    told = pb.Opening(iteration=pb.Iteration(), committed=pb.Iteration(), view=outline)
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
