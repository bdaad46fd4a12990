"""How the leader finds out who lies, from what auditors tell it."""

from dataclasses import replace
from random import Random

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.effects import Effect, Note, Send
from decod.protocol.core.messages.audit_messages import (
    Audit,
    AuditCase,
    AuditedWork,
    AuditResult,
    Finding,
    StandOut,
)
from decod.protocol.leadership.relay_audits import RelayAudits, Verdict
from decod.run.protocol_config import AuditConfig
from decod.run.run_config import RunConfig
from tests.unit.protocol.cast import D0, R1A, R1B, R1C, R2A, R2B, RUN, configured, notes_of, view_of

R1D = NodeId("r1d")
AVERAGING = AveragingId(Iteration(3, 1), 1)
ALWAYS = AuditConfig(share=1.0, share_in_probation=1.0)
PATIENT = configured(complete_timeout_s=10.0)


class Leader:
    """The leader's audits of one iteration, all of r1a's work."""

    def __init__(self, *stage: str, config: AuditConfig = ALWAYS) -> None:
        self.view = view_of("d0", *(stage or ("r1a", "r1b", "r1c", "r1d")), "r2a", "r2b")
        self.audits = RelayAudits(replace(RUN, audits=config, protocol=PATIENT), Random(3))
        self.begin()

    def begin(self, number: int = 3) -> None:
        self.audits.reset()
        averaging = AveragingId(Iteration(number, 1), 1)
        self.averaging = averaging
        self.cases = {
            each.relay: each for each in asked(self.audits.begin(0.0, self.view, averaging))
        }

    def tell(
        self, relay: NodeId, *findings: Finding, failure: str = "", sender: NodeId | None = None
    ) -> tuple[Verdict, list[Effect]]:
        """Let the auditors of a relay's latest opinion tell what they have found."""
        case = self.cases[relay]
        result = AuditResult(self.averaging, relay, case.opinion, 4, failure, findings)
        verdict, effects = self.audits.found(1.0, self.view, sender or case.auditors[0], result)
        self.cases.update((each.relay, each) for each in asked(effects))
        return verdict, effects

    def judge(self, *opinions: list[Finding]) -> tuple[Verdict, list[Effect]]:
        """Let r1a's auditors and judges tell one opinion after another; return the last answer."""
        self.clear_others()
        for findings in opinions[:-1]:
            assert R1A in self.audits._cases, "no further opinion was asked for"
            verdict, _ = self.tell(R1A, *findings)
            assert verdict == Verdict()
        verdict, effects = self.tell(R1A, *opinions[-1])
        assert R1A not in self.audits._cases
        return verdict, effects

    def clear_others(self) -> None:
        for relay in [*self.cases]:
            if relay != R1A:
                self.tell(relay)


def asked(effects: list[Effect]) -> list[AuditCase]:
    messages = [e.message for e in effects if isinstance(e, Send)]
    return [case for m in messages if isinstance(m, Audit) for case in m.cases]


def wrong(
    *of_suspects: tuple[NodeId, ...], work: AuditedWork = AuditedWork.CONTRIBUTION
) -> list[Finding]:
    """Return a finding for each group of suspects."""
    return [Finding(work, 1.0, suspects) for suspects in of_suspects]


RIGHT: list[Finding] = []
LIES = wrong((), work=AuditedWork.PASSES)
"""It is proven."""
SILENT = wrong((), work=AuditedWork.SILENCE)
GIFT = wrong((R2A,), work=AuditedWork.GIFT)
"""r2a has told the auditor something else than it has signed."""


def test_all_is_well() -> None:
    leader = Leader()
    assert leader.cases.keys() == {R1A, R1B, R1C, R1D, R2A, R2B}
    for relay in [*leader.cases]:
        assert leader.audits.pending
        assert leader.tell(relay) == (Verdict(), [])
    assert not leader.audits.pending
    assert leader.audits.counts.num_audited == 6


def appealed(leader: Leader, found: list[Finding]) -> None:
    """Let r1b, the only other of its stage, say twice what it has found of r1a."""
    leader.clear_others()
    for _ in range(2):
        verdict, _ = leader.tell(R1A, *found)
        assert verdict == Verdict()
    assert leader.cases[R1A].auditors == (D0,)


def test_who_accuses_the_only_other_falsely_is_named_and_not_believed_again() -> None:
    leader = Leader("r1a", "r1b")
    appealed(leader, LIES)
    verdict, effects = leader.tell(R1A)
    assert verdict == Verdict()
    (note,) = (e for e in effects if isinstance(e, Note))
    assert (note.event, dict(note.fields)["peer"]) == ("audit.disputed", R1B)
    leader.begin(4)
    leader.clear_others()
    assert leader.tell(R1A, *LIES) == (Verdict(), [])
    assert not leader.audits.pending


def test_a_leader_that_takes_too_long_to_judge_has_the_iteration_repeated() -> None:
    leader = Leader("r1a", "r1b")
    appealed(leader, LIES)
    assert asked(leader.audits.overdue(20.0, leader.view)[1])
    verdict, effects = leader.audits.overdue(40.0, leader.view)
    assert verdict.repeats
    assert notes_of(effects) == ["audit.unsettled"]


def test_in_a_stage_of_two_nothing_follows_if_the_second_look_finds_nothing() -> None:
    verdict, effects = Leader("r1a", "r1b").judge(LIES, RIGHT)
    assert verdict == Verdict()
    assert notes_of(effects) == ["audit.unsettled"]


def disputes(leader: Leader, *relays: NodeId, suspects: tuple[NodeId, ...] = (R2A,)) -> Verdict:
    """Let all judges find of one relay after another that it or somebody else lies."""
    verdict, before = Verdict(), leader.averaging.iteration.number
    for number, relay in enumerate(relays, before + 1):
        assert not verdict.liars
        leader.begin(number)
        while relay in leader.audits._cases:
            verdict, _ = leader.tell(relay, *wrong(suspects))
    return verdict


def test_two_judges_to_whom_a_relay_says_nothing_have_it_leave_for_a_while() -> None:
    """It may be cut off from them."""
    verdict, effects = Leader().judge(SILENT, SILENT, SILENT)
    assert verdict == Verdict(aside={R1A: "it does not tell its auditors what it has sent"})
    assert notes_of(effects) == []


def test_the_last_of_its_stage_is_named_and_nobody_leaves() -> None:
    leader = Leader()
    leader.view = view_of("d0", "r1a", "r1b", "r1c", "r1d", "r2a")
    verdict, effects = leader.judge(GIFT, GIFT, GIFT)
    assert verdict == Verdict()
    (note,) = (e for e in effects if isinstance(e, Note))
    assert note.event == "audit.disputed"
    assert dict(note.fields)["peer"] == R2A


def test_of_two_who_could_have_made_it_look_wrong_nobody_counts_as_differing() -> None:
    leader = Leader()
    for relay in (R1A, R1B, R1C, R1D):
        verdict = disputes(leader, relay, suspects=(R2A, R2B))
        assert verdict.repeats
    verdict = disputes(leader, R1A, R1A, suspects=(R2A, R2B))
    assert not verdict.liars
    assert verdict.aside.keys() == {R1A, R2A}, "the stage is kept"


def reports(leader: Leader, *ends: tuple[NodeId, NodeId]) -> Verdict:
    """Let members say of others that what these have sent is not finite; return the last answer."""
    verdict = Verdict()
    for receiver, node in ends:
        assert verdict == Verdict()
        leader.audits.reset()
        verdict, effects = leader.audits.not_finite(leader.view, receiver, node)
        assert notes_of(effects) == ["relay.lied" if verdict.liars else "audit.disputed"]
        assert leader.audits.share_of(node) == 1.0
    return verdict


@pytest.mark.parametrize("ends", [[(D0, R1A)], [(R2A, R1A), (R2B, R1A)]])
def test_a_sender_of_nan_is_banned_by_the_word_of_a_data_node_or_of_two_relays(
    ends: list[tuple[NodeId, NodeId]],
) -> None:
    assert [*reports(Leader(), *ends).liars] == [R1A]


@pytest.mark.parametrize("ends", [(R1B, R1A), (R2A, D0), (NodeId("x"), R1A), (R1A, R1A)])
def test_a_report_of_nan_by_who_can_have_got_none_is_not_heard(ends: tuple[NodeId, NodeId]) -> None:
    leader = Leader()
    assert leader.audits.not_finite(leader.view, *ends) == (Verdict(), [])


def test_a_late_answer_of_another_opinion_is_not_heard() -> None:
    leader = Leader()
    first = leader.cases[R1A]
    leader.tell(R1A, *LIES)
    leader.cases[R1A] = first
    assert leader.tell(R1A, *LIES) == (Verdict(), [])


def test_what_takes_too_long_is_closed_and_then_given_up() -> None:
    leader = Leader()
    assert leader.audits.by_s == 10.0
    assert leader.audits.overdue(9.9, leader.view) == (Verdict(), [])
    closing = asked(leader.audits.overdue(10.0, leader.view)[1])
    assert closing == [replace(case, closes=True) for case in leader.cases.values()]
    assert leader.tell(R1A) == (Verdict(), []), "it may still say what it has found"
    assert leader.audits.by_s == 20.0
    verdict, effects = leader.audits.overdue(20.0, leader.view)
    assert verdict == Verdict()
    assert notes_of(effects) == ["audit.unfinished"] * 5
    assert not leader.audits.pending
    assert leader.audits.by_s is None


def test_an_audit_that_fails_says_nothing_about_the_relay() -> None:
    leader = Leader()
    verdict, effects = leader.tell(R1A, failure="r2a has not kept microbatch 3/0/1")
    assert verdict == Verdict()
    assert notes_of(effects) == ["audit.unfinished"]


def test_half_of_the_others_must_say_that_a_relay_stands_out() -> None:
    audits, view = RelayAudits(RunConfig(), Random(3)), Leader().view
    says = StandOut(AVERAGING, (R1A, R2A))
    assert audits.stand_out(view, R1B, says) == audits.stand_out(view, R1B, says) == []
    assert audits.stand_out(view, R1A, StandOut(AVERAGING, (R1A,))) == [], "not by itself"
    assert audits.stand_out(view, R2B, StandOut(AVERAGING, (R1A,))) == [], "of another stage"
    assert audits.share_of(R1A) == 0.2
    assert notes_of(audits.stand_out(view, R1C, says)) == ["relay.stands_out"]
    assert audits.share_of(R1A) == 1.0
    assert audits.stand_out(view, R1D, says) == [], "it is told once"
    assert audits.share_of(R2A) == 0.2


def test_one_iteration_does_not_count_for_the_next() -> None:
    audits, view = RelayAudits(RunConfig(), Random(3)), Leader().view
    audits.stand_out(view, R1B, StandOut(AVERAGING, (R1A,)))
    audits.reset()
    assert audits.stand_out(view, R1C, StandOut(AVERAGING, (R1A,))) == []
