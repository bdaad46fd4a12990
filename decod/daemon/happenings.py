"""What has gone wrong lately at a node, and what was done about it, for `decod status`."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decod.obs.events import event_level, render_note

_KEPT_MAX = 8
_KEPT_S = 600.0
"""Older ones are in the log."""

_TOLD_TOO = ("member.leaving", "node.paused", "node.resumed")
"""Orderly events that people wonder about."""

THIS_NODE = "this node"
"""What texts call the node that they come from. Others are shown them, too."""

_NEWEST_ONLY = ("state.unkept", "checkpoint.failed", "data.damaged")
"""Events that come again and again until somebody acts: they must not hide the others."""


@dataclass(frozen=True, slots=True)
class _Happening:
    at_s: float
    event: str
    text: str


@dataclass(slots=True)
class Happenings:
    """The last events that were not routine, oldest first."""

    _kept: deque[_Happening] = field(default_factory=lambda: deque(maxlen=_KEPT_MAX))

    def take(self, event: str, fields: Mapping[str, object], *, now_s: float) -> None:
        """Take in one note; `fields` with names of nodes where they are known."""
        if event_level(event) < logging.WARNING and event not in _TOLD_TOO:
            return
        text = render_note(event, fields)
        if event in _NEWEST_ONLY:
            for earlier in [one for one in self._kept if one.event == event]:
                self._kept.remove(earlier)
        elif self._kept and self._kept[-1].text == text:
            self._kept.pop()
        self._kept.append(_Happening(now_s, event, text))

    def describe(self, now_s: float, *, name: str) -> list[dict[str, Any]]:
        """Return them as `decod status --json` shows them, at whatever node.

        Args:
            now_s: On the clock of `take`.
            name: Of this node.
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
    """Return what two nodes say of themselves, oldest first: each may know what the other can't.

    Args:
        told: As `Happenings.describe` returns it, by another node: it may hold anything.
        own: By this one. What both tell in the same words is told once.
    """
    texts = {one["text"] for one in own}
    others = [one for one in told if _is_happening(one) and one["text"] not in texts]
    return sorted([*others, *own], key=lambda one: -one["age_s"])


def _is_happening(one: Any) -> bool:
    number = isinstance(one, Mapping) and isinstance(one.get("age_s"), int | float)
    return number and isinstance(one.get("text"), str)
