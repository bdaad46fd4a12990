"""What a coordinator decides: who takes part, when a round closes, and without whom it goes on."""

from dataclasses import replace

import pytest

from decod.ids import NodeId
from decod.protocol.collaboration.coordinator import Coordinator, CoordinatorState
from decod.protocol.collaboration.loading import Past
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Roll,
    RoundClosed,
    RoundReady,
    Standing,
)
from tests.unit.protocol.collaboration.rounds_cast import (
    CONFIG,
    START,
    A,
    B,
    C,
    D,
    averaging,
    events_of,
    height,
    progress,
    sent,
)

CLOSE, BEGIN = averaging(1, 1), averaging(1, 2)


class Lead:
    """A coordinator with some peers that are level."""

    def __init__(self, *others: NodeId) -> None:
        self.past = Past(START)
        self.now_s = 0.0
        self.machine = Coordinator(A, "a:1", 1, self.past, CONFIG, 0.0)
        for node in others:
            self.machine.admit(0.0, node, f"{node}:1", START)

    def progress(self, node: NodeId, num: int, **fields: object) -> list[Effect]:
        return self.machine.progressed(
            self.now_s, node, progress(num, version=self.machine.version, **fields)
        )

    def fill(self, *nodes: NodeId) -> list[Effect]:
        """Have these peers say that they have enough together."""
        return [e for node in nodes for e in self.progress(node, -(-32 // len(nodes)))]

    def close(self, node: NodeId, num: int, at_s: float | None = None) -> list[Effect]:
        if at_s is not None:
            self.now_s = at_s
        return self.machine.closed(self.now_s, node, RoundClosed(CLOSE, num, num))

    def ready(self, node: NodeId, found: str = "hash", **fields: object) -> list[Effect]:
        attempt = self.machine._attempt
        assert attempt is not None
        message = RoundReady(attempt.averaging, found, **fields)
        return self.machine.ready(self.now_s, node, message)

    def begin(self, *nodes: NodeId) -> BeginRound:
        """Have all contribute; return what the peers get."""
        self.fill(*nodes)
        effects = [e for node in nodes for e in self.close(node, 16)]
        return begun(effects)

    def wait(self, at_s: float) -> list[Effect]:
        """Let time pass, without a word from anybody."""
        found: list[Effect] = []
        while self.machine.deadline_s <= at_s:
            self.now_s = max(self.now_s, self.machine.deadline_s)
            found += self.machine.overdue(self.now_s)
        self.now_s = at_s
        return found


def begun(effects: list[Effect]) -> BeginRound:
    (*_, message) = [m for m in sent(effects) if isinstance(m, BeginRound)]
    return message


# --- closing --------------------------------------------------------------------------------------


def test_a_round_closes_once_there_are_enough_samples() -> None:
    lead = Lead(B)
    assert CloseRound(CLOSE) not in sent(lead.progress(A, 16))
    effects = lead.progress(B, 16)
    assert sent(effects, A) == sent(effects, B) == [CloseRound(CLOSE)]
    assert lead.machine.state is CoordinatorState.CLOSING


def test_samples_of_a_peer_that_is_not_level_are_not_counted() -> None:
    lead = Lead()
    lead.machine.admit(0.0, B, "b:1", height(7))
    lead.progress(B, 100, at=height(7))
    assert lead.machine.num_samples == 0
    effects = lead.progress(A, 32)
    assert sent(effects, A) == [CloseRound(CLOSE)]
    assert CloseRound(CLOSE) not in sent(effects, B)


def test_a_lone_peer_closes_nothing() -> None:
    lead = Lead()
    assert lead.progress(A, 1000) == []
    assert lead.machine.state is CoordinatorState.GATHERING


def test_nothing_closes_while_the_coordinators_own_loop_steps_alone() -> None:
    """Others have come in the same instant. The step makes another state than they have."""
    lead = Lead(B)
    lead.machine.rests = True
    assert sent(lead.fill(A, B), A) == []
    lead.machine.rests = False
    assert sent(lead.progress(A, 16), A) == [CloseRound(CLOSE)]


def test_all_who_have_given_something_average_and_the_others_listen() -> None:
    lead = Lead(B, C)
    lead.machine.admit(0.0, D, "d:1", height(7))
    lead.fill(A, B, C)
    assert lead.close(A, 16) == lead.close(B, 8) == []
    message = begun(lead.close(C, 0))
    assert (message.roster, message.weights) == ((A, B), (16, 8))
    assert (message.listeners, message.height) == ((C, D), START)
    assert message.averaging == BEGIN


def test_the_round_waits_for_the_slow_as_long_as_the_faster_half_has_taken() -> None:
    lead = Lead(B, C, D)
    lead.fill(A, B, C, D)
    lead.close(A, 8, at_s=0.0)
    lead.close(B, 8, at_s=0.02)
    assert [m for m in sent(lead.wait(0.25)) if isinstance(m, BeginRound)] == []
    message = begun(lead.wait(0.3))
    assert (message.roster, message.listeners) == ((A, B), (C, D))


def test_who_was_too_late_is_waited_for_the_next_time() -> None:
    lead = Lead(B, C, D)
    lead.fill(A, B, C, D)
    for node in (A, B, C):
        lead.close(node, 8, at_s=0.02)
    begun(lead.wait(0.3))
    lead.close(D, 8, at_s=0.9)
    for node in (A, B, C):
        lead.ready(node)
    lead.past.advance(height(1), 32)
    lead.machine.advanced(START)
    for node in (A, B, C, D):
        lead.progress(node, 8, at=height(1))
    close = averaging(2, 1)
    for node in (A, B, C):
        lead.machine.closed(lead.now_s, node, RoundClosed(close, 8, 8))
    lead.progress(D, 8, at=height(1))
    assert [m for m in sent(lead.wait(1.6)) if isinstance(m, BeginRound)] == []
    effects = lead.machine.closed(lead.now_s, D, RoundClosed(close, 8, 8))
    assert begun(effects).roster == (A, B, C, D)


def test_an_answer_to_another_question_closes_nothing() -> None:
    lead = Lead(B)
    lead.fill(A, B)
    other = RoundClosed(averaging(1, 1, term=2), 16, 16)
    assert lead.machine.closed(0.0, A, other) == []
    assert lead.close(B, 16) == []
    assert lead.close(D, 16) == [], "a stranger"
    assert begun(lead.close(A, 16)).weights == (16, 16)


def test_a_round_without_contributions_comes_to_nothing_and_the_next_one_can_close() -> None:
    lead = Lead(B)
    lead.fill(A, B)
    lead.close(A, 0)
    assert events_of(lead.close(B, 0)) == ["round.abandoned"]
    assert (lead.machine.state, lead.machine.num_samples) == (CoordinatorState.GATHERING, 0)
    assert CloseRound(averaging(1, 3)) not in sent(lead.progress(A, 0))
    assert sent(lead.fill(A, B), B) == [CloseRound(averaging(1, 2))]


# --- averaging ------------------------------------------------------------------------------------


def test_an_average_counts_once_all_who_contribute_have_the_same() -> None:
    lead = Lead(B)
    lead.machine.admit(0.0, C, "c:1", height(7))
    lead.begin(A, B)
    assert lead.ready(A) == []
    effects = lead.ready(B)
    assert sent(effects, C) == sent(effects, B) == [CommitRound(BEGIN, "hash")]
    assert lead.machine.state is CoordinatorState.GATHERING


def test_a_word_on_another_attempt_or_from_a_listener_counts_for_nothing() -> None:
    lead = Lead(B)
    lead.machine.admit(0.0, C, "c:1", height(7))
    lead.begin(A, B)
    stale = RoundReady(averaging(1, 2, term=7), "hash")
    assert lead.machine.ready(0.0, A, stale) == []
    assert lead.ready(C) == []
    assert lead.ready(A) == []
    assert sent(lead.ready(B), A) == [CommitRound(BEGIN, "hash")]


def test_who_has_another_average_than_most_is_left_out() -> None:
    lead = Lead(B, C)
    lead.begin(A, B, C)
    lead.ready(A)
    lead.ready(B, "other")
    message = begun(lead.ready(C))
    assert (message.roster, message.listeners) == ((A, C), (B,))


def test_the_others_average_again_without_a_lost_peer() -> None:
    """With what they have contributed already."""
    lead = Lead(B, C)
    lead.begin(A, B, C)
    lead.ready(A)
    effects = lead.machine.remove(lead.now_s, B, "it can't be reached")
    assert events_of(effects) == ["peer.lost", "round.repeated"]
    message = begun(effects)
    assert (message.roster, message.weights) == ((A, C), (16, 16))
    assert message.averaging == averaging(1, 3)
    assert lead.machine.ready(lead.now_s, A, RoundReady(BEGIN, "hash")) == [], (
        "of the attempt before"
    )


def test_a_peer_that_is_lost_while_the_round_closes_is_not_waited_for() -> None:
    lead = Lead(B, C)
    lead.fill(A, B, C)
    lead.close(A, 16)
    lead.close(B, 16)
    assert begun(lead.machine.remove(lead.now_s, C, "it has left")).roster == (A, B)


def test_a_silent_peer_is_doubted_before_it_counts_as_lost() -> None:
    lead = Lead(B, C)
    lead.begin(A, B, C)
    lead.ready(A)
    lead.ready(C)
    patience_s = 4 * CONFIG.heartbeat_busy_s
    assert not [m for m in sent(lead.wait(patience_s - 0.01)) if isinstance(m, BeginRound)]
    message = begun(lead.wait(patience_s + 0.01))
    assert (message.roster, message.listeners) == ((A, C), (B,))
    assert B in lead.machine, "it may live"


def test_a_peer_whose_words_come_late_is_given_more_time() -> None:
    lead = Lead(B, C)
    lead.begin(A, B, C)
    lead.now_s = 0.6
    lead.progress(B, 16)  # 0.4 s later than it was due.
    lead.ready(A)
    lead.ready(C)
    assert not [m for m in sent(lead.wait(0.6 + 1.55)) if isinstance(m, BeginRound)]
    assert begun(lead.wait(0.6 + 1.65)).roster == (A, C)


@pytest.mark.parametrize("lives", [True, False])
def test_who_accuses_one_living_peer_after_another_is_left_out_itself(*, lives: bool) -> None:
    lead = Lead(B, C, D)
    lead.begin(A, B, C, D)
    message = begun(lead.ready(D, "", failure="a peer can't be reached", lost=(B,)))
    assert message.roster == (A, C, D)
    lead.now_s = 0.5
    if lives:
        lead.progress(B, 16)
    message = begun(lead.ready(D, "", failure="a peer can't be reached", lost=(C,)))
    assert message.roster == ((A, C) if lives else (A, D))


def test_who_fails_without_a_culprit_is_left_out() -> None:
    lead = Lead(B, C)
    lead.begin(A, B, C)
    assert begun(lead.ready(B, "", failure="its device has refused")).roster == (A, C)


def test_an_average_that_takes_too_long_goes_on_without_whom_most_wait_for() -> None:
    lead = Lead(B, C)
    lead.begin(A, B, C)
    limit_s = CONFIG.averaging_timeout_s
    second = 0.0
    while second < limit_s - 1:
        second += 0.5
        lead.wait(second)
        for node, awaited in ((A, (C,)), (B, (C,)), (C, (A,))):
            message = progress(16, version=lead.machine.version)
            object.__setattr__(message, "awaited", awaited)
            lead.machine.progressed(lead.now_s, node, message)
    lead.wait(limit_s - 0.5)
    for node in (A, B, C):
        lead.machine._peers[node].heard_s = lead.now_s
    message = begun(lead.wait(limit_s + 0.01))
    assert message.roster == (A, B)


def test_a_beginning_that_was_lost_is_said_again_while_it_counts() -> None:
    lead = Lead(B)
    message = lead.begin(A, B)
    assert sent(lead.machine.say_again(B, message), B) == [message]
    assert lead.machine.say_again(D, message) == []
    lead.ready(A)
    lead.ready(B)
    assert lead.machine.say_again(B, message) == []


def test_an_attempt_at_a_round_that_is_over_ends() -> None:
    """The last coordinator's average counts, as a peer says."""
    lead = Lead(B)
    lead.fill(A, B)
    assert lead.machine.state is CoordinatorState.CLOSING
    lead.past.advance(height(1), 32)
    lead.machine.advanced(START)
    assert lead.machine.state is CoordinatorState.GATHERING


# --- who is there -------------------------------------------------------------------------------


def test_a_silent_peer_is_lost() -> None:
    lead = Lead(B, C)
    lead.now_s = 3.0
    lead.progress(C, 0)
    effects = lead.wait(CONFIG.silence_max_s + 0.1)
    assert events_of(effects) == ["peer.lost"]
    assert lead.machine.peers == (A, C)


@pytest.mark.parametrize("heard_s", [0.030016, 0.1, 0.7, 1.3, 123.456789])
def test_a_deadline_that_passed_is_not_due_again(heard_s: float) -> None:
    """Sums and differences of seconds may differ in the last bit."""
    lead = Lead(B)
    lead.now_s = heard_s
    lead.progress(B, 0)
    due_s = heard_s + CONFIG.silence_max_s
    lead.machine.overdue(due_s)
    assert lead.machine.deadline_s > due_s
    assert B not in lead.machine


def test_a_peer_is_level_with_the_state_before_until_it_has_the_present_one() -> None:
    lead = Lead(B)
    lead.past.advance(height(1), 32)
    lead.machine.advanced(START)
    assert [m for m in sent(lead.progress(B, 8)) if isinstance(m, Roll)] == []
    assert lead.machine.num_samples == 8
    lead.past.advance(height(2), 32)
    lead.machine.advanced(height(1))
    (message, *_) = [m for m in sent(lead.progress(B, 8), B) if isinstance(m, Roll)]
    assert [each.level for each in message.peers] == [True, False]
    assert lead.machine.num_samples == 0


def test_who_has_an_old_roll_gets_the_present_one() -> None:
    lead = Lead(B)
    message = progress(0, version=lead.machine.version - 1)
    assert sent(lead.machine.progressed(0.0, B, message), B) == [lead.machine.roll()]


def test_all_are_told_how_far_the_round_is() -> None:
    lead = Lead(B)
    lead.progress(B, 8)
    (message, *_) = [m for m in sent(lead.wait(0.1), B) if isinstance(m, Standing)]
    assert (message.num_samples, message.samples_per_s, message.averaging) == (8, 8.0, False)
    assert sent(lead.machine.say_standing(1.0), A) == [], "it knows itself"


# --- a coordinator that only listens --------------------------------------------------------------


def listening() -> tuple[Lead, BeginRound]:
    """Return a coordinator that has given nothing to an average of B and C."""
    lead = Lead(B, C)
    lead.fill(A, B, C)
    effects = [*lead.close(A, 0), *lead.close(B, 16), *lead.close(C, 16)]
    message = begun(effects)
    assert (message.roster, message.listeners) == ((B, C), (A,))
    return lead, message


def test_an_average_counts_once_a_coordinator_that_listens_has_it_too() -> None:
    """Otherwise it would begin the next round from a state that is over, with an id that was."""
    lead, message = listening()
    assert sent([*lead.ready(B), *lead.ready(C)]) == []
    assert not sent(lead.progress(B, 64), B), "no other round begins meanwhile"
    assert sent(lead.ready(A), B) == [CommitRound(message.averaging, "hash")]


def test_a_coordinator_that_listens_in_vain_has_the_others_average_again() -> None:
    lead, message = listening()
    lead.ready(B)
    again = begun(lead.ready(A, "", failure="it is damaged"))
    assert (again.roster, again.weights) == (message.roster, message.weights)
    assert again.averaging != message.averaging


def test_who_keeps_a_listening_coordinator_waiting_is_left_out_in_the_end() -> None:
    lead, _ = listening()
    lead.ready(B)
    lead.ready(C)
    waits = replace(progress(0, version=lead.machine.version), awaited=(C,))
    lead.machine.progressed(0.0, A, waits)
    lead.machine._peers[B].heard_s = lead.machine._peers[C].heard_s = CONFIG.averaging_timeout_s
    lead.now_s = CONFIG.averaging_timeout_s
    assert begun(lead.machine.overdue(lead.now_s)).roster == (B,)
