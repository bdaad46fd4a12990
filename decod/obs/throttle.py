"""Keeps one error that comes again and again from filling the log."""

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
    """Passes the first five warnings or errors of a kind in each minute, then the 10th, 100th, ...

    Records are of one kind if they say the same. Those that pass late carry their number as
    `count`. All handlers of a logger share one throttle, and each record is counted once.

    Args:
        clock: Seconds that never go back.
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
    """Return how often this minute a record's like has come, if that was too often to show all."""
    count: int = getattr(record, "count", 1)
    return count if count > _PASSED else 0
