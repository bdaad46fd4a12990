"""Seals on the leader's decisions, which most members get from each other.

A decision goes down a tree of the members. Its receiver knows who has passed it on, but not who has
made it. So the leader seals it, and nobody acts on a decision without a seal, or passes it on. The
core only says when: whoever drives it knows how to make and to check a seal.
"""

from dataclasses import replace
from typing import Protocol, TypeVar

from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.events import Received
from decod.protocol.core.messages import (
    Audit,
    BeginAggregation,
    GradientNorm,
    Mend,
    Message,
    Open,
    UtilisationQuery,
)

Decision = Open | Mend | BeginAggregation | GradientNorm | Audit | UtilisationQuery
SEALED = (Open, Mend, BeginAggregation, GradientNorm, Audit, UtilisationQuery)
"""Messages that go down the tree. An opening or a mend is sealed with its whole view."""

M = TypeVar("M", bound=Message)


class Seals(Protocol):
    """Makes and checks seals. Both are functions of their argument, and may take 1 ms."""

    def seal_of(self, decision: Decision) -> bytes:
        """Return this node's seal; empty if it can't make one."""

    def fault_of(self, decision: Decision) -> str:
        """Return why a decision is not believed; empty if it is."""


class NoSeals:
    """Believes everything, as where all nodes are of one mind."""

    def seal_of(self, decision: Decision) -> bytes:  # noqa: ARG002
        return b""

    def fault_of(self, decision: Decision) -> str:  # noqa: ARG002
        return ""


NO_SEALS = NoSeals()


def sealed(message: M, seals: Seals) -> M:
    """Return a message with this node's seal, if it needs one and has none."""
    if not isinstance(message, SEALED) or message.seal:
        return message
    seal = seals.seal_of(message)
    return replace(message, seal=seal) if seal else message


def doubts(received: Received, seals: Seals, out: EffectSink[Effect]) -> bool:
    """Note it if a message is a decision that nobody who may decide has made; return whether so."""
    if not isinstance(received.message, SEALED):
        return False
    fault = seals.fault_of(received.message)
    if fault:
        what = type(received.message).__name__
        out.note("decision.unproven", peer=received.sender, what=what, reason=fault)
    return bool(fault)


def doubts_at_first(received: Received, seals: Seals, out: EffectSink[Effect]) -> bool:
    """Do what `doubts` does. A decision whose view is not whole can only be doubted later."""
    message = received.message
    whole = not isinstance(message, (Open, Mend)) or message.change is None
    return whole and doubts(received, seals, out)
