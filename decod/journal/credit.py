"""What nodes have done for runs: amounts, their sums by run, and their texts for people.

`credit_file` keeps them. This module imports nothing heavy: `decod status` must answer at once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal

from typing_extensions import override

RUNS_MAX = 1000
"""Most runs with a row of their own. Earlier ones share a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What was done for committed iterations."""

    num_microbatches: int = 0
    """Microbatches that a node of this folder has passed through its stage."""
    num_tokens: int = 0
    device_s: float = 0.0
    """How long the device has computed, in seconds."""
    sent_bytes: int = 0
    """Tensors of microbatches and of averages that others have received from here."""
    received_bytes: int = 0
    """The same tensors, in the other direction."""

    def __add__(self, more: "Credit") -> "Credit":
        return Credit(
            num_microbatches=self.num_microbatches + more.num_microbatches,
            num_tokens=self.num_tokens + more.num_tokens,
            device_s=self.device_s + more.device_s,
            sent_bytes=self.sent_bytes + more.sent_bytes,
            received_bytes=self.received_bytes + more.received_bytes,
        )

    @override
    def __str__(self) -> str:
        """Return what was done, in one line for people."""
        plural = "" if self.num_microbatches == 1 else "es"
        return (
            f"{self.num_microbatches:,} microbatch{plural}, {hours_text(self.device_s)} device"
            f" hours, {bytes_text(self.sent_bytes)} up"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCredit:
    """What was done in one run."""

    run_name: str
    node_name: str
    """Of the node that worked in it last."""
    first_s: float
    """When the first of it was counted, in seconds of the Unix epoch."""
    last_s: float
    credit: Credit

    def __add__(self, more: "RunCredit") -> "RunCredit":
        newer = max(self, more, key=lambda each: each.last_s)
        return RunCredit(
            run_name=newer.run_name,
            node_name=newer.node_name,
            first_s=min(self.first_s, more.first_s),
            last_s=newer.last_s,
            credit=self.credit + more.credit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRuns:
    """What was done in runs that have no row of their own any more."""

    num_runs: int = 0
    first_s: float = 0.0
    """When the first of it was counted. 0 if there are none."""
    credit: Credit = field(default_factory=Credit)

    def __add__(self, more: "EarlierRuns") -> "EarlierRuns":
        known = [each.first_s for each in (self, more) if each.num_runs]
        return EarlierRuns(
            num_runs=self.num_runs + more.num_runs,
            first_s=min(known, default=0.0),
            credit=self.credit + more.credit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRows:
    """The content of a ledger."""

    version: Literal[1] = 1
    runs: dict[str, RunCredit] = field(default_factory=dict)
    """By the id of the run."""
    earlier: EarlierRuns = field(default_factory=EarlierRuns)

    @property
    def num_runs(self) -> int:
        return len(self.runs) + self.earlier.num_runs

    @property
    def first_s(self) -> float:
        """When the first of it was counted, in seconds of the Unix epoch; 0 if there is none."""
        earlier = [self.earlier.first_s] if self.earlier.num_runs else []
        return min((*earlier, *(row.first_s for row in self.runs.values())), default=0.0)

    @property
    def total(self) -> Credit:
        return sum((each.credit for each in self.runs.values()), self.earlier.credit)

    def __add__(self, more: "CreditRows") -> "CreditRows":
        runs = dict(self.runs)
        for run_id, row in more.runs.items():
            runs[run_id] = runs[run_id] + row if run_id in runs else row
        return CreditRows(runs=runs, earlier=self.earlier + more.earlier)

    def trimmed(self, runs_max: int = RUNS_MAX) -> "CreditRows":
        """Return the same sums with at most so many rows: the oldest runs become one row."""
        by_age = sorted(self.runs, key=lambda run_id: self.runs[run_id].last_s)
        old = by_age[: max(0, len(by_age) - runs_max)]
        kept = {run_id: row for run_id, row in self.runs.items() if run_id not in {*old}}
        earlier = self.earlier
        for row in map(self.runs.__getitem__, old):
            earlier += EarlierRuns(num_runs=1, first_s=row.first_s, credit=row.credit)
        return CreditRows(runs=kept, earlier=earlier)


# --- texts --------------------------------------------------------------------------------------


def hours_text(seconds: float) -> str:
    """Return a length of time in hours: 2.1, or 0.003 if it is short."""
    hours = seconds / 3600
    return f"{hours:,.1f}" if hours >= 1 or not hours else f"{hours:.2g}"


def bytes_text(num_bytes: float) -> str:
    """Return an amount of data with a decimal unit, like 38 GB."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            amount = num_bytes / size
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def day_text(seconds: float) -> str:
    """Return the day of an instant of the Unix epoch, in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):
        return "?"


def describe_credit(rows: CreditRows) -> Mapping[str, float]:
    """Return the sums of a ledger, for `decod status --json`."""
    return {"num_runs": rows.num_runs, **asdict(rows.total)}


def credit_of(described: Mapping[str, Any]) -> Credit:
    """Return what `describe_credit` has described. What is no amount counts as nothing."""
    amounts = {each.name: described.get(each.name) for each in fields(Credit)}
    known: dict[str, Any] = {
        name: value for name, value in amounts.items() if isinstance(value, int | float)
    }
    return Credit(**known)
