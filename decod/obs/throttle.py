"""A filter that keeps a repeated error from filling the log."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from typing_extensions import override

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
