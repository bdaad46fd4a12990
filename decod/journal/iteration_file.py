"""The file with loss and rates of every iteration, for spreadsheets, scripts and pandas.

It is CSV: a header, then one line for each iteration, in their order. Lines are appended, each
wholly or not at all, and are on the disk before the next is written. A crash can leave a part of a
line at the end, which is cut off when the file is opened.

Each iteration has one line, that of the history which the run goes on with. If the run goes back,
the lines of what it has taken back are cut off when an iteration is committed again.
"""

import csv
import errno
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from decod.files import replace_durably, sync_folder
from decod.journal.step_metrics import STEP_METRIC_NAMES

FILE_NAME = "iterations.csv"

_FIRST_COLUMNS = (
    "iteration",
    "time",
    "loss",
    "num_tokens",
    "tokens_per_s",
    "duration_s",
    "num_members",
    "num_microbatches",
    "num_deferred",
    "num_reread",
    "gradient_norm",
    "num_passes",
    "num_passes_wasted",
    "attempt",
    "era",
    "run_id",
)
COLUMNS = (*_FIRST_COLUMNS, *(name for name in STEP_METRIC_NAMES if name not in _FIRST_COLUMNS))
"""What they mean is in docs/reference.md."""

_HEADER = (",".join(COLUMNS) + "\n").encode()

Row = Mapping[str, object]


_POINTS_MAX = 10_000


def read_curve(path: Path) -> list[list[Any]]:
    """Return iterations of a file as points of a curve (`decod.journal.history.Point`).

    Of a long file only some are returned, evenly chosen. Lines that can't be read are left out.

    Raises:
        OSError: The file can't be read.
    """
    points: list[list[Any]] = []
    # A spoilt file may have lines that are too long to be one.
    with path.open(encoding="utf-8", errors="replace", newline="") as file, suppress(csv.Error):
        for row in csv.DictReader(file):
            if len(points) >= _POINTS_MAX:
                points = points[::2]
            with suppress(KeyError, TypeError, ValueError):
                time_s = datetime.fromisoformat(row["time"]).timestamp()
                loss, rate = (float(row[name] or "nan") for name in ("loss", "tokens_per_s"))
                numbers = (round(x, 5) if math.isfinite(x) else None for x in (loss, rate))
                points.append([int(row["iteration"]), round(time_s, 1), *numbers])
    return points


class IterationFile:
    """The file of one run. All methods wait for the disk.

    Args:
        path: Where it is, or is created by the first row.
        earlier: The file of the run that this one goes on from. Its lines begin the new file.
        start_iteration: The iteration after which this run goes on from that.
    """

    def __init__(
        self, path: Path, *, earlier: Path | None = None, start_iteration: int = 0
    ) -> None:
        self._path, self._earlier, self._start_iteration = path, earlier, start_iteration
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._last = 0
        """Iteration of the last line; 0 if there is none."""

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows in the order of their commits. They replace what the run has taken back.

        Raises:
            OSError: They can't be written, or not all of them. They may be added again.
        """
        try:
            if self._descriptor is None:
                self._open()
            lines = _lines_of(rows)
            if (first := min(lines)) <= self._last:
                self._cut(first)
            self._write(b"".join(lines.values()))
            self._last = max(lines)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. `add` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._path.exists() and self._earlier is not None:
            self._inherit(self._earlier)
        self._descriptor = _opened(self._path)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{self._path.name} is no ordinary file")
        with self._path.open("rb") as file:
            head = file.readline(len(_HEADER))
        if head != _HEADER and not _HEADER.startswith(head):
            self.close()
            if num_new := _num_new_columns(head):
                replace_durably(self._path, _widened(self._path.read_bytes(), num_new))
                head = _HEADER
            else:
                # Another program has written it, or a release with other columns.
                self._path.replace(self._path.with_suffix(".old.csv"))
                head = b""
            self._descriptor = _opened(self._path)
        self._size_bytes, self._last = len(_HEADER), 0
        if head != _HEADER:
            os.ftruncate(self._descriptor, 0)
            self._size_bytes = 0
            self._write(_HEADER)
            sync_folder(self._path.parent)
        for iteration, _, end in self._lines():
            self._last, self._size_bytes = iteration, end
        os.ftruncate(self._descriptor, self._size_bytes)

    def _inherit(self, earlier: Path) -> None:
        """Begin the file with the lines up to where this run goes on, if they can be read."""
        lines = []
        with suppress(OSError):
            content = earlier.read_bytes()
            head, _, _ = content.partition(b"\n")
            if num_new := _num_new_columns(head + b"\n"):
                content = _widened(content, num_new)
            elif head + b"\n" != _HEADER:
                return
            rows = content.splitlines(keepends=True)[1:]
            lines = [x for x in rows if 0 < _iteration_of(x) <= self._start_iteration]
        replace_durably(self._path, b"".join((_HEADER, *lines)))

    def _lines(self) -> Iterator[tuple[int, int, int]]:
        """Yield iteration, beginning and end of each whole line below the header."""
        with self._path.open("rb") as file:
            end = len(file.readline())
            for line in file:
                begin, end = end, end + len(line)
                if iteration := _iteration_of(line):
                    yield iteration, begin, end

    def _cut(self, iteration: int) -> None:
        """Cut off this iteration and all after it."""
        assert self._descriptor is not None
        kept, self._last = self._size_bytes, 0
        for found, begin, _ in self._lines():
            if found >= iteration:
                kept = begin
                break
            self._last = found
        os.ftruncate(self._descriptor, kept)
        self._size_bytes = kept

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size_bytes)
            raise
        self._size_bytes += len(data)


def _num_new_columns(head: bytes) -> int:
    """Return how many columns a release before this one lacked at the end; 0 if it is no such."""
    names = head.decode(errors="replace").rstrip("\n").split(",")
    is_earlier = head.endswith(b"\n") and tuple(names) == COLUMNS[: len(names)]
    return len(COLUMNS) - len(names) if is_earlier else 0


def _widened(content: bytes, num_new: int) -> bytes:
    """Return a file of an earlier release with the columns that it lacks, which are empty."""
    _, *lines = content.split(b"\n")
    rows = (line + b"," * num_new + b"\n" for line in lines[:-1])
    return b"".join((_HEADER, *rows))


def _opened(path: Path) -> int:
    # Without O_NONBLOCK, opening a pipe that nobody reads would block forever.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


def _lines_of(rows: Sequence[Row]) -> dict[int, bytes]:
    """Return the lines by their iterations, in order, without those that are taken back."""
    lines: dict[int, bytes] = {}
    for row in rows:
        iteration = int(str(row["iteration"]))
        if lines and iteration <= next(reversed(lines)):
            lines = {number: line for number, line in lines.items() if number < iteration}
        lines[iteration] = _line_of(row)
    return lines


def _line_of(row: Row) -> bytes:
    texts = ("" if (value := row.get(name)) is None else str(value) for name in COLUMNS)
    return (",".join(_plain(texts)) + "\n").encode()


def _plain(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        assert not {*text} & {*',"\r\n'}, text
        yield text


def _iteration_of(line: bytes) -> int:
    """Return the iteration of a line; 0 if the line is not whole."""
    first, *others = line.split(b",")
    whole = line.endswith(b"\n") and len(others) == len(COLUMNS) - 1
    return int(first) if whole and first.isdigit() and len(first) < 16 else 0
