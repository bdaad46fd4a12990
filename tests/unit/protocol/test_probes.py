"""The leader's questions to suspects."""

from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import Ping
from decod.protocol.leadership.suspicions import Probes
from tests.unit.protocol.cast import D1, R1A, R1B, R1C


def test_a_suspect_is_asked_again_while_it_has_time() -> None:
    """Either the question or its answer may have been lost."""
    probes = Probes(3.0)
    assert probes.ask(10.0, R1A, "no heartbeat") == [Send(R1A, Ping(1))]
    assert probes.ask(10.5, R1A, "refused") == [], "it has been asked"
    assert probes.deadline_s == 11.0
    assert probes.overdue(10.9) == []
    assert probes.overdue(11.0) == [Send(R1A, Ping(1))]
    assert probes.overdue(12.0) == [Send(R1A, Ping(1))]
    assert probes.deadline_s == 13.0
    assert probes.silent(12.9) == {}
    assert probes.overdue(13.0) == []
    assert probes.silent(13.0) == {R1A: "no heartbeat"}


def test_an_answer_ends_it_and_only_the_right_one() -> None:
    probes = Probes(3.0)
    probes.ask(0.0, R1A, "x")
    probes.ask(0.0, R1B, "x")
    probes.answered(R1A, 2)
    assert R1A in probes
    probes.answered(R1A, 1)
    probes.answered(R1A, 1)
    assert R1A not in probes
    assert probes.silent(9.0) == {R1B: "x"}
    probes.forget(R1B)
    assert probes.deadline_s is None


def test_others_ask_too_if_the_leader_can_not_reach_a_suspect() -> None:
    """A process that is dead is found at once all the same: all three are refused."""
    around = [Send(R1C, Ping(1)), Send(D1, Ping(1))]
    probes = Probes(3.0, lambda node, ping: list[Effect](around))
    probes.ask(0.0, R1A, "x")
    assert probes.undelivered(R1A, last=False) == around
    assert probes.undelivered(R1A, last=False) == [], "the other may still reach it"
    assert probes.undelivered(R1A, last=False) is None


def test_a_suspect_that_is_silent_is_asked_by_others_too() -> None:
    around = [Send(R1C, Ping(1)), Send(D1, Ping(1))]
    probes = Probes(3.0, lambda node, ping: list[Effect](around))
    probes.ask(0.0, R1A, "x")
    assert probes.overdue(1.0) == [Send(R1A, Ping(1)), *around]
    assert probes.undelivered(R1A, last=False) == around
    assert probes.undelivered(R1A, last=False) == []


def test_a_suspect_that_was_irregular_before_has_more_time() -> None:
    probes = Probes(3.0)
    probes.ask(0.0, R1A, "x", 2.0)
    assert probes.silent(5.9) == {}
    assert probes.silent(6.0) == {R1A: "x"}


def test_the_last_of_a_stage_is_asked_more_often() -> None:
    for last, tries in ((False, 2), (True, 6)):
        probes = Probes(3.0)
        probes.ask(0.0, R1A, "x")
        for _ in range(tries - 1):
            assert probes.undelivered(R1A, last=last) == [Send(R1A, Ping(1))]
        assert probes.undelivered(R1A, last=last) is None
