"""Writes a peer's metrics file, from a thread of its own that training never waits for.

Rows go through a bounded queue. Each is one `write` at the end of the file, so a process that is
killed loses only what is in the queue, and a power loss the last seconds. Files are rotated, so
they never take more than `NUM_FILES` times `FILE_SIZE_MAX_BYTES`. If the disk is full or fails,
rows are dropped, the owner is told once, and the next rows are tried again.
"""

import errno
import os
import queue
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Self

from decod.journal.records import HostRow, RoundRow, Row, line_of
from decod.texts import why_of

FOLDER = "metrics"
"""Of a state folder, for the files."""
FILE_SIZE_MAX_BYTES = 8 << 20
NUM_FILES = 4
SAMPLE_INTERVAL_S = 10.0
"""Between two rows about the host."""

_WAITING_MAX = 256
"""Rows that wait for the disk. Further ones are dropped."""
_END_S = 2.0
"""How long `close` waits for a disk that hangs."""


def _say_nothing(_: str) -> None:
    """Tell nobody."""


class RotatedFile:
    """An append-only file of lines. Full files are renamed: `metrics.1.jsonl` is the newest.

    Args:
        folder: Created if missing.
        size_max_bytes: Of one file.
        num_files: Most files.
    """

    def __init__(
        self, folder: Path, size_max_bytes: int = FILE_SIZE_MAX_BYTES, num_files: int = NUM_FILES
    ) -> None:
        self._folder, self._size_max_bytes, self._num_files = folder, size_max_bytes, num_files
        self._descriptor: int | None = None
        self._size_bytes = 0

    def path(self, age: int = 0) -> Path:
        """Return the path of the file that is written to, or of an older one."""
        return self._folder / (f"metrics.{age}.jsonl" if age else "metrics.jsonl")

    def add(self, line: bytes) -> None:
        """Add a line, wholly or not at all.

        Raises:
            OSError: It can't be written. The next call tries to open the file anew.
        """
        try:
            if self._descriptor is None:
                self._open()
            if self._size_bytes and self._size_bytes + len(line) > self._size_max_bytes:
                self._rotate()
            self._write(line)
        except OSError:
            self.close()
            raise

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Without O_NONBLOCK, opening a pipe that nobody reads would block forever.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path(), flags, 0o600)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{self.path().name} is no ordinary file")
        self._size_bytes = found.st_size
        if self._size_bytes and os.pread(self._descriptor, 1, self._size_bytes - 1) != b"\n":
            # The host has lost power within a line.
            self._write(b"\n")

    def _rotate(self) -> None:
        self.close()
        for age in reversed(range(self._num_files - 1)):
            with suppress(FileNotFoundError):
                self.path(age).replace(self.path(age + 1))
        self._open()

    def _write(self, line: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size_bytes)
            raise
        self._size_bytes += len(line)

    def close(self) -> None:
        """Close the file. `add` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


class Recorder:
    """Records the rounds of one peer, and samples its host. Use it in `with`.

    Args:
        file: Gets the rows.
        sample: Returns a row about the host. None: the host is not sampled.
        tell: Called from the thread when rows can't be written, with the reason; once until the
            file can be written again.
        interval_s: Time between two samples.
    """

    def __init__(
        self,
        file: RotatedFile,
        sample: Callable[[], HostRow] | None = None,
        tell: Callable[[str], None] = _say_nothing,
        *,
        interval_s: float = SAMPLE_INTERVAL_S,
    ) -> None:
        self._file, self._sample, self._tell = file, sample, tell
        self._interval_s = interval_s
        self._waiting: queue.Queue[RoundRow | None] = queue.Queue(_WAITING_MAX)
        self._told = False
        self.num_lost = 0
        """Rows that were dropped, since the disk was too slow or failed."""
        self._thread = threading.Thread(target=self._keep, name="decod-metrics", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the thread. A disk that hangs is waited for a few seconds."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_END_S)
        self._thread.join(_END_S)

    def record(self, row: RoundRow) -> None:
        """Take a row. Never waits and never raises."""
        try:
            self._waiting.put_nowait(row)
        except queue.Full:
            self.num_lost += 1

    def _keep(self) -> None:
        next_s = monotonic() + self._interval_s
        while True:
            timeout_s = None if self._sample is None else max(0.0, next_s - monotonic())
            try:
                row: Row | None = self._waiting.get(timeout=timeout_s)
            except queue.Empty:
                assert self._sample is not None
                # After a suspension of the host, samples that were missed are not made up for.
                next_s = monotonic() + self._interval_s
                row = self._sample()
            if row is None:
                break
            self._add(row)
        self._file.close()

    def _add(self, row: Row) -> None:
        try:
            self._file.add(line_of(row))
        except OSError as error:
            self.num_lost += 1
            if not self._told:
                self._told = True
                self._tell(why_of(error))
        else:
            self._told = False
