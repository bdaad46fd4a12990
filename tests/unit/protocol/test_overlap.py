"""One member's part in an average that travels."""

from dataclasses import replace

import pytest

from decod.ids import Iteration, TensorId
from decod.protocol.averaging.overlap import Overlap
from decod.protocol.core.average_spec import WHOLE
from decod.protocol.core.context import Context
from decod.protocol.core.events import TensorSent
from tests.unit.protocol.cast import LOCALLY, R1A, context_of, member, reopen, settle, view_of

SYNC = replace(LOCALLY, overlap=True)


def relay(*, since: int) -> Context:
    """Return a relay amid a local phase, with all of its stage there since an iteration."""
    stage = [member(name, since_iteration=since) for name in ("r1a", "r1b")]
    context = context_of(R1A, view_of("d0", *stage), iteration=Iteration(6, 1))
    settle(context, sync=SYNC)
    reopen(context, committed=Iteration(4, 1), due=8, travelling=WHOLE)
    return context


@pytest.mark.parametrize("since", [0, 4])
def test_an_average_that_is_not_here_is_not_begun_under_its_name(since: int) -> None:
    """Whoever says that it is at all members, in votes that it has passed on, is mistaken."""
    context = relay(since=since)
    told, untold = Overlap(context, lambda: None), Overlap(context, lambda: None)
    untold.opened()
    reopen(context, travelled=((1, 5),))
    told.opened()
    assert told.awaited == untold.awaited
    assert told.settled == (since == 4), "newcomers alone have no average"
    assert told.travelled == 0
    assert told._key() == untold._key()


def test_what_travels_beside_passes_is_told_from_what_an_iteration_waits_for() -> None:
    overlap = Overlap(relay(since=0), lambda: None)
    overlap._outgoing[TensorId(7)] = (Iteration(4, 1), R1A)
    assert overlap.sent(TensorSent(R1A, TensorId(7), 8, 1.0))
    assert not overlap.sent(TensorSent(R1A, TensorId(7), 8, 1.0)), "it has arrived already"
    assert not overlap.sent(TensorSent(R1A, TensorId(8), 8, 1.0))
