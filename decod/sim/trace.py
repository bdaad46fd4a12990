"""What happened, one line for every transition: the same lines that a daemon logs."""

from collections.abc import Mapping

from typing_extensions import override

from decod.obs.events import render_note


class Trace:
    """Collects lines of virtual time, host and event."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, now_s: float, name: str, event: str, fields: Mapping[str, object]) -> None:
        """Write one line. Two runs are the same if their lines are."""
        self.lines.append(f"{now_s:12.6f} {name:<8} {render_note(event, fields)}")

    @override
    def __str__(self) -> str:
        return "\n".join(self.lines)
