"""Counters and gauges, named with their unit, without labels that grow with the run.

Only the event loop's thread writes them; reading a snapshot from another thread may see two
values of slightly different age, never a broken one.
"""

import math
import re
from dataclasses import dataclass, field

_NAME = re.compile(r"decod_[a-z][a-z0-9_]{0,80}\Z")


@dataclass(slots=True)
class Counter:
    """A number that only grows. Its name ends in `_total`."""

    name: str
    description: str
    value: float = 0.0

    def increase(self, amount: float = 1.0) -> None:
        assert amount >= 0, f"{self.name} by {amount}: a counter never falls"
        self.value += amount


@dataclass(slots=True)
class Gauge:
    """A number that goes up and down. NaN until it is set."""

    name: str
    description: str
    value: float = math.nan

    def set(self, value: float) -> None:
        self.value = value


@dataclass(slots=True)
class Metrics:
    """All numbers of one node; passed on explicitly, never global."""

    _metrics: dict[str, Counter | Gauge] = field(default_factory=dict)

    def counter(self, name: str, description: str) -> Counter:
        """Makes a counter, or returns the one of that name."""
        assert name.endswith("_total"), f"{name}: a counter's name ends in _total"
        metric = self._metrics.setdefault(name, Counter(_checked(name), description))
        assert isinstance(metric, Counter), f"{name} is a gauge"
        return metric

    def gauge(self, name: str, description: str) -> Gauge:
        """Makes a gauge, or returns the one of that name."""
        assert not name.endswith("_total"), f"{name}: _total is the ending of counters"
        metric = self._metrics.setdefault(name, Gauge(_checked(name), description))
        assert isinstance(metric, Gauge), f"{name} is a counter"
        return metric

    def snapshot(self) -> dict[str, float]:
        """Returns every value that has been set, by name, in the order of the names."""
        return {
            name: metric.value
            for name, metric in sorted(self._metrics.items())
            if not math.isnan(metric.value)
        }


def _checked(name: str) -> str:
    assert _NAME.match(name), f"{name}: metrics are called decod_<what>_<unit>"
    return name
