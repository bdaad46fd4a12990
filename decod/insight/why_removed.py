"""Why was this node removed? From its log, and from what the leader tells while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from decod.clocks import wall_clock
from decod.insight.why_evidence import Explanation, Figure, LogEvent, NodeRecords, WhyQuestion
from decod.journal.event_specs import render_note
from decod.journal.told_status import mapping_in, sequence_in
from decod.protocol.core.effects import StopReason
from decod.texts import clean_text, span

RECENT_S = 600.0
"""A removal of this age still applies although the node is back, as in `decod status`."""

_BEFORE_S = 60.0
"""Warnings of this time before the end are figures of the answer."""
_WARNINGS_MAX = 3
_GAP_MIN_S = 5.0
"""A shorter time without a line in the log says nothing."""

_CAUSES: dict[str, tuple[str, str]] = {
    StopReason.REMOVED.value: (
        "the run went on without this node",
        "run `decod doctor`, and keep this host awake; if it stalls under load, ask the organiser"
        " to raise protocol.heartbeat_timeout_s",
    ),
    StopReason.LEADER_LOST.value: (
        "this node lost the leader, and nobody else led the run",
        "run `decod doctor`; if it finds nothing, ask the organiser whether the leader runs",
    ),
    StopReason.SUPERSEDED.value: (
        "this node led, and the others took it for dead and elected another leader",
        "run `decod doctor`, and keep this host awake",
    ),
    StopReason.CRIPPLED.value: (
        "this node's compute process failed",
        "read compute.log in the state folder; if memory ran out, start the node with a smaller"
        " --capacity",
    ),
    StopReason.BANNED.value: (
        "the run's organiser has banned this node",
        "ask the organiser, who can lift the ban with `decod node unban`",
    ),
    StopReason.REFUSED.value: ("the leader refused this node", "ask the run's organiser"),
    StopReason.FAILED.value: (
        "the run could not go on",
        "read node.log in the state folder, and ask the run's organiser",
    ),
}
"""By the reason in `node.stopped`: what it means, and the remedy."""


@dataclass(frozen=True, slots=True)
class End:
    """How a life of a node in its run ended."""

    index: int
    """Of its event in the log."""
    time_s: float
    reason: str
    """The value of a `StopReason`."""
    detail: str


def last_end(events: Sequence[LogEvent]) -> End | None:
    """Return the newest end of a life that the log tells; None if it tells none."""
    for index in reversed(range(len(events))):
        each = events[index]
        if each.event == "node.stopped":
            reason, _, detail = str(each.fields.get("reason", "")).partition(": ")
            return End(index, each.time_s, reason, clean_text(detail))
    return None


def is_back(events: Sequence[LogEvent], end: End) -> bool:
    """Return whether the node has taken part in the run after an end."""
    return any(each.event == "iteration.opened" for each in events[end.index :])


def last_removal(events: Sequence[LogEvent]) -> End | None:
    """Return the newest end that the operator did not ask for; None if there is none."""
    upto = len(events)
    while (end := last_end(events[:upto])) is not None:
        if end.reason in _CAUSES:
            return end
        upto = end.index
    return None


def why_removed(records: NodeRecords) -> Explanation:
    """Answer why the node was removed from its run."""
    events, end = records.events, last_removal(records.events)
    if end is None:
        return _not_removed(records)
    back = is_back(events, end)
    cause, remedy = _CAUSES[end.reason]
    told = _told_by_leader(records)
    if told:
        cause = f"{cause}; the leader tells why: {told}"
    elif end.detail:
        cause = f"{cause}: {end.detail}"
    age_s = max(0.0, wall_clock() - end.time_s)
    state = "is back in the run" if back else "has not been in the run since"
    figures = [
        Figure(name="removed_s", value=round(end.time_s, 3), text=f"at {_at(end.time_s)}"),
        Figure(name="age_s", value=round(age_s, 1), text=f"{span(age_s)} ago; the node {state}"),
        *_gap(events, end),
        *_warnings(events, end),
    ]
    known = bool(told) or end.reason not in (StopReason.REMOVED.value, StopReason.SUPERSEDED.value)
    if not known:
        figures.append(
            Figure(
                name="leaders_reason",
                value=None,
                text="only the leader's log says why it took this node for lost (member.lost)",
            )
        )
    return Explanation(
        question=WhyQuestion.REMOVED,
        applies=not back or age_s <= RECENT_S,
        cause=cause,
        remedy=remedy,
        known=known,
        figures=tuple(figures),
    )


def _not_removed(records: NodeRecords) -> Explanation:
    if not records.events:
        return Explanation(
            question=WhyQuestion.REMOVED,
            applies=False,
            cause="this node's records don't say whether it was removed: its log is empty or can't"
            " be read",
            remedy="make node.log in the state folder readable, or ask the organiser for the"
            " leader's node.log",
            known=False,
        )
    first_s = records.events[0].time_s
    return Explanation(
        question=WhyQuestion.REMOVED,
        applies=False,
        cause=f"this node was not removed, as far as its log goes back ({_at(first_s)})",
        remedy="",
    )


def _told_by_leader(records: NodeRecords) -> str:
    """Return what the leader has told of this node lately; empty if nothing."""
    node = mapping_in(records.status, "node")
    own = str(node.get("id") or "")[:8]
    if not own:
        return ""
    kinds = ("member.lost", "member.aside", "member.banned", "relay.lied", "candidate.unreachable")
    texts = [
        clean_text(one.get("text"))
        for one in sequence_in(records.status, "recent")
        if one.get("event") in kinds and f"({own})" in str(one.get("text"))
    ]
    return texts[-1] if texts else ""


def _gap(events: Sequence[LogEvent], end: End) -> list[Figure]:
    """Return for how long the node had logged nothing before it ended, if that was long."""
    before = [each for each in events[: end.index] if each.event in ("iteration.opened", *_ALIVE)]
    if not before:
        return []
    gap_s = end.time_s - before[-1].time_s
    if gap_s < _GAP_MIN_S:
        return []
    return [
        Figure(
            name="silent_s",
            value=round(gap_s, 1),
            text=f"{span(gap_s)} without a step or an iteration at this node before that",
        )
    ]


_ALIVE = ("step.committed", "node.started")


def _warnings(events: Sequence[LogEvent], end: End) -> list[Figure]:
    """Return the last warnings of the node's own log before the end."""
    late = [
        each
        for each in events[: end.index]
        if each.is_warning and end.time_s - each.time_s <= _BEFORE_S
    ]
    return [
        Figure(
            name=each.event,
            value=round(end.time_s - each.time_s, 1),
            text=f"{span(end.time_s - each.time_s)} before: {text_of(each)}",
        )
        for each in late[-_WARNINGS_MAX:]
    ]


def text_of(event: LogEvent) -> str:
    """Return an event of the log as one line for people."""
    fixed = ("time", "level", "event", "node_id", "count", "traceback")
    fields = {key: value for key, value in event.fields.items() if key not in fixed}
    return render_note(event.event, fields)


def _at(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
