"""Messages that could not be delivered."""

import pytest

from decod.ids import AveragingId, Iteration
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Send, SendTensor
from decod.protocol.core.events import SendFailed
from decod.protocol.core.messages import (
    CanTake,
    Heartbeat,
    Join,
    Leave,
    Message,
    Ping,
    Ready,
    ReducedPart,
    Withdraw,
)
from decod.protocol.core.messages.scopes import Passed
from decod.protocol.core.view import Opening, Role
from decod.protocol.links.forwarding import Outbox
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    MANIFEST,
    R1A,
    committed,
    context_of,
    freed,
    repeated,
    tensor,
    view_of,
)

VIEW = view_of("d0", "r1a", version=3)
EARLIER = Iteration(1, 0)


@pytest.fixture
def context() -> Context:
    return context_of(R1A, VIEW)


@pytest.mark.parametrize(
    "message",
    [
        CanTake(ITERATION),
        Withdraw(3, 7),
        Leave("drained"),
        Passed(7, arrived=False),
        Ready(AveragingId(ITERATION, 3), ()),
        repeated(EARLIER, Opening(ITERATION, Iteration(0, 0), VIEW), "lost a node"),
        committed(EARLIER, Opening(ITERATION, EARLIER, VIEW), 1.0, 1),
    ],
)
def test_what_still_matters_is_tried_again_after_a_pause(
    context: Context, message: Message
) -> None:
    outbox = Outbox(context)
    assert outbox.deadline_s is None
    assert outbox.undelivered(5.0, SendFailed(D0, message, "refused")) == []
    assert outbox.deadline_s == 6.0
    assert outbox.overdue(5.9) == []
    assert outbox.overdue(6.0) == [Send(D0, message)]
    assert outbox.deadline_s is None


@pytest.mark.parametrize(
    "message",
    [
        CanTake(EARLIER),
        Withdraw(2, 7),
        Heartbeat(ITERATION),
        Ping(1),
        Join("a:1", Role.RELAY, 1, None, MANIFEST, incarnation=1),
        repeated(EARLIER, Opening(EARLIER, Iteration(0, 0), VIEW), "lost a node"),
    ],
)
def test_what_no_longer_matters_is_dropped(context: Context, message: Message) -> None:
    """A candidate's offer is repeated by who makes it; a ping by the leader."""
    outbox = Outbox(context)
    assert outbox.undelivered(5.0, SendFailed(D0, message, "refused")) == []
    assert outbox.deadline_s is None


def test_a_tensor_waits_with_its_message_and_is_freed_with_it(context: Context) -> None:
    outbox = Outbox(context)
    context.tensors.add(tensor(1))
    context.tensors.add(tensor(2))
    current, stale = (
        ReducedPart(AveragingId(ITERATION, 1), 0),
        ReducedPart(AveragingId(EARLIER, 1), 0),
    )
    assert outbox.undelivered(0.0, SendFailed(D0, current, "reset", tensor(1).id)) == []
    effects = outbox.undelivered(0.0, SendFailed(D0, stale, "reset", tensor(2).id))
    assert freed(effects) == [2]
    assert outbox.overdue(1.0) == [SendTensor(D0, current, tensor(1).id)]


def test_a_message_that_went_stale_while_it_waited_is_dropped(context: Context) -> None:
    outbox = Outbox(context)
    context.tensors.add(tensor(1))
    outbox.undelivered(0.0, SendFailed(D0, CanTake(ITERATION), "reset"))
    outbox.undelivered(
        0.5, SendFailed(D0, ReducedPart(AveragingId(ITERATION, 1), 0), "reset", tensor(1).id)
    )
    context.iteration = Iteration(1, 2)
    assert outbox.overdue(1.0) == []
    assert outbox.deadline_s == 1.5
    assert freed(outbox.overdue(1.5)) == [1]
