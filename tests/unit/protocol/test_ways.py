"""Broken links: what goes another way, by way of whom, and what becomes of it."""

from dataclasses import replace

from decod.ids import AveragingId, NodeId, TensorId
from decod.protocol.core.effects import Effect, FreeTensor, Send, SendTensor
from decod.protocol.core.events import Fault, Received, SendFailed
from decod.protocol.core.messages.averaging_messages import ReducedPart
from decod.protocol.core.messages.microbatch_messages import CanTake
from decod.protocol.core.messages.scopes import Message, Passed, Way
from decod.protocol.core.view import Reach, View
from decod.protocol.links.forwarding import _OPEN_MAX, Forwarding
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1C,
    R2A,
    STRANGER,
    context_of,
    member,
    tensor,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b", "r1c", "r2a")
WORD = CanTake(ITERATION)
PART = ReducedPart(AveragingId(ITERATION, 1), 0)


class Node:
    """r1a, and how its messages get to the others."""

    def __init__(self, view: View = VIEW, node_id: NodeId = R1A) -> None:
        self.context = context_of(node_id, view)
        self.forwarding = Forwarding(self.context)

    def say(self, to: NodeId, message: Message = WORD) -> Send:
        sending = self.forwarding.routed(Send(to, message))
        assert isinstance(sending, Send)
        return sending

    def give(self, to: NodeId, number: int, message: Message = PART) -> SendTensor:
        """Send a new tensor."""
        self.context.tensors.add(tensor(number))
        return self.pass_tensor(SendTensor(to, message, TensorId(number)))

    def pass_tensor(self, sending: Effect) -> SendTensor:
        assert isinstance(sending, SendTensor)
        routed = self.forwarding.routed(sending)
        assert isinstance(routed, SendTensor)
        return routed

    def fail(
        self, sending: Send | SendTensor, fault: Fault = Fault.LINK, now_s: float = 0.0
    ) -> SendFailed | None:
        number = sending.tensor if isinstance(sending, SendTensor) else None
        failed = SendFailed(
            sending.to, sending.message, "why", number, way=sending.way, fault=fault
        )
        return self.forwarding.undelivered(now_s, failed)

    def lose(self, node: NodeId) -> list[Effect]:
        """It does not answer."""
        self.forwarding.broken(0.0, node)
        return self.context.out.taken()


# --- what goes another way --------------------------------------------------------------------


def test_where_there_is_nobody_else_messages_are_tried_directly() -> None:
    node = Node(view_of("d0", "r1a"))
    assert node.lose(D0) == []
    assert node.say(D0) == Send(D0, WORD)


def test_of_very_many_messages_on_their_way_the_first_is_given_up_with_its_tensor() -> None:
    node = Node()
    node.lose(D0)
    for number in range(1, _OPEN_MAX + 1):
        node.give(D0, number)
        node.context.tensors.release(TensorId(number))  # Only the link waits for it.
    assert node.context.out.taken() == []
    node.give(D0, _OPEN_MAX + 1)
    assert node.context.out.taken() == [FreeTensor(TensorId(1))]


# --- passing on -------------------------------------------------------------------------------


def test_what_is_for_somebody_who_is_no_member_is_refused() -> None:
    node, way = Node(node_id=R1C), Way(R1A, STRANGER, 1, 3)
    node.forwarding.pass_on(Received(R1A, PART, tensor(1), 1, way))
    assert node.context.out.taken() == [
        FreeTensor(TensorId(1)),
        Send(R1A, Passed(3, arrived=False)),
    ]


# --- links ------------------------------------------------------------------------------------


def test_members_that_nobody_can_dial_pass_on_only_if_nobody_else_can() -> None:
    """Their own links may pass through another host already."""
    hidden = [replace(member(name), reach=Reach.OUTBOUND) for name in ("r1c", "r1b")]
    node = Node(view_of("d0", "r1a", *hidden, "r2a"))
    node.forwarding.broken(0.0, hidden[0].node_id)
    assert node.say(hidden[0].node_id).to in (D0, R2A)
