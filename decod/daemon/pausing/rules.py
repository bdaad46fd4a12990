"""The decision whether a node is to pause: a pure state machine in the time of its caller.

    free --a cause is seen--> PAUSED --no cause for its calm time--> free

Each cause by itself holds from when it is seen until it has been away for a while, so a node does
not resume between two keystrokes, or as soon as it has cooled a little. What is not known counts as
away: a probe that fails must not stop a node for ever. The schedule has no calm time. A person's
pause is not decided here: it stands beside these causes, and only the person ends it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, tzinfo

from decod.config.schedule import PauseRule, WorkHours

CALM_S: Mapping[PauseRule, float] = {
    PauseRule.BUSY_GPU: 60.0,
    PauseRule.BATTERY: 10.0,
    PauseRule.HOT: 300.0,
    PauseRule.KEYBOARD: 60.0,
}
"""How long each cause must be away before the node resumes. A machine cools slowly. The probe of
the keyboard itself waits for some minutes without input."""

SCHEDULE = "schedule"
"""The name of the schedule among the causes."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a probe has found."""

    holds: bool | None
    """Whether the cause holds. None: it can't be known."""
    detail: str = ""
    """What was found, for people; or why nothing can be known."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of the host at one time."""

    wall: datetime
    """The local time, with its offset from UTC."""
    sightings: Mapping[PauseRule, Sighting] = field(default_factory=dict)
    zone: tzinfo | None = None
    """The zone of the wall clock, which says when it changes. None: this host's."""


@dataclass(frozen=True, slots=True)
class PauseCause:
    """A reason for which the node is paused now."""

    name: str
    """`schedule`, or the name of a rule."""
    detail: str
    """For people."""
    until: datetime | None = None
    """When it ends, in local time, if that is known."""
    calm_s: float | None = None
    """The cause is gone; in so many seconds it counts no longer. None: it still holds."""


class PauseRules:
    """The causes that hold, as time goes on."""

    def __init__(self) -> None:
        self._seen: dict[PauseRule, tuple[float, str]] = {}
        """When each rule's cause was seen last, and what was found then."""

    def step(
        self,
        now_s: float,
        found: Circumstances,
        *,
        schedule: WorkHours,
        rules: tuple[PauseRule, ...],
    ) -> tuple[PauseCause, ...]:
        """Return the causes for a pause. Without one, the node works.

        Args:
            now_s: The time of any clock that never goes back, in seconds.
            found: What is known of the host now.
            schedule: When the node works.
            rules: The rules that count. What was seen of others is forgotten.
        """
        causes = []
        if not schedule.is_open(found.wall):
            until = schedule.next_change(found.wall, found.zone)
            causes.append(PauseCause(SCHEDULE, f"outside its schedule, {schedule}", until))
        self._seen = {rule: seen for rule, seen in self._seen.items() if rule in rules}
        for rule in rules:
            sighting = found.sightings.get(rule)
            holds = sighting is not None and sighting.holds is True
            if sighting is not None and holds:
                self._seen[rule] = (now_s, sighting.detail)
            if rule not in self._seen:
                continue
            seen_s, detail = self._seen[rule]
            left_s = seen_s + CALM_S[rule] - now_s
            if holds:
                causes.append(PauseCause(rule.value, detail))
            elif left_s > 0:
                causes.append(PauseCause(rule.value, detail, calm_s=left_s))
            else:
                del self._seen[rule]
        return tuple(causes)
