"""Nobody acts on a decision of a node that may not decide, or passes it on."""

from dataclasses import replace
from random import Random

import pytest

from decod.ids import AveragingId, Iteration
from decod.protocol.core import messages as m
from decod.protocol.core.context import Identity
from decod.protocol.core.effects import Send
from decod.protocol.core.seals import Decision
from decod.protocol.core.view import Opening, Role
from decod.protocol.node_machine import NodeMachine
from decod.run.stages_config import StagesConfig
from tests.unit.protocol.cast import (
    D0,
    FACTS,
    R1A,
    R1B,
    RUN,
    committed,
    notes_of,
    received,
    sent,
    view_of,
)

VIEW = view_of("d0", "r1a", "r1b")
FIRST = m.Open(Iteration(0, 0), m.Outcome.BEGUN, Opening(Iteration(1, 1), Iteration(0, 0), VIEW))
AVERAGING = AveragingId(Iteration(1, 1), VIEW.version)
NEXT = Opening(Iteration(2, 1), Iteration(1, 1), VIEW)


class Seals:
    """Believes what is sealed with a word, which only one node knows."""

    def __init__(self, *, knows: bool) -> None:
        self._word = b"word" if knows else b""

    def seal_of(self, decision: Decision) -> bytes:
        return self._word

    def fault_of(self, decision: Decision) -> str:
        return "" if decision.seal == b"word" else "forged"


def machine(*, leads: bool) -> NodeMachine:
    run = replace(RUN, stages=StagesConfig(num_relay_stages=1))
    identity = Identity(
        node_id=D0 if leads else R1A,
        address="h:1",
        role=Role.DATA if leads else Role.RELAY,
        capacity=2,
        compute_s=1.0,
        seals=Seals(knows=leads),
    )
    return NodeMachine(identity, run, FACTS, leader=D0, rng=Random(1))


@pytest.mark.parametrize(
    "forged",
    [
        FIRST,
        m.BeginAggregation(AVERAGING, 1, 0),
        m.GradientNorm(AVERAGING, 1.0),
        m.UtilisationQuery(1, Iteration(1, 1)),
        m.Mend(Iteration(1, 1), view_of("d0", "r1a", version=2), "gone"),
        committed(Iteration(1, 1), NEXT),
    ],
    ids=lambda decision: type(decision).__name__,
)
@pytest.mark.parametrize("sender", [D0, R1B], ids=["leader", "volunteer"])
def test_a_decision_without_a_true_seal_changes_nothing(forged: Decision, sender: str) -> None:
    relay = machine(leads=False)
    relay.start(0.0)
    before = (relay.context.iteration, relay.context.view.version)
    effects = relay.step(1.0, received(type(D0)(sender), forged))
    assert notes_of(effects) == ["decision.unproven"]
    assert not sent(effects)
    assert (relay.context.iteration, relay.context.view.version) == before


def test_the_seal_travels_on_and_only_the_leader_can_make_it() -> None:
    leader, relay = machine(leads=True), machine(leads=False)
    leader.context.out.send_all((R1A, R1B), FIRST)
    told = [effect for effect in leader._delivered(0.0) if isinstance(effect, Send)]
    assert [send.message.seal for send in told if isinstance(send.message, m.Open)] == [b"word"] * 2
    relay.start(0.0)
    relay.step(1.0, received(R1B, told[0].message))
    assert relay.context.iteration == Iteration(0, 0), "it is no candidate that was assigned"
    relay.context.out.send(R1B, FIRST)
    (own,) = relay._delivered(0.0)
    assert isinstance(own, Send)
    assert isinstance(own.message, m.Open)
    assert own.message.seal == b""
