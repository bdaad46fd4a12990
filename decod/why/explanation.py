"""The answer to one question: a cause, the figures that support it, and one remedy."""

from dataclasses import dataclass, field
from enum import StrEnum


class WhyQuestion(StrEnum):
    """What an operator can ask."""

    IDLE = "idle"
    """Why is my node idle?"""
    SLOW = "slow"
    """Why is the run slow?"""
    REMOVED = "removed"
    """Why was I removed?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number that supports an answer."""

    name: str
    """For programs, with its unit last."""
    value: float | str | None
    text: str
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the records say."""

    question: WhyQuestion
    applies: bool
    """Whether the node is idle, the run slow, or the node was removed, now or lately."""
    cause: str
    """One sentence, without its full stop."""
    remedy: str
    """One thing to do. Empty if nothing needs to be done."""
    known: bool = True
    """Whether the records tell the cause."""
    figures: tuple[Figure, ...] = field(default=())
