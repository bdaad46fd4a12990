"""The trace of a run: one line per transition, as in a daemon's log."""

from collections import Counter
from collections.abc import Mapping

from typing_extensions import override

from decod.journal.event_specs import render_note

_Entry = tuple[float, str, str, Mapping[str, object]]


class Trace:
    """Collects events with virtual time and host. Lines are rendered only when they are read.

    Attributes:
        counts: Number of occurrences of each event.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._entries: list[_Entry] = []
        self._lines: list[str] = []

    def add(self, now_s: float, name: str, event: str, fields: Mapping[str, object]) -> None:
        """Keep one event. Do not change its fields afterwards."""
        self.counts[event] += 1
        self._entries.append((now_s, name, event, fields))

    @property
    def lines(self) -> list[str]:
        """All lines so far. Two runs are equal if their lines are equal."""
        self._lines += map(_line, self._entries[len(self._lines) :])
        return self._lines

    def of(self, event: str) -> list[str]:
        """Return the lines of one kind of event."""
        return [_line(entry) for entry in self._entries if entry[2] == event]

    @override
    def __str__(self) -> str:
        return "\n".join(self.lines)


def _line(entry: _Entry) -> str:
    now_s, name, event, fields = entry
    return f"{now_s:12.6f} {name:<8} {render_note(event, fields)}"
