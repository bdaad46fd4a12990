"""When a node works: windows of the local wall clock by weekday, and causes for a pause.

    22:00-07:00                        every night
    Mon-Fri 22:00-07:00, Sat Sun 00:00-24:00
    always

A window belongs to the day on which it begins: `Fri 22:00-07:00` ends on Saturday. Weekdays hold
for all windows that follow, until others are named. The wall clock decides, so a night in which the
clocks change is an hour shorter or longer.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from enum import StrEnum
from typing import Self

from typing_extensions import override

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_SHOWN_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAILY = frozenset(range(7))
_DAY_MIN = 24 * 60

_WINDOW = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})\Z", re.ASCII)
_DAY_SPAN = re.compile(r"([a-z]{3})(?:-([a-z]{3}))?\Z", re.ASCII)
_TEXT_MAX_CHARACTERS = 1000

ALWAYS = "always"
"""The text of no schedule: the node may work at any time."""

_AHEAD_DAYS = 8
"""The time in which the next change is looked for. Every schedule repeats after a week."""
_GRID = timedelta(minutes=15)
"""Clocks change at whole quarters of an hour, in every time zone."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of some days in which the node works."""

    days: frozenset[int]
    """Days on which it begins, from 0 for Monday."""
    start_min: int
    """Minutes after midnight, from 0 to 1439."""
    end_min: int
    """Minutes after the same midnight. More than 1440 if it ends on the next day."""

    def contains(self, day: int, minute: int) -> bool:
        """Return whether it is open at a minute of a weekday."""
        today = day in self.days and self.start_min <= minute < self.end_min
        begun = (day - 1) % 7 in self.days and minute + _DAY_MIN < self.end_min
        return today or begun

    @property
    def span(self) -> str:
        """Its times, as they are written."""
        end_min = self.end_min - _DAY_MIN if self.end_min > _DAY_MIN else self.end_min
        return f"{_clock(self.start_min)}-{_clock(end_min)}"

    @override
    def __str__(self) -> str:
        days = "daily" if self.days == _DAILY else " ".join(_runs_of(self.days))
        return f"{days} {self.span}"


def _runs_of(days: frozenset[int]) -> Iterator[str]:
    """Yield days as they are written, three or more in a row as `Mon-Wed`."""
    left = sorted(days)
    while left:
        last = left[0]
        while last + 1 in days:
            last += 1
        if last - left[0] > 1:
            yield f"{_SHOWN_DAYS[left[0]]}-{_SHOWN_DAYS[last]}"
        else:
            yield from (_SHOWN_DAYS[day] for day in range(left[0], last + 1))
        left = [day for day in left if day > last]


@dataclass(frozen=True, slots=True)
class WorkHours:
    """The windows in which a node works. Without any, it works all the time."""

    windows: tuple[Window, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the schedule that a text describes.

        Raises:
            ValueError: The text describes none. The error says which part, and how to write it.
        """
        words = re.split(r"[\s,;]+", text[: _TEXT_MAX_CHARACTERS + 1].strip().lower())
        if len(text) > _TEXT_MAX_CHARACTERS:
            raise ValueError(f"a schedule has at most {_TEXT_MAX_CHARACTERS} characters")
        if words == [ALWAYS]:
            return cls()
        windows: list[Window] = []
        days = set(_DAILY)
        naming = False
        for word in words:
            if word == "daily" or _DAY_SPAN.match(word):
                days = (days if naming else set()) | _days_of(word)
                naming = True
            else:
                windows.append(_window_of(word, frozenset(days)))
                naming = False
        if naming:
            raise ValueError(f"{words[-1]!r} has no time after it: write it like Sat 10:00-18:00")
        return cls(tuple(windows))

    @override
    def __str__(self) -> str:
        daily = all(each.days == _DAILY for each in self.windows)
        shown = (each.span if daily else str(each) for each in self.windows)
        return ", ".join(shown) or ALWAYS

    def is_open(self, wall: datetime) -> bool:
        """Return whether the node works when the local clock shows `wall`."""
        day = wall.weekday()
        minute = 60 * wall.hour + wall.minute
        return not self.windows or any(each.contains(day, minute) for each in self.windows)

    def next_change(self, now: datetime, zone: tzinfo | None = None) -> datetime | None:
        """Return when the schedule next opens or closes, in local time; None if it never does.

        Args:
            now: An instant, with its time zone.
            zone: The zone of the wall clock. None: this host's.
        """
        open_now = self.is_open(now.astimezone(zone))
        for instant in sorted(set(self._candidates(now, zone))):
            local = instant.astimezone(zone)
            if self.is_open(local) != open_now:
                return local
        return None

    def _candidates(self, now: datetime, zone: tzinfo | None) -> Iterator[datetime]:
        """Yield instants after `now` among which is the next change, in UTC."""
        start = now.astimezone(UTC).replace(second=0, microsecond=0)
        quarter = start - timedelta(minutes=start.minute % 15)
        for index in range(1, _AHEAD_DAYS * 96):
            yield quarter + index * _GRID
        minutes = {m % _DAY_MIN for w in self.windows for m in (w.start_min, w.end_min)}
        first = now.astimezone(zone).date()
        for day in range(_AHEAD_DAYS + 1):
            for minute in minutes:
                wall = datetime.combine(
                    first + timedelta(days=day), time(*divmod(minute, 60)), tzinfo=zone
                )
                for fold in (0, 1):
                    instant = wall.replace(fold=fold).astimezone(UTC)
                    if instant > now:
                        yield instant


def _days_of(word: str) -> set[int]:
    if word == "daily":
        return set(_DAILY)
    match = _DAY_SPAN.match(word)
    first, last = (match[1], match[2] or match[1]) if match else (word, word)
    if first not in _DAYS or last not in _DAYS:
        raise _unknown(word)
    start = _DAYS.index(first)
    end = _DAYS.index(last)
    return {day % 7 for day in range(start, end + 1 if end >= start else end + 8)}


def _window_of(word: str, days: frozenset[int]) -> Window:
    match = _WINDOW.match(word)
    if match is None:
        raise _unknown(word)
    hours = (int(match[1]), int(match[3]))
    minutes = (int(match[2]), int(match[4]))
    start_min, end_min = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
    if max(minutes) > 59 or start_min >= _DAY_MIN or end_min > _DAY_MIN:
        raise ValueError(f"{word!r} is no window: times go from 00:00 to 24:00")
    if start_min == end_min:
        raise ValueError(f"{word!r} is empty: write 00:00-24:00 for a whole day")
    return Window(days, start_min, end_min if end_min > start_min else end_min + _DAY_MIN)


def _unknown(word: str) -> ValueError:
    return ValueError(
        f"{word[:60]!r} is no time and no weekday: write windows like 22:00-07:00, weekdays like"
        f" Mon-Fri before them, or {ALWAYS}"
    )


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


class PauseRule(StrEnum):
    """A cause for which a node pauses by itself, and resumes when it is gone."""

    BUSY_GPU = "busy-gpu"
    """Processes of others compute on the node's GPU, or hold much of its memory."""
    BATTERY = "battery"
    """The machine runs on its battery."""
    HOT = "hot"
    """A processor is about as hot as its maker allows."""
    KEYBOARD = "keyboard"
    """Somebody uses the machine."""


DEFAULT_PAUSE_RULES = (PauseRule.BATTERY,)
"""Few machines that stay where they are have a battery, so this surprises nobody. The other rules
depend on what a machine is used for: a shared server is hot and busy by design."""

NO_RULES = "none"


def read_rules(text: str) -> tuple[PauseRule, ...]:
    """Return the rules that a text such as `battery,hot` names, each once; none for `none`.

    Raises:
        ValueError: A word is no rule.
    """
    words = re.split(r"[\s,]+", text[:200].strip().lower())
    if words == [NO_RULES]:
        return ()
    for word in words:
        if word not in tuple(PauseRule):
            near = difflib.get_close_matches(word, list(PauseRule), n=1)
            known = f"they are {', '.join(PauseRule)}, or {NO_RULES} alone"
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{word[:60]!r} is no cause for a pause: {hint}{known}")
    return tuple(rule for rule in PauseRule if rule in words)


def show_rules(rules: tuple[PauseRule, ...]) -> str:
    """Return rules as `read_rules` reads them."""
    return ",".join(rules) or NO_RULES
