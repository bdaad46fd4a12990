"""What comes of the points of a grid."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from decod.lab.study.grid import Point

ACCURACY_TOLERANCE = 0.06
"""Accuracies that differ by less are the same: repeated runs differ by as much from their mean."""
TIME_TOLERANCE = 0.05
"""The same for times, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """One point's result."""

    point: Point
    runtime_s: float
    """From the first step to the end of the slowest host."""
    accuracy: float
    """0 to 1, in training, over the last quarter of the steps. Of the best host."""
    loss: float
    """The same."""
    optimizer_s: float
    """In `step()`: adding up, waiting, applying. Mean of the hosts."""
    wait_s: float = 0.0
    """The part of it in which a host waited. Mean of the hosts."""
    sent_bytes: int = 0
    """Of averages. Mean of the hosts."""
    rounds: int = 0
    whole_rounds: float = 1.0
    """Share of the recorded rounds in which all hosts took part."""
    averaging_s: float = 0.0
    """From a full batch to the average, mean of the recorded rounds."""
    dropped: int = 0
    """Samples of all hosts."""

    @property
    def sent_bytes_per_s(self) -> float:
        return self.sent_bytes / self.runtime_s

    def to_json(self) -> dict[str, Any]:
        return {"name": self.point.name, **asdict(self)}


class Results:
    """Results by their points.

    Args:
        results: Of a grid, perhaps not of all its points.
    """

    def __init__(self, results: Iterable[PointResult]) -> None:
        self._by_point = {result.point: result for result in results}

    def __iter__(self) -> Iterator[PointResult]:
        return iter(self._by_point.values())

    def find(self, point: Point) -> PointResult | None:
        """Return a point's result, if it was run."""
        return self._by_point.get(point)

    def pairs(self, **changes: Any) -> list[tuple[PointResult, PointResult]]:
        """Return all results whose points differ only by these changes: before and after."""
        found = []
        for result in self:
            other = self.find(replace(result.point, **changes))
            if other is not None and other is not result:
                found.append((result, other))
        return found
