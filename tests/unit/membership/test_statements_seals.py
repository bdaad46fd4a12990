"""Seals of decisions: a data node's, of this run, and of nothing else than was said."""

from dataclasses import replace

import pytest

from decod.clocks import wall_clock
from decod.ids import AveragingId, Iteration, RunId
from decod.limits import SEAL_SIZE_MAX_BYTES
from decod.membership.papers import Membership
from decod.membership.statements import DecisionSeals
from decod.protocol.core.messages import BeginAggregation, Mend, Open, Outcome
from decod.protocol.core.seals import Decision
from decod.protocol.core.view import Opening
from tests.support.members import data_node, host_key, new_data_node, volunteer
from tests.unit.protocol.cast import view_of

RUN = RunId("r" * 26)
VIEW = view_of("d0", "r1a", "r1b")
OPENING = Opening(Iteration(1, 1), Iteration(0, 0), VIEW, electors=tuple(VIEW.by_id))
OPEN = Open(Iteration(0, 0), Outcome.BEGUN, OPENING, "begun")
BEGIN = BeginAggregation(AveragingId(Iteration(1, 1), 1), 3, 7, 1.5)
MEND = Mend(Iteration(1, 1), VIEW, "r1c is gone")


def seals(membership: Membership, run_id: RunId = RUN) -> DecisionSeals:
    return DecisionSeals(membership, run_id, wall_clock)


CHECKER = seals(volunteer("relay"))


def sealed(decision: Decision, by: DecisionSeals) -> Decision:
    return replace(decision, seal=by.seal_of(decision))


@pytest.fixture(autouse=True)
def _real_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node ids here are short, and the wire's are not."""
    from decod.membership import statements as module

    monkeypatch.setattr(module, "content_of", lambda decision: repr(decision).encode())


@pytest.mark.parametrize("decision", [OPEN, BEGIN, MEND], ids=["open", "begin", "mend"])
def test_a_data_nodes_seal_is_believed_and_small(decision: Decision) -> None:
    found = sealed(decision, seals(data_node("leader")))
    assert CHECKER.fault_of(found) == ""
    assert 0 < len(found.seal) < SEAL_SIZE_MAX_BYTES / 2


def test_nobody_elses_is() -> None:
    assert seals(volunteer("relay")).seal_of(BEGIN) == b"", "a volunteer makes none"
    foreign = seals(data_node("leader", host_key("another root")))
    elsewhere = seals(data_node("leader"), RunId("q" * 26))
    past = seals(new_data_node("leader", now_s=wall_clock() - 31 * 24 * 3600.0))
    by_relay = replace(volunteer("relay").state("decision", CHECKER._body(BEGIN)), body=b"")
    of_other_kind = replace(data_node("leader").state("run", CHECKER._body(BEGIN)), body=b"")
    for found, told in (
        (BEGIN, "it has no seal"),
        (sealed(BEGIN, foreign), "signature"),
        (sealed(BEGIN, elsewhere), "signature"),
        (sealed(BEGIN, past), "expires_s"),
        (replace(BEGIN, seal=by_relay.to_bytes()), "a volunteer has sealed it"),
        (replace(BEGIN, seal=of_other_kind.to_bytes()), "kind"),
        (replace(BEGIN, seal=b"junk"), "bytes are no Statement"),
    ):
        assert told in CHECKER.fault_of(found)


def test_what_was_altered_is_not_what_was_sealed() -> None:
    leader = seals(data_node("leader"))
    opened, begun, mended = (sealed(each, leader) for each in (OPEN, BEGIN, MEND))
    assert isinstance(opened, Open)
    other_view = view_of("d0", "r1a")
    for altered in (
        replace(begun, num_committed=4),  # type: ignore[call-arg]
        replace(opened, reason="another"),
        replace(opened, opening=replace(OPENING, view=other_view)),
        replace(opened, opening=replace(OPENING, electors=OPENING.electors[:2])),
        replace(mended, view=other_view),  # type: ignore[call-arg]
        replace(mended, seal=opened.seal),
    ):
        assert "signature" in CHECKER.fault_of(altered)
    electors = tuple(reversed(OPENING.electors))
    same = replace(opened, opening=replace(OPENING, electors=electors))
    assert CHECKER.fault_of(same) == "", "their order means nothing"
