"""Why is the run slow? From the node's own iterations, and at a leader from those of the run.

The report of `decod analyse` counts if the records of all members are here. With the records of
one node, the answer says only what that node can know: how it spends its own time.
"""

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median

from decod.analysis.report import RunReport, report_of
from decod.daemon.iteration_pace import SENDING
from decod.obs.pace_texts import known_spent, slow_texts
from decod.obs.told import mapping_in, sequence_in
from decod.why.explanation import Explanation, Figure, WhyQuestion
from decod.why.node_records import NodeRecords
from decod.why.shares import (
    COLLECT,
    FASTER_DATA,
    SEND_LESS,
    SENDER_LESS,
    SENDING_SHARE,
    SHORT_WORK,
    TimeShares,
    costliest_hop,
    percent,
    shares_of,
)

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
