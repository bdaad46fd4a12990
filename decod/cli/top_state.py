"""What `decod top` remembers between two pictures: keys change it, answers of the node change it.

Nothing here reads a clock, a terminal or a socket.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from decod.journal.told_status import mapping_in, number_in

SORTS = ("stage", "node", "state", "capacity", "flows", "done", "link")
"""Columns of the member table by which it can be sorted, in the order in which `s` takes them."""

NUM_STEPS_SHOWN = 240
"""Iterations whose losses and rates are drawn: the newest ones."""

_NUM_STEPS_FOR_PACE = 50
"""Iterations that the estimate of the end goes by."""

_NUM_STEPS_MAX = 2000

_SEQUENCES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\x03": "q",
}
"""What a terminal sends for keys that are no characters."""

_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])|.", re.DOTALL)


def keys_of(data: bytes) -> list[str]:
    """Return the keys that a terminal has sent. Unknown sequences are left out."""
    found = _KEY.findall(data.decode("utf-8", "replace"))
    return [key for text in found if len(key := _SEQUENCES.get(text, text)) == 1 or key != text]


class Wish(Enum):
    """What a key asks for beside another picture."""

    NOTHING = "nothing"
    QUIT = "quit"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(slots=True)
class TopState:
    """What the keys have chosen."""

    sort: str = SORTS[0]
    scroll: int = 0
    """Rows of the member table above the first that is shown."""
    shows_help: bool = False
    asks: Wish = Wish.NOTHING
    """`PAUSE` or `RESUME` while the person is asked whether they mean it."""
    notice: str = ""
    """What came of the last request to pause or resume."""
    _num_visible: int = 1

    def fit(self, num_rows: int, num_visible: int) -> None:
        """Stay within a table of `num_rows`, of which `num_visible` fit."""
        self._num_visible = max(1, num_visible)
        self.scroll = max(0, min(self.scroll, num_rows - num_visible))

    def press(self, key: str, *, paused: bool) -> Wish:
        """Take in a key; return what it asks for.

        Args:
            key: One of `keys_of`.
            paused: The person has paused this node.
        """
        if self.asks is not Wish.NOTHING:
            asked, self.asks = self.asks, Wish.NOTHING
            if key != "q":
                return asked if key in ("y", "Y") else Wish.NOTHING
        self.notice = ""
        if key == "q":
            return Wish.QUIT
        if self.shows_help:
            self.shows_help = False
        elif key == "?":
            self.shows_help = True
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            self.scroll = 0
        elif key == "p":
            self.asks = Wish.RESUME if paused else Wish.PAUSE
        else:
            self._move(key)
        return Wish.NOTHING

    def _move(self, key: str) -> None:
        page = self._num_visible
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        if key == "home":
            self.scroll = 0
        elif key == "end":
            # `fit` takes it back to the last page.
            self.scroll = 1 << 30
        else:
            self.scroll = max(0, self.scroll + moves.get(key, 0))


class CurvePoint(NamedTuple):
    """One committed iteration."""

    iteration: int
    time_s: float
    """Seconds of the Unix epoch."""
    loss: float | None
    rate: float | None
    """Tokens a second."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Losses and rates of the run's iterations, as far as the node has told them."""

    steps: tuple[CurvePoint, ...] = ()
    generation: str = ""
    """Changes when the node takes back what it has told."""
    num_told: int = 0

    @property
    def request(self) -> dict[str, Any]:
        """What to ask the node for: what has happened since its last answer."""
        told = {"generation": self.generation, "num_steps": self.num_told}
        return {"command": "history", **told}

    def after(self, answer: Mapping[str, Any]) -> "Curves":
        """Return the curves after an answer to `request`, without what is malformed in it."""
        generation, told = answer.get("generation"), answer.get("steps")
        if not isinstance(generation, str) or not isinstance(told, list):
            return self
        goes_on = generation == self.generation
        earlier, num_told = (self.steps, self.num_told) if goes_on else ((), 0)
        steps = (*earlier, *filter(None, map(_step_of, told)))
        return Curves(steps[-_NUM_STEPS_MAX:], generation, num_told + len(told))

    @property
    def pace_s(self) -> float | None:
        """Seconds between two commits of late; None if they are not known."""
        if len(self.steps) < 2:
            return None
        first, last = self.steps[-_NUM_STEPS_FOR_PACE:][0], self.steps[-1]
        done, passed_s = last.iteration - first.iteration, last.time_s - first.time_s
        # The host's clock may have been set meanwhile.
        return passed_s / done if done > 0 and passed_s > 0 else None


def _step_of(told: object) -> CurvePoint | None:
    if not isinstance(told, list) or len(told) != 4:
        return None
    values = dict(zip(CurvePoint._fields, told, strict=True))
    iteration, time_s = number_in(values, "iteration"), number_in(values, "time_s")
    if iteration is None or time_s is None:
        return None
    return CurvePoint(int(iteration), time_s, number_in(values, "loss"), number_in(values, "rate"))


def left_s(status: Mapping[str, Any], curves: Curves) -> float | None:
    """Return the seconds until the run ends at its present pace; None if nobody can tell."""
    last, now, pace_s = number_in(status, "num_iterations"), status.get("iteration"), curves.pace_s
    if last is None or not isinstance(now, int) or pace_s is None:
        return None
    return max(0, last - now) * pace_s


def is_paused(status: Mapping[str, Any]) -> bool:
    """Return whether the person at this host has paused its node."""
    return mapping_in(status, "pausing").get("by_person") is True


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a line of at most `width` bars: the mean of each group of values, lowest to highest.

    Unknown values leave a gap.
    """
    num_columns = min(width, len(values))
    means: list[float | None] = []
    for index in range(num_columns):
        begin, end = (len(values) * i // num_columns for i in (index, index + 1))
        known = [value for value in values[begin:end] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    heights = [mean for mean in means if mean is not None]
    if not heights:
        return ""
    low, range_ = min(heights), max(heights) - min(heights)
    top = len(_BARS) - 1
    return "".join(
        " " if mean is None else _BARS[round(top * (mean - low) / range_) if range_ else top // 2]
        for mean in means
    )
