"""Why is the run slow? From the node's own iterations, and at a leader from those of the run.

The report of `decod analyse` counts if the records of all members are here. With the records of
one node, the answer says only what that node can know: how it spends its own time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from decod.daemon.status import SENDING
from decod.insight.analysis_report import RunReport, Selection, report_of
from decod.insight.why_evidence import Explanation, Figure, NodeRecords, WhyQuestion
from decod.journal.records import RoundRow
from decod.journal.told_status import (
    arrival_text,
    known_spent,
    mapping_in,
    sequence_in,
    slow_texts,
)
from decod.texts import clean_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the time of some iterations. `compute`, `data` and the three waits add up to 1."""

    first: int
    """Number of the first of these iterations."""
    last: int
    round_s: float
    """Mean length."""
    longest_s: float
    """Length of the longest one."""
    total_s: float
    """All together."""
    steps: float
    """Mean number of microbatches that passed this node's stage here."""
    compute: float
    data: float
    """Reading data."""
    wait_start: float
    """Waiting until the first microbatch begins here."""
    wait_passes: float
    """Waiting for tensors of other stages between passes."""
    wait_average: float
    """Waiting for the members of the stage in the average, and for the commit."""
    transfer: float
    """While tensors are on their way from here. It runs beside the others."""

    @property
    def wait(self) -> float:
        return self.wait_start + self.wait_passes + self.wait_average

    def figures(self) -> tuple[Figure, ...]:
        """Return the shares as figures of an answer."""
        what = f"in iterations {self.first} to {self.last}, of {self.round_s:.3g} s each"
        waits = (
            ("wait_start_share", self.wait_start, "until the first microbatch begins here"),
            ("wait_passes_share", self.wait_passes, "for tensors of other stages, between passes"),
            ("wait_average_share", self.wait_average, "for others in the average and the commit"),
        )
        long = self.longest_s / self.total_s
        is_long = long >= _LONG_MIN and self.total_s >= _LONG_ITERATIONS_MIN * self.round_s
        return (
            Figure(
                name="compute_share",
                value=round(self.compute, 4),
                text=f"{percent(self.compute)} computing, {what}",
            ),
            *(
                (_share("data_share", self.data, "reading data"),)
                if self.data >= _SHOWN_MIN
                else ()
            ),
            _share("wait_share", self.wait, "waiting:"),
            *(
                _share(name, share, f"waiting {text}", indent=True)
                for name, share, text in waits
                if share >= _SHOWN_MIN
            ),
            _share(
                "transfer_share",
                self.transfer,
                "sending tensors to other nodes, beside computing and waiting",
            ),
            Figure(
                name="num_microbatches",
                value=round(self.steps, 2),
                text=f"{self.steps:.3g} microbatches an iteration at this node",
            ),
            *((_longest(self.longest_s, long),) if is_long else ()),
        )


_SHOWN_MIN = 0.005
_LONG_MIN = 0.25
"""An iteration that takes this share of the time of all is told, if there are enough."""
_LONG_ITERATIONS_MIN = 10


def _longest(seconds: float, share: float) -> Figure:
    text = f"one iteration alone took {seconds:.3g} s, {percent(share)} of all this time"
    return Figure(name="longest_s", value=round(seconds, 4), text=text)


def _share(name: str, share: float, text: str, *, indent: bool = False) -> Figure:
    return Figure(
        name=name,
        value=round(share, 4),
        text=f"{'  ' if indent else ''}{percent(share)} {text}",
    )


def percent(share: float) -> str:
    """Return a share as text, like 42 %."""
    return f"{100 * share:.0f} %"


def shares_of(rounds: Selection | None) -> TimeShares | None:
    """Return how a node has spent its newest iterations; None if it has recorded none."""
    if rounds is None or not rounds.rows:
        return None
    rows = rounds.rows
    total_s = max(sum(row.round_s for row in rows), 1e-9)
    compute_s = data_s = start_s = average_s = sending_s = 0.0
    for row in rows:
        # What overlaps the round before must not make a share larger than the round.
        left_s = row.round_s
        busy_s = min(_compute_s(row), left_s)
        read_s = min(row.data_s or 0.0, left_s - busy_s)
        left_s -= busy_s + read_s
        began_s = min(row.matchmaking_s or 0.0, left_s)
        left_s -= began_s
        averaged_s = (row.averaging_s or 0.0) - (row.averaging_compute_s or 0.0)
        waited_s = min(max(0.0, averaged_s - (row.optimizer_s or 0.0)), left_s)
        compute_s, data_s = compute_s + busy_s, data_s + read_s
        start_s, average_s = start_s + began_s, average_s + waited_s
        sent_s = (row.sending_s or 0.0) + (row.average_sending_s or 0.0)
        sending_s += min(sent_s, row.round_s)
    return TimeShares(
        first=min(row.round for row in rows),
        last=max(row.round for row in rows),
        round_s=total_s / len(rows),
        longest_s=max(row.round_s for row in rows),
        total_s=total_s,
        steps=sum(row.steps or 0 for row in rows) / len(rows),
        compute=compute_s / total_s,
        data=data_s / total_s,
        wait_start=start_s / total_s,
        wait_average=average_s / total_s,
        wait_passes=max(0.0, total_s - compute_s - data_s - start_s - average_s) / total_s,
        transfer=sending_s / total_s,
    )


def _compute_s(row: RoundRow) -> float:
    passes_s = (row.forward_s or 0.0) + (row.backward_s or 0.0)
    return (
        passes_s
        + (row.averaging_compute_s or 0.0)
        + (row.optimizer_s or 0.0)
        + (row.other_s or 0.0)
    )


# --- what to do about waiting -------------------------------------------------------------------

SENDING_SHARE = 0.7
"""A node that sends for this share of the time is held up by its sends."""
COLLECT = (
    "collect the folder `metrics` of all nodes and run `decod analyse` on them: it says which"
    " node or link this node waits for"
)
SEND_LESS = (
    'set activations.compression = "int8" in the run file, or give this node a faster uplink'
)
SENDER_LESS = (
    'set activations.compression = "int8" in the run file, or ask the owner of that node for a'
    " faster uplink"
)
SHORT_WORK = (
    "add microbatches (batch.num_microbatches) and capacity, so that more of them are on their way"
    " at a time"
)
FASTER_DATA = "put the prepared data on a faster disk, or add a data node (batch.num_data_nodes)"


# --- who waits for whom -------------------------------------------------------------------------


def costliest_hop(status: Mapping[str, Any] | None) -> Figure | None:
    """Return the costliest hop of the flows through this node; None if none is known.

    The costs are those by which flows are chosen. A relay knows only the hops to and from itself.
    """
    if status is None:
        return None
    own, names = mapping_in(status, "node").get("id"), _names(status)
    hops: dict[tuple[str, str], float] = {}
    for flow in sequence_in(status, "flows"):
        path, costs = flow.get("path"), flow.get("costs_s")
        if not (isinstance(path, list) and isinstance(costs, list) and own in path):
            continue
        if not all(isinstance(cost, int | float) for cost in costs):
            continue
        for begin, end, cost in zip(path, path[1:], costs, strict=False):
            hops[str(begin), str(end)] = cost
    if not hops:
        return None
    (begin, end), cost_s = max(hops.items(), key=lambda item: item[1])
    return Figure(
        name="costliest_hop_s",
        value=round(cost_s, 6),
        text=f"the costliest hop of this node's flows is from {_name(begin, own, names)} to"
        f" {_name(end, own, names)}: {cost_s:.3g} s for a microbatch, with computing at its ends",
    )


def _name(node: str, own: object, names: Mapping[str, str]) -> str:
    return "this node" if node == own else names.get(node, clean_text(node, limit=8))


def _names(status: Mapping[str, Any]) -> dict[str, str]:
    nodes = [
        node for stage in sequence_in(status, "stages") for node in sequence_in(stage, "nodes")
    ]
    return {str(node.get("id")): clean_text(node.get("name"), limit=40) for node in nodes}


WELL_SHARE = 0.7
"""A device that computes for this share of the time is what the run can do, as in `decod
analyse`."""
REPEATED_SHARE = 0.25
"""From this share of the time on, repeated attempts are what makes a run slow."""

_MEMBERS_SHOWN_MAX = 8

_RATES_MIN = 20
"""Iterations that a comparison of rates needs."""


def why_slow(records: NodeRecords) -> Explanation:
    """Answer what takes most of an iteration's time."""
    shares = shares_of(records.rounds)
    if shares is None or records.rounds is None:
        return Explanation(
            question=WhyQuestion.SLOW,
            applies=False,
            cause="the records don't tell: this node has recorded no iteration"
            + (" of the run that it is in" if records.status is not None else ""),
            remedy="ask again when the node has taken part in a few iterations",
            known=False,
        )
    lost = lost_share(records)
    report = report_of(records.rounds)
    figures = (
        *shares.figures(),
        *_repeats(records, lost),
        *_rates(records),
        *(hop for hop in (costliest_hop(records.status),) if hop is not None),
        *_arrival(records),
        *_spent(records),
        *(Figure(name="host", value=None, text=text) for text in report.warnings),
    )
    trains = records.status is not None and records.status.get("run_state") in (
        "training",
        "aggregating",
    )
    cause, remedy, known = _cause_of(records, shares, lost, report)
    return Explanation(
        question=WhyQuestion.SLOW,
        applies=trains
        and (
            shares.compute < WELL_SHARE
            or (lost or 0.0) >= REPEATED_SHARE
            or bool(slow_texts(records.status))
        ),
        cause=cause,
        remedy=remedy,
        known=known,
        figures=figures,
    )


def _arrival(records: NodeRecords) -> list[Figure]:
    """Return how late averages count that travel, if the leader's status says so."""
    sync = mapping_in(records.status, "sync")
    text = arrival_text(sync)
    return [Figure(name="average_delay", value=sync["delay"], text=text)] if text else []


def _spent(records: NodeRecords) -> list[Figure]:
    """Return what members say that an iteration costs them."""
    told = known_spent(sequence_in(records.status, "stages"))
    return [
        Figure(name="member", value=name, text=f"{name} {text}")
        for name, text in told[:_MEMBERS_SHOWN_MAX]
    ]


def of_others(records: NodeRecords) -> tuple[str, str] | None:
    """Return who holds the run up, and what to do about it, if its leader has said so."""
    texts, named = slow_texts(records.status), sequence_in(records.status, "slow")
    if not texts:
        return None
    first = named[0]
    own = first.get("id") == mapping_in(records.status, "node").get("id")
    if first.get("by") == SENDING:
        remedy = SEND_LESS if own else SENDER_LESS
    else:
        remedy = (
            f"start another relay in stage {first.get('stage_index')}, or give that node a faster"
            " device"
        )
    return "; ".join(texts), remedy


def _cause_of(
    records: NodeRecords, shares: TimeShares, lost: float | None, report: RunReport
) -> tuple[str, str, bool]:
    """Return the cause, the remedy, and whether the records tell the cause."""
    if lost is not None and lost >= REPEATED_SHARE:
        return (
            f"{percent(lost)} of the run's time goes into attempts that failed, and into pauses"
            " between iterations",
            "see who was lost and why in `decod status`, and keep two relays in every stage",
            True,
        )
    if not report.unknown:
        # The records of all members are here.
        change = report.changes[0].what if report.changes else ""
        remedy = change or "no change that the model knows would gain more than 2 %"
        return report.verdict.rstrip("."), remedy, True
    if (slow := of_others(records)) is not None:
        return *slow, True
    if shares.compute >= WELL_SHARE:
        return (
            f"this node's device computes {percent(shares.compute)} of the time, so it can't be"
            " much faster",
            "ask the organiser for another relay in this stage",
            True,
        )
    if shares.transfer >= SENDING_SHARE:
        cause = f"this node's sends hold it up: they take {percent(shares.transfer)} of the time"
        return cause, SEND_LESS, True
    return _of_own_time(shares, records)


def _of_own_time(shares: TimeShares, records: NodeRecords) -> tuple[str, str, bool]:
    """Return what takes most of this node's time, as `_cause_of` does."""
    parts = {
        "compute": shares.compute,
        "data": shares.data,
        "start": shares.wait_start,
        "passes": shares.wait_passes,
        "average": shares.wait_average,
    }
    most = max(parts, key=lambda name: parts[name])
    share = percent(parts[most])
    others = "which of the other nodes or links it waits for, its own records can't tell"
    collect = COLLECT
    if records.status is not None and records.status.get("slow") == []:
        # The leader has heard of all, and nobody is much busier than the others.
        others = "no member computes or sends for much longer than the others"
        collect = SHORT_WORK
    match most:
        case "compute":
            cause = f"computing takes most of this node's time ({share})"
            return cause, "ask the organiser for another relay in this stage", True
        case "data":
            cause = f"reading data takes most of this node's time ({share})"
            return cause, FASTER_DATA, True
        case "average":
            return (
                f"the average and the commit take most of this node's time ({share})",
                'average less often (sync.method = "diloco"), or send averages as bf16'
                ' (reduction.wire_dtype = "bfloat16")',
                True,
            )
        case "passes":
            cause = f"this node waits for other stages ({share} of the time); {others}"
            return cause, collect, False
        case _:
            cause = f"this node waits for its first microbatch ({share} of the time); {others}"
            return cause, collect, False


# --- a leader's iterations ----------------------------------------------------------------------


def lost_share(records: NodeRecords) -> float | None:
    """Return the share of the time between commits that was no successful attempt.

    None if this node has no rows of the run's iterations.
    """
    times = _times(records)
    spans = [
        (end_s - begin_s, duration_s)
        for (begin_s, _), (end_s, duration_s) in pairwise(times)
        if end_s > begin_s
    ]
    total_s = sum(interval for interval, _ in spans)
    if not total_s:
        return None
    useful_s = sum(min(interval, duration) for interval, duration in spans)
    return 1.0 - useful_s / total_s


def _times(records: NodeRecords) -> list[tuple[float, float]]:
    """Return when each iteration was committed, and how long its last attempt took."""
    found = []
    for row in records.iterations:
        try:
            committed_s = datetime.fromisoformat(row["time"]).timestamp()
            found.append((committed_s, float(row["duration_s"])))
        except (KeyError, ValueError, TypeError):
            continue
    return found


def _numbers(records: NodeRecords, column: str) -> list[float]:
    found = []
    for row in records.iterations:
        try:
            found.append(float(row[column]))
        except (KeyError, ValueError, TypeError):
            continue
    return found


def _repeats(records: NodeRecords, lost: float | None) -> list[Figure]:
    """Return what failed attempts have cost."""
    figures = []
    attempts = _numbers(records, "attempt")
    if attempts:
        more = sum(attempt > 1 for attempt in attempts)
        text = f"{more} of the last {len(attempts)} iterations needed more than one attempt"
        figures.append(Figure(name="num_repeated", value=more, text=text))
        if lost is not None:
            text = f"{percent(lost)} of the time between commits is no successful attempt"
            figures.append(Figure(name="lost_share", value=round(lost, 4), text=text))
        if era := max(_numbers(records, "era"), default=0.0):
            times = "once" if era == 1 else f"{era:.0f} times"
            text = f"the run has gone back {times}, and has repeated iterations for that"
            figures.append(Figure(name="era", value=era, text=text))
        return figures
    # A member knows which attempts began, and which steps it took.
    opened = {
        str(each.fields.get("iteration"))
        for each in records.of_this_life
        if each.event == "iteration.opened"
    }
    repeated = {each for each in opened if not each.endswith(".1")}
    if opened:
        text = f"{len(repeated)} of {len(opened)} attempts since this node started were repeats"
        figures.append(Figure(name="num_repeated", value=len(repeated), text=text))
    return figures


def _rates(records: NodeRecords) -> list[Figure]:
    """Return how fast the run is, and how fast it was, if the leader's iterations tell."""
    rates = _numbers(records, "tokens_per_s")
    if len(rates) < _RATES_MIN:
        return []
    now, before = _halves(rates)
    text = (
        f"{now:,.0f} tokens/s in the newest half of {len(rates)} iterations, {before:,.0f} before"
    )
    return [Figure(name="tokens_per_s", value=round(now, 1), text=text)]


def _halves(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the newer and of the older half."""
    middle = len(values) // 2
    return median(values[middle:]), median(values[:middle])
