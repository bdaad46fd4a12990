"""How a message reaches its goal by way of a third member (`decod.protocol.links.forwarding`)."""

from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.limits import Number
from decod.protocol.core.messages.scopes import OfRun


@dataclass(frozen=True, slots=True)
class Way:
    """How a message goes by way of a third member, because its origin can't reach its goal.

    Part of a message's envelope, not of the message.
    """

    origin: NodeId
    """Who says it."""
    goal: NodeId
    """Whom it is for."""
    term: int
    """Of the origin's view."""
    ticket: int
    """Counts the messages of the origin that are passed on, from 1."""
    proof: bytes = field(default=b"", compare=False)
    """That the origin says the message. Whoever drives the core makes and checks it."""


@dataclass(frozen=True, slots=True)
class Passed(OfRun):
    """What became of a message that the sender was to pass on."""

    ticket: Number
    """Which: the ticket of its envelope."""
    arrived: bool
    """Whether its goal has it. Said of tensors; of other messages only if it has not."""
