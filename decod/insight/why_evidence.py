"""What `decod why` answers with, and the records of a node that it finds the answer in.

The records are the node's log, its metrics, a leader's iterations, and its status. Files may be
torn, rotated, missing or unreadable. What can't be read is named, and the rest is used. Only the
newest part of a long log is read.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from decod.daemon.control import ask
from decod.errors import DataError, DecodError
from decod.files import read_beginning, read_end
from decod.insight.analysis_report import Selection, select
from decod.insight.round_files import read_records
from decod.journal.iteration_file import FILE_NAME as ITERATIONS_FILE
from decod.journal.journal_file import EARLIER_FOLDER, FOLDER
from decod.journal.logs import NUM_OLD_LOGS
from decod.texts import why_of


class WhyQuestion(StrEnum):
    """What an operator can ask."""

    IDLE = "idle"
    """Why is my node idle?"""
    SLOW = "slow"
    """Why is the run slow?"""
    REMOVED = "removed"
    """Why was I removed?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number that supports an answer."""

    name: str
    """For programs, with its unit last."""
    value: float | str | None
    text: str
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the records say."""

    question: WhyQuestion
    applies: bool
    """Whether the node is idle, the run slow, or the node was removed, now or lately."""
    cause: str
    """One sentence, without its full stop."""
    remedy: str
    """One thing to do. Empty if nothing needs to be done."""
    known: bool = True
    """Whether the records tell the cause."""
    figures: tuple[Figure, ...] = field(default=())


T = TypeVar("T")

LOG_FILE = "node.log"
LOG_READ_MAX_BYTES = 32 << 20
"""Of the newest log. Older records say nothing of now."""
NUM_ITERATIONS_MAX = 100

_ITERATIONS_MAX_BYTES = 64 << 20
_STATUS_TIMEOUT_S = 5.0
_NODE_COMMANDS = (b"decod join\n", b"decod leader\n")
"""First lines of a node's reports."""
_LEVELS_KEPT = ("warning", "error")
_EVENTS_KEPT = (
    *("node.started", "node.stopped", "node.draining", "node.reconnecting"),
    *("node.paused", "node.resumed", "run.entered", "run.finished"),
    *("stage.assigned", "iteration.opened", "step.committed"),
)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line of the node's log."""

    time_s: float
    """Seconds of the Unix epoch by the host's clock."""
    event: str
    fields: Mapping[str, Any]

    @property
    def is_warning(self) -> bool:
        return self.fields.get("level") in _LEVELS_KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecords:
    """All that can be read about one node. The oldest of anything comes first."""

    state_dir: Path
    status: Mapping[str, Any] | None = None
    """What the daemon has answered. None: no daemon answers."""
    events: Sequence[LogEvent] = ()
    rounds: Selection | None = None
    """The newest iterations of the newest run. None: none are recorded."""
    iterations: Sequence[Mapping[str, str]] = ()
    """At a leader: the newest rows of `iterations.csv`."""
    crashes: Sequence[tuple[str, float]] = ()
    """The node's reports of unexpected errors: name, and when each was written."""
    unread: list[str] = field(default_factory=list)
    """What could not be read, and why."""

    @property
    def of_this_life(self) -> Sequence[LogEvent]:
        """The events since the node last started, with that."""
        starts = [i for i, each in enumerate(self.events) if each.event == "node.started"]
        return self.events[starts[-1] :] if starts else self.events

    @property
    def is_empty(self) -> bool:
        return self.status is None and not self.events and self.rounds is None


def records_of(state_dir: Path) -> NodeRecords:
    """Return what a node has recorded in its state folder, and what it says now.

    Raises:
        DataError: There is nothing (E-DAT-053).
    """
    unread: list[str] = []
    status = _status(state_dir, unread)
    rounds = _reading("metrics", lambda: _rounds(state_dir, status), unread)
    found = NodeRecords(
        state_dir=state_dir,
        status=status,
        events=_reading(LOG_FILE, lambda: [*_events(state_dir)], unread) or (),
        rounds=rounds,
        iterations=_reading(ITERATIONS_FILE, lambda: _iterations(state_dir, rounds), unread) or (),
        crashes=_reading("crash reports", lambda: _crashes(state_dir), unread) or (),
        unread=unread,
    )
    if found.is_empty:
        raise DataError(
            f"no node has left records in {state_dir}",
            why=unread[0] if unread else "no daemon answers there, and there is no log",
            fix="name the node's folder with --state-dir",
            code="E-DAT-053",
        )
    return found


def _reading(what: str, read: Callable[[], T], unread: list[str]) -> T | None:
    """Return what `read` returns; None if that fails, which is added to `unread`."""
    try:
        return read()
    except (OSError, ValueError, csv.Error) as error:
        unread.append(f"{what}: {why_of(error)}")
    except DecodError as error:
        unread.append(f"{what}: {error.why}")
    return None


def _status(state_dir: Path, unread: list[str]) -> Mapping[str, Any] | None:
    try:
        status = ask(state_dir, {"command": "status"}, timeout_s=_STATUS_TIMEOUT_S)
    except DecodError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            unread.append(f"status: {error.why}")
        return None
    return status


def _rounds(state_dir: Path, status: Mapping[str, Any] | None) -> Selection | None:
    """Return the newest rounds, of the run that the daemon is in, if it is in one."""
    folders = [state_dir / name for name in (FOLDER, EARLIER_FOLDER)]
    if not (there := [folder for folder in folders if folder.is_dir()]):
        return None
    try:
        records = read_records(there)
    except DataError as error:
        if error.code == "E-DAT-041":
            return None
        raise
    run = None if status is None else status.get("run_id")
    if run is not None and all(row.run != run for row in records.rounds):
        return None
    return select(records, run=run or records.rounds[-1].run)


def _iterations(state_dir: Path, rounds: Selection | None) -> list[dict[str, str]]:
    """Return the newest rows of the run's iterations; none if this node has not led it."""
    if rounds is None:
        return []
    path = state_dir / "runs" / rounds.run / ITERATIONS_FILE
    try:
        text = read_beginning(path, _ITERATIONS_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []
    rows = [row for row in csv.DictReader(text.splitlines()) if None not in row.values()]
    return rows[-NUM_ITERATIONS_MAX:]


def _crashes(state_dir: Path) -> list[tuple[str, float]]:
    """Return name and age of the node's reports. Other commands write theirs there, too."""
    return [
        (path.name, path.stat().st_mtime)
        for path in sorted(state_dir.glob("crash-*.txt"))
        if read_beginning(path, 64).startswith(_NODE_COMMANDS)
    ]


# --- the log ------------------------------------------------------------------------------------


def _events(state_dir: Path) -> Iterator[LogEvent]:
    for line in newest_lines(state_dir / LOG_FILE, LOG_READ_MAX_BYTES):
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fields = json.loads(line)
            event = fields["event"]
            if event in _EVENTS_KEPT or fields.get("level") in _LEVELS_KEPT:
                time_s = datetime.fromisoformat(fields["time"]).timestamp()
                yield LogEvent(time_s, str(event), fields)


def newest_lines(path: Path, size_max_bytes: int) -> list[bytes]:
    """Return the newest whole lines of a rotated log, the oldest first.

    Raises:
        OSError: A part that is there can't be read.
    """
    parts: list[bytes] = []
    left = size_max_bytes
    for part in log_parts(path):
        if left <= 0:
            break
        parts.append(read_end(part, left))
        left -= len(parts[-1])
    return b"".join(reversed(parts)).splitlines()


def log_parts(path: Path) -> list[Path]:
    """Return the parts of a rotated log that exist, the newest first."""
    numbered = [path.with_name(f"{path.name}.{age}") for age in range(1, NUM_OLD_LOGS + 1)]
    return [part for part in (path, *numbered) if os.path.lexists(part)]
