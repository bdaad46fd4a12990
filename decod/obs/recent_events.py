"""Recent faults at a node, and its reactions to them, for `decod status`."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decod.obs.event_specs import event_level, render_note

_KEPT_MAX = 8
_KEPT_S = 600.0
"""Older events are only in the log."""

_TOLD_TOO = ("member.leaving", "node.paused", "node.resumed")
"""Orderly events that people wonder about."""

THIS_NODE = "this node"
"""The name that texts use for their own node. Other nodes' status shows its real name instead."""

_NEWEST_ONLY = (
    "state.unkept",
    "checkpoint.failed",
    "data.damaged",
    "data.unreachable",
    "audit_log.failed",
    "vote.failed",
    "addresses.unkept",
)
"""Events that repeat until the operator acts. Only the newest is kept, so that others stay
visible."""


@dataclass(frozen=True, slots=True)
class _RecentEvent:
    at_s: float
    event: str
    text: str


@dataclass(slots=True)
class RecentEvents:
    """The last events that were not routine, the oldest first."""

    _kept: deque[_RecentEvent] = field(default_factory=lambda: deque(maxlen=_KEPT_MAX))

    def take(self, event: str, fields: Mapping[str, object], *, now_s: float) -> None:
        """Take in one note. `fields` holds names of nodes in place of ids where they are known."""
        if event_level(event) < logging.WARNING and event not in _TOLD_TOO:
            return
        text = render_note(event, fields)
        if event in _NEWEST_ONLY:
            for earlier in [one for one in self._kept if one.event == event]:
                self._kept.remove(earlier)
        elif self._kept and self._kept[-1].text == text:
            self._kept.pop()
        self._kept.append(_RecentEvent(now_s, event, text))

    def describe(self, now_s: float, *, name: str) -> list[dict[str, Any]]:
        """Return the events of the last 10 minutes as `decod status --json` shows them at any node.

        Args:
            now_s: The time on the clock of `take`.
            name: The name of this node.
        """
        return [
            {
                "age_s": round(now_s - one.at_s, 1),
                "event": one.event,
                "text": one.text.replace(THIS_NODE, name),
            }
            for one in self._kept
            if now_s - one.at_s <= _KEPT_S
        ]


def merged(told: Sequence[Any], own: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the events of another node and this one, the oldest first.

    Each node may know of events that the other can't know.

    Args:
        told: The other node's result of `RecentEvents.describe`. It is unchecked.
        own: This node's result. An event with the same text in both is listed once.
    """
    texts = {one["text"] for one in own}
    others = [one for one in told if _is_happening(one) and one["text"] not in texts]
    return sorted([*others, *own], key=lambda one: -one["age_s"])


def _is_happening(one: Any) -> bool:
    number = isinstance(one, Mapping) and isinstance(one.get("age_s"), int | float)
    return number and isinstance(one.get("text"), str)
