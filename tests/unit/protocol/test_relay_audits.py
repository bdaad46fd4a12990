"""How the leader finds out who lies, from what auditors tell it."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.core.effects import Effect, EffectSink, Note, Send
from decod.protocol.core.messages.audit_messages import (
    Audit,
    AuditCase,
    AuditedWork,
    AuditResult,
    Finding,
    StandOut,
)
from decod.protocol.leadership.relay_audits import PROBATION_ITERATIONS, RelayAudits, Verdict
from decod.run.protocol_config import NO_AUDITS, AuditConfig
from decod.run.run_config import RunConfig
from tests.unit.protocol.cast import (
    D0,
    R1A,
    R1B,
    R1C,
    R2A,
    R2B,
    RUN,
    Heard,
    configured,
    notes_of,
    view_of,
)

R1D = NodeId("r1d")
VIEW = view_of("d0", "r1a", "r1b", "r1c", "r1d", "r2a", "r2b")
AVERAGING = AveragingId(Iteration(3, 1), 1)
ALWAYS = AuditConfig(share=1.0, share_in_probation=1.0)
PATIENT = configured(complete_timeout_s=10.0)


class Leader:
    """The leader's audits of one iteration, all of r1a's work."""

    def __init__(self, *stage: str, config: AuditConfig = ALWAYS) -> None:
        self.view = view_of("d0", *(stage or ("r1a", "r1b", "r1c", "r1d")), "r2a", "r2b")
        self.out = EffectSink[Effect]()
        run = replace(RUN, audits=config, protocol=PATIENT)
        self.audits = RelayAudits(run, Random(3), self.out)
        self.begin()

    def told(self, verdict: Verdict) -> tuple[Verdict, list[Effect]]:
        """Return a verdict and what was said with it."""
        return verdict, self.out.taken()

    def begin(self, number: int = 3) -> None:
        self.audits.reset()
        averaging = AveragingId(Iteration(number, 1), 1)
        self.averaging = averaging
        self.audits.begin(0.0, self.view, averaging)
        self.cases = {each.relay: each for each in asked(self.out.taken())}

    def tell(
        self, relay: NodeId, *findings: Finding, failure: str = "", sender: NodeId | None = None
    ) -> tuple[Verdict, list[Effect]]:
        """Let the auditors of a relay's latest opinion tell what they have found."""
        case = self.cases[relay]
        result = AuditResult(self.averaging, relay, case.opinion, 4, failure, findings)
        auditor = sender or case.auditors[0]
        verdict, effects = self.told(self.audits.found(1.0, self.view, auditor, result))
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


def audits_of(run: RunConfig) -> Heard:
    return Heard(RelayAudits(run, Random(3), EffectSink()))


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
DISPUTED = wrong((R1B,), (R1B, R1C))
"""r1b could have made all of it look wrong."""
SILENT = wrong((), work=AuditedWork.SILENCE)
GIFT = wrong((R2A,), work=AuditedWork.GIFT)
"""r2a has told the auditor something else than it has signed."""


def test_nothing_is_drawn_if_nothing_is_to_be_audited() -> None:
    leader = Leader(config=NO_AUDITS)
    assert not leader.cases
    assert not leader.audits.pending


def test_each_opinion_has_a_seed_that_nobody_knew() -> None:
    leader = Leader()
    seeds = {case.seed for case in leader.cases.values()}
    before = leader.cases[R1A].seed
    leader.tell(R1A, *LIES)
    assert len({*seeds, leader.cases[R1A].seed}) == 7
    assert leader.cases[R1A].seed != before


def test_a_relay_that_contradicts_itself_needs_no_other_witness() -> None:
    """The mean that it has sent is not that of what it says it got."""
    found = wrong((), work=AuditedWork.MEAN)
    verdict, _ = Leader().judge(found, found, found)
    assert verdict == Verdict({R1A: "its part of the average: 1.00 off"})


def test_all_is_well() -> None:
    leader = Leader()
    assert leader.cases.keys() == {R1A, R1B, R1C, R1D, R2A, R2B}
    for relay in [*leader.cases]:
        assert leader.audits.pending
        assert leader.tell(relay) == (Verdict(), [])
    assert not leader.audits.pending
    assert leader.audits.counts.num_audited == 6


def test_auditors_are_others_of_the_stage() -> None:
    leader = Leader()
    for case in leader.cases.values():
        stage = {m.node_id for m in leader.view.roster(leader.view.by_id[case.relay].stage_index)}
        assert {*case.auditors} == stage - {case.relay}


def test_one_vote_is_audited_once() -> None:
    leader = Leader()
    leader.audits.begin(0.0, leader.view, leader.averaging)
    assert leader.out.taken() == []


def test_two_judges_confirm_that_a_relay_lies() -> None:
    leader = Leader()
    leader.clear_others()
    judges = set()
    for _ in range(2):
        assert leader.tell(R1A, *LIES)[0] == Verdict()
        (judge,) = leader.cases[R1A].auditors
        judges.add(judge)
    verdict, effects = leader.tell(R1A, *LIES)
    assert verdict == Verdict({R1A: "its activations or gradients: 1.00 off"})
    assert len(judges) == 2, "a judge is asked once"
    assert notes_of(effects) == ["relay.lied"]
    assert not leader.audits.pending


def test_an_accusation_that_two_judges_refute_has_no_consequence() -> None:
    """Others may have told the accuser something else than the judges: nobody knows who lies."""
    verdict, effects = Leader().judge(LIES, RIGHT, RIGHT)
    assert verdict == Verdict()
    assert notes_of(effects) == ["audit.unsettled"]


@pytest.mark.parametrize("third", [LIES, RIGHT, DISPUTED])
def test_a_third_judge_decides(third: list[Finding]) -> None:
    verdict, _ = Leader().judge(LIES, LIES, RIGHT, third)
    assert [*verdict.liars] == [R1A] * (third is LIES)
    assert bool(verdict.repeats) == (third is DISPUTED)


@pytest.mark.parametrize("judged", [(LIES, RIGHT), (RIGHT, LIES), (RIGHT, DISPUTED)])
def test_in_a_stage_of_three_two_judges_that_differ_settle_nothing(
    judged: tuple[list[Finding], ...],
) -> None:
    verdict, effects = Leader("r1a", "r1b", "r1c").judge(LIES, *judged)
    assert verdict == Verdict()
    assert notes_of(effects) == ["audit.unsettled"]


def appealed(leader: Leader, found: list[Finding]) -> None:
    """Let r1b, the only other of its stage, say twice what it has found of r1a."""
    leader.clear_others()
    for _ in range(2):
        verdict, _ = leader.tell(R1A, *found)
        assert verdict == Verdict()
    assert leader.cases[R1A].auditors == (D0,)


@pytest.mark.parametrize("found", [LIES, SILENT, wrong((R1B,))], ids=["proven", "silent", "said"])
def test_in_a_stage_of_two_the_leader_judges_and_is_believed(found: list[Finding]) -> None:
    leader = Leader("r1a", "r1b")
    appealed(leader, found)
    verdict, effects = leader.tell(R1A, *LIES)
    assert verdict == Verdict({R1A: "its activations or gradients: 1.00 off"})
    assert notes_of(effects) == ["relay.lied"]
    assert not leader.audits.pending


def test_in_a_stage_of_two_a_neighbour_may_be_the_liar() -> None:
    leader = Leader("r1a", "r1b")
    appealed(leader, GIFT)
    assert [*leader.tell(R1A, *GIFT)[0].liars] == [R2A]


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


@pytest.mark.parametrize(
    ("found", "judged"),
    [
        (LIES, None),
        (wrong((R1B,)), RIGHT),
        (wrong((R1B,)), wrong((R1B,))),
        (wrong((), work=AuditedWork.MEAN), RIGHT),
        (SILENT, RIGHT),
        (wrong((), work=AuditedWork.WORD), RIGHT),
    ],
    ids=["the leader can't", "contribution", "the other's word", "mean", "silence", "another word"],
)
def test_what_the_leader_can_not_settle_is_repeated_three_times_and_nobody_leaves(
    found: list[Finding], judged: list[Finding] | None
) -> None:
    leader = Leader("r1a", "r1b")
    for number in range(4, 10):
        leader.begin(number)
        appealed(leader, found)
        if judged is None:
            verdict, effects = leader.tell(R1A, failure="no room")
        else:
            verdict, effects = leader.tell(R1A, *judged)
        assert not verdict.liars
        assert not verdict.aside
        assert bool(verdict.repeats) == (number < 7)
        (note,) = (e for e in effects if isinstance(e, Note))
        assert note.event == "audit.unsettled"
        assert dict(note.fields)["peer"] == R1A
        assert "says r1b" in str(dict(note.fields)["reason"])
        assert ("used all the same" in str(note.fields)) == (number >= 7)


def test_a_leader_that_takes_too_long_to_judge_has_the_iteration_repeated() -> None:
    leader = Leader("r1a", "r1b")
    appealed(leader, LIES)
    assert asked(leader.told(leader.audits.overdue(20.0, leader.view))[1])
    verdict, effects = leader.told(leader.audits.overdue(40.0, leader.view))
    assert verdict.repeats
    assert notes_of(effects) == ["audit.unsettled"]


def test_in_a_stage_of_two_nothing_follows_if_the_second_look_finds_nothing() -> None:
    verdict, effects = Leader("r1a", "r1b").judge(LIES, RIGHT)
    assert verdict == Verdict()
    assert notes_of(effects) == ["audit.unsettled"]


@pytest.mark.parametrize("judged", [(DISPUTED, DISPUTED), (LIES, RIGHT, DISPUTED)])
def test_who_could_have_made_all_look_wrong_stays_and_is_audited_with_the_relay(
    judged: tuple[list[Finding], ...],
) -> None:
    leader = Leader()
    verdict, effects = leader.judge(LIES, *judged)
    assert verdict.repeats
    assert not verdict.liars
    assert not verdict.aside
    assert notes_of(effects) == ["audit.disputed"]
    assert all(leader.audits.share_of(node) == 1.0 for node in (R1A, R1B, R2A, R2B))


def disputes(leader: Leader, *relays: NodeId, suspects: tuple[NodeId, ...] = (R2A,)) -> Verdict:
    """Let all judges find of one relay after another that it or somebody else lies."""
    verdict, before = Verdict(), leader.averaging.iteration.number
    for number, relay in enumerate(relays, before + 1):
        assert not verdict.liars
        leader.begin(number)
        while relay in leader.audits._cases:
            verdict, _ = leader.tell(relay, *wrong(suspects))
    return verdict


def test_who_differs_with_three_lies() -> None:
    verdict = disputes(Leader(), R1A, R1B, R1C)
    assert verdict == Verdict({R2A: "3 members say something else than it does"})


def test_who_differs_with_all_with_whom_it_can_lies() -> None:
    """There are two in the next stage."""
    leader = Leader()
    disputes(leader, R1A)
    verdict = disputes(leader, R1A, suspects=(R2B,))
    assert verdict == Verdict({R1A: "2 members say something else than it does"})


def test_the_only_member_of_a_stage_is_not_believed_about_several_relays() -> None:
    """It stays, and nobody else leaves. The run goes on with what has been computed."""
    leader = Leader()
    leader.view = view_of("d0", "r1a", "r1b", "r1c", "r1d", "r2a")
    assert disputes(leader, R1A, R1B, R1C) == Verdict()
    assert disputes(leader, R1D, R1D, R1D, R1A) == Verdict()


def test_two_judges_to_whom_a_relay_says_nothing_have_it_leave_for_a_while() -> None:
    """It may be cut off from them."""
    verdict, effects = Leader().judge(SILENT, SILENT, SILENT)
    assert verdict == Verdict(aside={R1A: "it does not tell its auditors what it has sent"})
    assert notes_of(effects) == []


@pytest.mark.parametrize("judged", [(SILENT, LIES), (LIES, SILENT)])
def test_a_relay_that_says_nothing_to_one_of_two_judges_is_not_banned(
    judged: tuple[list[Finding], ...],
) -> None:
    verdict, _ = Leader().judge(SILENT, *judged)
    assert [*verdict.aside] == [R1A]
    assert not verdict.liars


def test_a_neighbour_that_tells_something_else_than_it_has_signed_is_banned() -> None:
    leader = Leader()
    verdict, effects = leader.judge(GIFT, GIFT, GIFT)
    assert [*verdict.liars] == [R2A]
    assert notes_of(effects) == ["relay.lied"]
    assert leader.audits.take_convicted() == [R2A]


def test_the_last_of_its_stage_is_named_and_nobody_leaves() -> None:
    leader = Leader()
    leader.view = view_of("d0", "r1a", "r1b", "r1c", "r1d", "r2a")
    verdict, effects = leader.judge(GIFT, GIFT, GIFT)
    assert verdict == Verdict()
    (note,) = (e for e in effects if isinstance(e, Note))
    assert note.event == "audit.disputed"
    assert dict(note.fields)["peer"] == R2A


@pytest.mark.parametrize("judged", [(GIFT, RIGHT, RIGHT), (RIGHT, GIFT, RIGHT)])
def test_one_judge_alone_gets_no_neighbour_banned(judged: tuple[list[Finding], ...]) -> None:
    verdict, _ = Leader().judge(GIFT, *judged)
    assert verdict == Verdict()


def test_a_data_node_is_no_liar_whatever_judges_say() -> None:
    found = wrong((D0,), work=AuditedWork.GIFT)
    verdict, _ = Leader().judge(found, found, found)
    assert verdict == Verdict()


def test_of_two_that_differ_again_and_again_with_nobody_else_both_leave() -> None:
    leader = Leader()
    assert not disputes(leader, R1A, R1A).aside
    verdict = disputes(leader, R1A)
    assert not verdict.liars
    assert verdict.aside.keys() == {R1A, R2A}


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
        verdict, effects = leader.told(leader.audits.not_finite(leader.view, receiver, node))
        assert notes_of(effects) == ["relay.lied" if verdict.liars else "audit.disputed"]
        assert leader.audits.share_of(node) == 1.0
    return verdict


@pytest.mark.parametrize("ends", [[(D0, R1A)], [(R2A, R1A), (R2B, R1A)]])
def test_a_sender_of_nan_is_banned_by_the_word_of_a_data_node_or_of_two_relays(
    ends: list[tuple[NodeId, NodeId]],
) -> None:
    assert [*reports(Leader(), *ends).liars] == [R1A]


def test_a_false_report_of_nan_removes_nobody() -> None:
    """However often it comes. Who says so of three is the liar."""
    assert reports(Leader(), *[(R2A, R1A)] * 9) == Verdict()
    assert [*reports(Leader(), (R2A, R1A), (R2A, R1B), (R2A, R1C)).liars] == [R2A]
    alone = Leader()
    alone.view = view_of("d0", "r1a", "r1b", "r1c", "r1d", "r2a")
    pairs = [(R2A, relay) for relay in (R1A, R1B, R1C, R1D, R1A)]
    assert reports(alone, *pairs) == Verdict()


@pytest.mark.parametrize("ends", [(R1B, R1A), (R2A, D0), (NodeId("x"), R1A), (R1A, R1A)])
def test_a_report_of_nan_by_who_can_have_got_none_is_not_heard(ends: tuple[NodeId, NodeId]) -> None:
    leader = Leader()
    assert leader.told(leader.audits.not_finite(leader.view, *ends)) == (Verdict(), [])


def test_a_data_node_is_believed() -> None:
    """It could have made the relay's work look wrong, too."""
    found = wrong((D0,), (D0, R2A))
    verdict, _ = Leader().judge(found, found, found)
    assert [*verdict.liars] == [R1A]


def test_whoever_an_auditor_names_only_the_relay_is_judged() -> None:
    """Its word alone harms nobody."""
    leader = Leader()
    for number in range(4, 10):
        leader.begin(number)
        leader.clear_others()
        leader.tell(R1A, *wrong((R2A,), (NodeId("nobody"),), (D0,)))
        while R1A in leader.audits._cases:
            verdict, _ = leader.tell(R1A)
            assert verdict == Verdict()


@pytest.mark.parametrize(
    "how",
    [
        {"sender": R2A},
        {"sender": R1A},
    ],
)
def test_only_the_first_auditor_is_heard(how: dict[str, Any]) -> None:
    leader = Leader()
    assert leader.tell(R1A, *LIES, **how) == (Verdict(), [])
    assert R1A in leader.audits._cases


def test_a_late_answer_of_another_opinion_is_not_heard() -> None:
    leader = Leader()
    first = leader.cases[R1A]
    leader.tell(R1A, *LIES)
    leader.cases[R1A] = first
    assert leader.tell(R1A, *LIES) == (Verdict(), [])


def test_what_takes_too_long_is_closed_and_then_given_up() -> None:
    leader = Leader()
    assert leader.audits.by_s == 10.0
    assert leader.told(leader.audits.overdue(9.9, leader.view)) == (Verdict(), [])
    closing = asked(leader.told(leader.audits.overdue(10.0, leader.view))[1])
    assert closing == [replace(case, closes=True) for case in leader.cases.values()]
    assert leader.tell(R1A) == (Verdict(), []), "it may still say what it has found"
    assert leader.audits.by_s == 20.0
    verdict, effects = leader.told(leader.audits.overdue(20.0, leader.view))
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
    audits, view = audits_of(RunConfig()), Leader().view
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
    audits, view = audits_of(RunConfig()), Leader().view
    audits.stand_out(view, R1B, StandOut(AVERAGING, (R1A,)))
    audits.reset()
    assert audits.stand_out(view, R1C, StandOut(AVERAGING, (R1A,))) == []


def test_probation_ends() -> None:
    audits = audits_of(RunConfig())
    for _ in range(PROBATION_ITERATIONS):
        assert audits.share_of(R1A) == 0.2
        audits.committed(VIEW)
    assert audits.share_of(R1A) == 0.02


def test_the_audited_share_is_the_one_that_was_asked_for() -> None:
    audits = audits_of(RunConfig(audits=AuditConfig(share=0.1, share_in_probation=0.1)))
    num = 0
    for number in range(2000):
        audits.reset()
        num += len(asked(audits.begin(0.0, VIEW, AveragingId(Iteration(number + 1, 1), 1))))
    assert num / (2000 * 6) == pytest.approx(0.1, rel=0.1)
