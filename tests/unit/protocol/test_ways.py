"""Broken links: what goes another way, by way of whom, and what becomes of it."""

from dataclasses import replace

from decod.ids import AveragingId, NodeId, TensorId
from decod.protocol.core.effects import Effect, FreeTensor, ProbeLink, Send, SendTensor
from decod.protocol.core.events import Fault, LinkMeasured, Received, SendFailed, TensorSent
from decod.protocol.core.messages import (
    CanTake,
    Heartbeat,
    Message,
    Ping,
    ReducedPart,
)
from decod.protocol.core.messages.scopes import Passed, Way
from decod.protocol.core.view import Reach, View
from decod.protocol.links.forwarding import Forwarding
from tests.unit.protocol.cast import (
    D0,
    ITERATION,
    R1A,
    R1B,
    R1C,
    R2A,
    STRANGER,
    context_of,
    member,
    notes_of,
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
    ) -> tuple[list[Effect], SendFailed | None]:
        number = sending.tensor if isinstance(sending, SendTensor) else None
        failed = SendFailed(
            sending.to, sending.message, "why", number, way=sending.way, fault=fault
        )
        return self.forwarding.undelivered(now_s, failed)

    def lose(self, node: NodeId) -> list[Effect]:
        """It does not answer."""
        return self.forwarding.broken(0.0, node)

    def arrive(self, sending: SendTensor) -> list[Effect]:
        """A tensor has arrived where it was sent to."""
        effects = self.forwarding.sent(TensorSent(sending.to, sending.tensor, 8, 1.0))
        return effects + self.context.tensors.release(sending.tensor)


# --- what goes another way --------------------------------------------------------------------


def test_messages_go_directly_while_nothing_is_wrong() -> None:
    node = Node()
    assert node.say(R2A) == Send(R2A, WORD)
    sending = node.give(R2A, 1)
    assert sending == SendTensor(R2A, PART, TensorId(1))
    assert node.arrive(sending) == [FreeTensor(TensorId(1))]
    assert node.forwarding.deadline_s is None


def test_where_a_peer_does_not_answer_another_passes_messages_on() -> None:
    node = Node()
    effects, failed = node.fail(node.say(R1B))
    assert effects == []
    assert failed is not None
    assert (failed.to, failed.message) == (R1B, WORD), "and this one is tried again"
    assert node.say(R1B) == Send(R1B, WORD), "one failure is a mishap"
    assert notes_of(node.lose(R1B)) == ["link.broken"]
    assert node.lose(R1B) == [], "it is known"
    assert node.say(R1B) == Send(R1C, WORD, Way(R1A, R1B, 1, 1)), "of the same stage"
    assert node.say(R2A) == Send(R2A, WORD), "other links are as they were"
    assert node.context.links.cost_s(R1B) > 20, "flows should leave it"


def test_who_passes_on_is_of_the_goals_stage_first_then_of_the_senders() -> None:
    node = Node(view_of("d0", "r1a", "r1b", "r2a", "r2b"))
    node.lose(R2A)
    assert node.say(R2A).to == NodeId("r2b")
    alone = Node(view_of("d0", "r1a", "r1b", "r2a"))
    alone.lose(R2A)
    assert alone.say(R2A).to == R1B
    least = Node(view_of("d0", "r1a", "c2a", "r2a"))
    least.lose(R2A)
    assert least.say(R2A).to == D0
    least.lose(D0)
    assert least.say(R2A).to == NodeId("c2a"), "a client may be gone soon"


def test_where_there_is_nobody_else_messages_are_tried_directly() -> None:
    node = Node(view_of("d0", "r1a"))
    assert node.lose(D0) == []
    assert node.say(D0) == Send(D0, WORD)


def test_who_is_no_member_is_reached_directly_or_not_at_all() -> None:
    node = Node()
    node.lose(STRANGER)
    assert node.say(STRANGER) == Send(STRANGER, WORD)


def test_a_receiver_that_refuses_is_reached() -> None:
    node = Node()
    effects, failed = node.fail(node.give(R1B, 1), Fault.NONE)
    assert effects == []
    assert failed is not None
    assert node.give(R1B, 2).to == R1B


def test_a_link_on_which_two_tensors_in_a_row_fail_is_broken_for_tensors() -> None:
    node = Node()
    node.fail(node.give(R1B, 1))
    sending = node.give(R1B, 2)
    assert sending.to == R1B
    node.arrive(sending)
    node.fail(node.give(R1B, 3))
    sending = node.give(R1B, 4)
    assert sending.to == R1B, "not in a row"
    node.fail(sending)
    assert node.give(R1B, 5).to == R1C
    assert node.say(R1B) == Send(R1B, WORD)


def test_a_link_that_is_too_slow_for_tensors_still_carries_messages() -> None:
    node = Node()
    node.fail(node.give(R1B, 1), Fault.RATE)
    assert node.say(R1B) == Send(R1B, WORD)
    assert node.give(R1B, 2).to == R1C
    node.lose(R1B)
    assert node.say(R1B).to == R1C


def test_what_is_under_way_on_a_link_that_breaks_is_sent_another_way() -> None:
    node = Node()
    slow = node.give(R1B, 1)
    other = node.give(R2A, 2)
    assert node.forwarding.receivers == {R1B, R2A}
    _, again = node.forwarding.broken(0.0, R1B)
    routed = node.pass_tensor(again)
    assert (routed.to, routed.tensor) == (R1C, TensorId(1))
    # The first try fails late: that is nobody's business any more.
    effects, failed = node.fail(slow)
    assert failed is None
    assert effects == [], "the second still needs the tensor"
    assert node.arrive(routed) == []
    assert node.forwarding.passed(R1C, Passed(1, arrived=True)) == ([FreeTensor(TensorId(1))], None)
    assert node.arrive(other) == [FreeTensor(TensorId(2))]


# --- what becomes of it -----------------------------------------------------------------------


def test_a_tensor_is_kept_until_it_has_arrived_at_its_goal() -> None:
    node = Node()
    node.lose(R1B)
    sending = node.give(R1B, 1)
    assert node.arrive(sending) == [], "at who passes it on"
    assert node.forwarding.passed(D0, Passed(1, arrived=True)) == ([], None), "nobody asked d0"
    assert node.forwarding.passed(R1C, Passed(1, arrived=True)) == ([FreeTensor(TensorId(1))], None)
    assert node.forwarding.passed(R1C, Passed(1, arrived=True)) == ([], None), "said twice"


def test_what_one_can_not_pass_on_another_is_given() -> None:
    node = Node(view_of("d0", "r1a", "r1b", "r1c", "r2a"))
    node.lose(R1B)
    tried = []
    for ticket in (1, 2, 3):
        sending = node.give(R1B, ticket)
        tried.append(sending.to)
        node.arrive(sending)
        effects, failed = node.forwarding.passed(sending.to, Passed(ticket, arrived=False))
        assert effects == []
        assert failed is not None
        assert (failed.to, failed.tensor) == (R1B, TensorId(ticket))
    assert sorted(tried) == [D0, R1C, R2A]
    assert node.say(R1B) == Send(R1B, WORD), "nobody reaches it: directly, then"


def test_who_is_to_pass_on_and_can_not_be_reached_says_nothing_of_the_goal() -> None:
    node = Node()
    node.lose(R1B)
    sending = node.give(R1B, 1)
    effects, failed = node.fail(sending)
    assert failed is None
    again = node.pass_tensor(effects[-1])
    assert again.to not in (R1B, R1C), "another is tried"
    assert (again.tensor, again.way) == (TensorId(1), Way(R1A, R1B, 1, 2))


def test_what_a_lost_member_was_to_pass_on_is_sent_again() -> None:
    node = Node()
    node.lose(R1B)
    sending = node.give(R1B, 1)
    node.arrive(sending)
    node.say(R1B)
    node.say(R1B, Heartbeat(ITERATION))
    node.context.adopt(view_of("d0", "r1a", "r1b", "r2a", version=2))
    effects = node.forwarding.adopt()
    assert effects == [SendTensor(R1B, PART, TensorId(1)), Send(R1B, WORD)]
    assert node.pass_tensor(effects[0]).to in (D0, R2A)


def test_what_was_given_away_is_let_go_at_the_end_of_the_run() -> None:
    node = Node()
    node.lose(R1B)
    node.arrive(node.give(R1B, 1))
    assert node.forwarding.end() == [FreeTensor(TensorId(1))]
    assert node.forwarding.end() == []


def test_what_was_given_away_for_a_lost_goal_or_in_another_iteration_is_let_go() -> None:
    node = Node()
    node.lose(R1B)
    node.arrive(node.give(R1B, 1))
    node.arrive(node.give(R1B, 2))
    assert node.forwarding.opened() == [FreeTensor(TensorId(1)), FreeTensor(TensorId(2))]
    node.arrive(node.give(R1B, 3))
    node.context.adopt(view_of("d0", "r1a", "r1c", "r2a", version=2))
    assert node.forwarding.adopt() == [FreeTensor(TensorId(3))]
    assert len(node.context.tensors) == 0
    assert node.forwarding.deadline_s is None, "nor is its link of interest"


# --- passing on -------------------------------------------------------------------------------


def test_a_message_is_passed_on_as_it_is() -> None:
    node, way = Node(node_id=R1C), Way(R1A, R1B, 7, 3)
    assert node.forwarding.pass_on(Received(R1A, WORD, term=7, way=way)) == [Send(R1B, WORD, way)]


def test_a_tensor_is_passed_on_and_its_origin_told_what_became_of_it() -> None:
    node, way = Node(node_id=R1C), Way(R1A, R1B, 1, 3)
    (onward,) = node.forwarding.pass_on(Received(R1A, PART, tensor(1), 1, way))
    assert onward == SendTensor(R1B, PART, TensorId(1), way)
    told = node.arrive(node.pass_tensor(onward))
    assert told == [Send(R1A, Passed(3, arrived=True)), FreeTensor(TensorId(1))]
    (onward,) = node.forwarding.pass_on(Received(R1A, PART, tensor(2), 1, way))
    effects, failed = node.fail(node.pass_tensor(onward))
    assert failed is None, "it is another's message"
    assert effects[-2:] == [FreeTensor(TensorId(2)), Send(R1A, Passed(3, arrived=False))]


def test_what_is_for_somebody_who_is_no_member_is_refused() -> None:
    node, way = Node(node_id=R1C), Way(R1A, STRANGER, 1, 3)
    effects = node.forwarding.pass_on(Received(R1A, PART, tensor(1), 1, way))
    assert effects == [FreeTensor(TensorId(1)), Send(R1A, Passed(3, arrived=False))]


# --- links ------------------------------------------------------------------------------------


def test_a_broken_link_is_probed_ever_more_seldom_and_used_again_when_it_works() -> None:
    node = Node()
    node.lose(R1B)
    pauses_s, now_s = [], 0.0
    for _ in range(7):
        due_s = node.forwarding.deadline_s
        assert due_s is not None
        pauses_s.append(due_s - now_s)
        now_s = due_s
        (probe,) = node.forwarding.overdue(now_s)
        assert isinstance(probe, ProbeLink)
        assert probe.to == R1B
        assert node.forwarding.overdue(now_s) == [], "one at a time"
        node.forwarding.measured(now_s, LinkMeasured(R1B))
    assert pauses_s == [2, 4, 8, 16, 32, 60, 60]
    node.forwarding.measured(now_s, LinkMeasured(R1B, latency_s=0.1))
    assert node.say(R1B).to == R1C, "an empty message says nothing of tensors"
    effects = node.forwarding.measured(now_s, LinkMeasured(R1B, 0.1, 1e6))
    assert notes_of(effects) == ["link.restored"]
    assert node.say(R1B) == Send(R1B, WORD)
    assert node.context.links.cost_s(R1B) < 20


def test_a_suspect_is_asked_by_way_of_two_others() -> None:
    node = Node(node_id=D0)
    forwarding = node.forwarding.around(R1B, Ping(5))
    assert [(e.to, e.message) for e in forwarding if isinstance(e, Send)] == [
        (forwarding[0].to, Ping(5)),  # type: ignore[union-attr]
        (forwarding[1].to, Ping(5)),  # type: ignore[union-attr]
    ]
    assert {e.to for e in forwarding if isinstance(e, Send)} == {R1A, R1C}


def test_members_that_nobody_can_dial_pass_on_only_if_nobody_else_can() -> None:
    """Their own links may pass through another host already."""
    hidden = [replace(member(name), reach=Reach.OUTBOUND) for name in ("r1c", "r1b")]
    node = Node(view_of("d0", "r1a", *hidden, "r2a"))
    node.forwarding.broken(0.0, hidden[0].node_id)
    assert node.say(hidden[0].node_id).to in (D0, R2A)


def test_a_link_that_a_probe_has_found_whole_is_not_given_up_for_a_hint() -> None:
    """The peer can't use its own direction of the link, and says so in each question."""
    node = Node()
    assert notes_of(node.forwarding.hinted(0.0, R1B)) == ["link.broken"]
    node.forwarding.measured(5.0, LinkMeasured(R1B, latency_s=0.1, bandwidth_bytes_per_s=1e6))
    assert node.forwarding.hinted(10.0, R1B) == []
    assert notes_of(node.forwarding.hinted(66.0, R1B)) == ["link.broken"]
