"""What a coordinator decides: who takes part, when a round closes, and without whom it goes on."""

from dataclasses import replace

from decod.ids import NodeId
from decod.protocol.collaboration.coordinator import Coordinator, CoordinatorState
from decod.protocol.collaboration.loading import Past
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Height,
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
    averaging,
    entry,
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
        self.out = EffectSink[Effect]()
        self.machine = Coordinator(entry(A), 1, self.past, CONFIG, self.out, 0.0)
        for node in others:
            self.admit(node)

    def admit(self, node: NodeId, at: Height = START) -> list[Effect]:
        self.machine.admit(0.0, node, f"{node}:1", at, f"name-{node}")
        return self.out.taken()

    def progress(self, node: NodeId, num: int, **fields: object) -> list[Effect]:
        message = progress(num, version=self.machine.version, **fields)
        self.machine.progressed(self.now_s, node, message)
        return self.out.taken()

    def fill(self, *nodes: NodeId) -> list[Effect]:
        """Have these peers say that they have enough together."""
        return [e for node in nodes for e in self.progress(node, -(-32 // len(nodes)))]

    def close(self, node: NodeId, num: int, at_s: float | None = None) -> list[Effect]:
        if at_s is not None:
            self.now_s = at_s
        self.machine.closed(self.now_s, node, RoundClosed(CLOSE, num, num))
        return self.out.taken()

    def ready(self, node: NodeId, found: str = "hash", **fields: object) -> list[Effect]:
        attempt = self.machine._attempt
        assert attempt is not None
        message = RoundReady(attempt.averaging, found, **fields)
        self.machine.ready(self.now_s, node, message)
        return self.out.taken()

    def begin(self, *nodes: NodeId) -> BeginRound:
        """Have all contribute; return what the peers get."""
        self.fill(*nodes)
        effects = [e for node in nodes for e in self.close(node, 16)]
        return begun(effects)

    def wait(self, at_s: float) -> list[Effect]:
        """Let time pass, without a word from anybody."""
        while self.machine.deadline_s <= at_s:
            self.now_s = max(self.now_s, self.machine.deadline_s)
            self.machine.overdue(self.now_s)
        self.now_s = at_s
        return self.out.taken()


def begun(effects: list[Effect]) -> BeginRound:
    (*_, message) = [m for m in sent(effects) if isinstance(m, BeginRound)]
    return message


def test_a_peer_is_told_the_names_of_all() -> None:
    lead = Lead(B)
    assert [one.name for one in lead.machine.roll().peers] == ["", f"name-{B}"]


# --- closing --------------------------------------------------------------------------------------


def test_a_round_without_contributions_comes_to_nothing_and_the_next_one_can_close() -> None:
    lead = Lead(B)
    lead.fill(A, B)
    lead.close(A, 0)
    assert events_of(lead.close(B, 0)) == ["round.abandoned"]
    assert (lead.machine.state, lead.machine.num_samples) == (CoordinatorState.GATHERING, 0)
    assert CloseRound(averaging(1, 3)) not in sent(lead.progress(A, 0))
    assert sent(lead.fill(A, B), B) == [CloseRound(averaging(1, 2))]


# --- averaging ------------------------------------------------------------------------------------


def test_a_word_on_another_attempt_or_from_a_listener_counts_for_nothing() -> None:
    lead = Lead(B)
    lead.admit(C, height(7))
    lead.begin(A, B)
    stale = RoundReady(averaging(1, 2, term=7), "hash")
    lead.machine.ready(0.0, A, stale)
    assert lead.out.taken() == []
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


def test_who_fails_without_a_culprit_is_left_out() -> None:
    lead = Lead(B, C)
    lead.begin(A, B, C)
    assert begun(lead.ready(B, "", failure="its device has refused")).roster == (A, C)


def test_an_attempt_at_a_round_that_is_over_ends() -> None:
    """The last coordinator's average counts, as a peer says."""
    lead = Lead(B)
    lead.fill(A, B)
    assert lead.machine.state is CoordinatorState.CLOSING
    lead.past.advance(height(1), 32)
    lead.machine.advanced(START)
    assert lead.machine.state is CoordinatorState.GATHERING


# --- who is there -------------------------------------------------------------------------------


def test_all_are_told_how_far_the_round_is() -> None:
    lead = Lead(B)
    lead.progress(B, 8)
    (message, *_) = [m for m in sent(lead.wait(0.1), B) if isinstance(m, Standing)]
    assert (message.num_samples, message.samples_per_s, message.averaging) == (8, 8.0, False)
    lead.machine.say_standing(1.0)
    assert sent(lead.out.taken(), A) == [], "it knows itself"


# --- a coordinator that only listens --------------------------------------------------------------


def listening() -> tuple[Lead, BeginRound]:
    """Return a coordinator that has given nothing to an average of B and C."""
    lead = Lead(B, C)
    lead.fill(A, B, C)
    effects = [*lead.close(A, 0), *lead.close(B, 16), *lead.close(C, 16)]
    message = begun(effects)
    assert (message.roster, message.listeners) == ((B, C), (A,))
    return lead, message


def test_who_keeps_a_listening_coordinator_waiting_is_left_out_in_the_end() -> None:
    lead, _ = listening()
    lead.ready(B)
    lead.ready(C)
    waits = replace(progress(0, version=lead.machine.version), awaited=(C,))
    lead.machine.progressed(0.0, A, waits)
    lead.out.taken()
    lead.machine._peers[B].heard_s = lead.machine._peers[C].heard_s = CONFIG.averaging_timeout_s
    lead.now_s = CONFIG.averaging_timeout_s
    lead.machine.overdue(lead.now_s)
    assert begun(lead.out.taken()).roster == (B,)
