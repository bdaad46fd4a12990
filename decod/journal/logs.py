"""Two views of the same records: JSON lines in a file, short text on the terminal.

Records come from `log_note` (events of the core and of the daemon) or from plain `logging` calls
of libraries. Strings are cleaned before they are written, because many come from peers. On a full
disk or a closed terminal, records are lost and counted, and nothing else happens. A warning that
comes again and again is shown only now and then, with its count.
"""

import errno
import json
import logging
import logging.handlers
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from decod.errors import HardwareError
from decod.journal.event_specs import NUM_FIELDS_MAX, event_level, render_note
from decod.journal.journal import JournalEntry
from decod.texts import clean_text, plain_value

LOG_SIZE_MAX_BYTES = 16 * 1024 * 1024
NUM_OLD_LOGS = 3
LOGGER_NAME = "decod"

_NODE_ID = re.compile(r"[a-z2-7]{52}")
_ID_SHOWN = 8
"""Characters of a node id that people are shown."""

_LEVELS = {"DEBUG": "debug", "INFO": "", "WARNING": "warning", "ERROR": "error"}


@dataclass(slots=True)
class LogContext:
    """Fields that every record carries, like `node_id` and `stage_index`. They may change."""

    fields: dict[str, object] = field(default_factory=dict)
    name_of: Callable[[str], str | None] = lambda _: None
    """Returns the name of the node with this id, if known. The text log shows it beside the id."""

    def use_names(self, name_of: Callable[[str], str | None]) -> None:
        """Name other nodes as `name_of` does, which takes their ids, from now on."""
        self.name_of = name_of

    def named(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return fields with ids of nodes shortened, and the names of those that are known."""
        named = dict(list(fields.items())[:NUM_FIELDS_MAX])
        for key, value in named.items():
            if not isinstance(value, str):
                continue
            if name := self.name_of(value):
                named[key] = f"{name} ({value[:_ID_SHOWN]})"
            elif _NODE_ID.fullmatch(value):
                named[key] = value[:_ID_SHOWN]
        return named


def _record_fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, the fields, and the context."""

    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = dict(list(_record_fields(record).items())[:NUM_FIELDS_MAX])
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", None),
        }
        line |= {key: plain_value(value) for key, value in self._context.fields.items()}
        line |= {clean_text(key): plain_value(value) for key, value in fields.items()}
        if line["event"] is None:
            line |= {"event": "log.written", "logger": record.name}
            line["message"] = clean_text(record.getMessage(), limit=1000)
        if count := repeated(record):
            line["count"] = count
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[:8000]
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """`12:03:41 warning brave-otter (k7q2) is silent`: local time, level if not info, text."""

    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    @override
    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "event", None)
        text = (
            render_note(event, self._context.named(_record_fields(record)))
            if isinstance(event, str)
            else clean_text(record.getMessage(), limit=1000)
        )
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = _LEVELS.get(record.levelname, record.levelname.lower())
        count = repeated(record)
        often = f"({count} times within a minute)" if count else ""
        return " ".join(part for part in (time, level, text, often) if part)


class _CountingHandler(logging.Handler):
    """A handler that counts the records that it can't write, instead of printing a traceback."""

    num_lost = 0

    @override
    def close(self) -> None:
        with suppress(OSError):  # Closing writes the rest, which may find no room either.
            super().close()

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        self.num_lost += 1


class _FileHandler(_CountingHandler, logging.handlers.RotatingFileHandler):
    pass


class Terminal(Protocol):
    """The target of the text log."""

    def write(self, text: str, /) -> object:
        """Write a text."""

    def flush(self) -> object:
        """Make all written text visible."""


class _TerminalHandler(_CountingHandler, logging.StreamHandler[Terminal]):
    pass


def set_up_logs(
    *,
    file: Path | None,
    terminal_level: int = logging.INFO,
    context: LogContext | None = None,
    terminal: Terminal | None = None,
) -> logging.Logger:
    """Direct records to a file and the terminal. Another call replaces both.

    Args:
        file: Gets all records from DEBUG up, as JSON lines. It is rotated: at most 4 files of 16
            MiB. None: no file.
        terminal_level: Lowest level that the terminal shows.
        context: Fields of every line in the file, and names of nodes for the terminal.
        terminal: Gets the text; stderr if absent.

    Returns:
        The logger `decod`, for `log_note`.

    Raises:
        HardwareError: The file cannot be opened.
    """
    context, throttle = context or LogContext(), Throttle()
    logger = logging.getLogger(LOGGER_NAME)
    close_logs()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _refuse_pipe(file)
            handler = _FileHandler(
                file, maxBytes=LOG_SIZE_MAX_BYTES, backupCount=NUM_OLD_LOGS, encoding="utf-8"
            )
        except OSError as error:
            raise HardwareError(
                f"cannot write the log {file}",
                why=error.strerror or type(error).__name__,
                fix="free space, or choose another folder with --state-dir",
                code="E-HW-010",
            ) from None
        handler.setFormatter(JsonFormatter(context))
        handler.addFilter(throttle)
        logger.addHandler(handler)
    text = _TerminalHandler(terminal or sys.stderr)
    text.setLevel(terminal_level)
    text.setFormatter(TextFormatter(context))
    text.addFilter(throttle)
    logger.addHandler(text)
    return logger


def _refuse_pipe(path: Path) -> None:
    """Raise OSError for a named pipe: opening it would wait for a reader."""
    if path.is_fifo():
        raise OSError(errno.EINVAL, f"{path.name} is no ordinary file")


def close_logs() -> None:
    """Close what `set_up_logs` opened."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class NodeLog:
    """The view of the journal that people read: each entry is a line of the log."""

    def take(self, entry: JournalEntry) -> None:
        """Log one entry at its registered level."""
        log_note(logging.getLogger(LOGGER_NAME), entry.event, entry.fields)


def log_note(logger: logging.Logger, event: str, fields: Mapping[str, object]) -> None:
    """Write one event at its registered level."""
    logger.log(event_level(event), event, extra={"event": event, "fields": fields})


_WINDOW_S = 60.0
_PASSED = 5
_KINDS_MAX = 1024
_TEXT_MAX = 500


class Throttle(logging.Filter):
    """A filter for repeated warnings and errors.

    In each minute, it passes the first five records of a kind, then the 10th, the 100th, and so on.
    Records are of one kind if their texts are equal. Each carries its number as `count`. All
    handlers of a logger share one throttle, and each record is counted once.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[object, ...], tuple[float, int]] = OrderedDict()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        count: int | None = getattr(record, "count", None)
        if count is None:
            count = record.count = self._counted(_kind(record))
        return count <= _PASSED or str(count).strip("0") == "1"

    def _counted(self, kind: tuple[object, ...]) -> int:
        now_s = self._clock()
        begun_s, count = self._kinds.pop(kind, (now_s, 0))
        if now_s - begun_s >= _WINDOW_S:
            begun_s, count = now_s, 0
        self._kinds[kind] = (begun_s, count + 1)
        if len(self._kinds) > _KINDS_MAX:
            self._kinds.popitem(last=False)
        return count + 1


def _kind(record: logging.LogRecord) -> tuple[object, ...]:
    error = record.exc_info[1] if record.exc_info else None
    return (
        record.name,
        record.levelno,
        record.getMessage()[:_TEXT_MAX],
        repr(getattr(record, "fields", None))[:_TEXT_MAX],
        repr(error)[:_TEXT_MAX],
    )


def repeated(record: logging.LogRecord) -> int:
    """Return a record's number within this minute if not all of its kind are shown, else 0."""
    count: int = getattr(record, "count", 1)
    return count if count > _PASSED else 0
