"""What a check has found, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a check."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    """The target, if more is better."""
    at_most: float | None = None
    """The target, if less is better."""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached. None: there is none."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a check."""

    check: str
    duration_s: float
    measures: Sequence[Measure] = ()
    failure: str = ""
    """Why it did not end as it should; empty if it did."""


def as_json(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything for a file."""
    checks = []
    for outcome in outcomes:
        found = asdict(outcome)
        found["measures"] = [
            {**asdict(measure), "reached": measure.reached} for measure in outcome.measures
        ]
        checks.append(found)
    return {"facts": dict(facts), "checks": checks}


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each number, and one for each failure."""
    lines = [f"{'check':12} {'measured':44} {'value':>12} {'unit':9} {'target':>9}  result"]
    for outcome in outcomes:
        lines += [_line(outcome.check, measure) for measure in outcome.measures]
        if outcome.failure:
            lines.append(f"{outcome.check:12} FAILED after {outcome.duration_s:.0f} s: ")
            lines[-1] += outcome.failure.strip()
        else:
            lines.append(f"{outcome.check:12} done in {outcome.duration_s:.0f} s")
    return "\n".join(lines)


def _line(check: str, measure: Measure) -> str:
    target = ""
    if measure.at_least is not None:
        target = f">={measure.at_least:g}"
    elif measure.at_most is not None:
        target = f"<={measure.at_most:g}"
    result = {True: "ok", False: "MISSED", None: ""}[measure.reached]
    value = f"{measure.value:.4g}"
    return f"{check:12} {measure.name:44} {value:>12} {measure.unit:9} {target:>9}  {result}"
