"""A node's journal on its disk: rows on rounds, on the host, and the events that outlive a daemon.

Rows go through a `Spool`. A batch of them is written at the end of the file, so a process that is
killed loses only what waits, and a power loss the last seconds. Files are rotated, so they never
take more than `NUM_FILES` times `FILE_SIZE_MAX_BYTES`.
"""

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Self

from decod.files import read_beginning
from decod.journal.history import RUN_EVENTS
from decod.journal.host_sampler import HostSampler
from decod.journal.journal import JournalEntry, Spool, TakeNote
from decod.journal.records import EVENT_BEGINNING, EventRow, Row, line_of, parse_line
from decod.tasks import beside, in_thread
from decod.texts import plain_value

FOLDER = "journal"
"""Of a state folder, for the files."""
EARLIER_FOLDER = "metrics"
"""Where releases up to 0.1 have kept them."""
FILE_SIZE_MAX_BYTES = 8 << 20
NUM_FILES = 4
SAMPLE_INTERVAL_S = 10.0
"""Between two rows about the host."""
KEPT_EVENTS = frozenset(("step.committed", "evaluation.done", "text.written", *RUN_EVENTS))
"""What the run's history needs after a restart."""

_WAITING_MAX = 256
"""Rows that wait for the disk. Further ones are dropped."""


class KeptJournal:
    """Keeps what a node measures, and some of its events. Use it in `async with`.

    Args:
        folder: Of the files.
        run: The id of the run.
        peer: This node's id.
        name: Its name.
        processes: Returns the ids of its processes, which may have ended.
        note: Tells the operator that rows are lost.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        peer: str,
        name: str,
        processes: Callable[[], Iterable[int]],
        note: TakeNote,
    ) -> None:
        self._run, self._peer = run, peer
        self._sampler = HostSampler(run, peer, name, processes)
        file = JournalFile(folder)
        self._spool = Spool[bytes](
            lambda lines, _: file.add(lines), file.close, waiting_max=_WAITING_MAX
        )
        self._spool.on_failed.append(lambda outage: note("metrics.unkept", reason=outage.reason))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._spool)
        await self._stack.enter_async_context(beside(self._keep_sampling()))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self.add(await in_thread(self._sampler.sample))

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry. Never waits and never raises."""
        if entry.event in KEPT_EVENTS:
            self.add(
                EventRow(
                    time_s=entry.time_s,
                    run=self._run,
                    peer=self._peer,
                    event=entry.event,
                    fields={name: plain_value(value) for name, value in entry.fields.items()},
                )
            )

    def add(self, row: Row) -> None:
        """Take a row. Never waits and never raises."""
        self._spool.add(line_of(row))


def kept_events(folder: Path, run: str) -> Iterator[JournalEntry]:
    """Yield the events of one run that a node's journal holds, the oldest first.

    Lines that can't be read are left out.

    Raises:
        OSError: A file can't be read.
    """
    file = JournalFile(folder)
    for age in reversed(range(NUM_FILES)):
        with suppress(FileNotFoundError):
            content = read_beginning(file.path(age), 2 * FILE_SIZE_MAX_BYTES)
            for line in content.split(b"\n"):
                if not line.startswith(EVENT_BEGINNING):
                    continue
                with suppress(ValueError):
                    row = parse_line(line)
                    if isinstance(row, EventRow) and row.run == run:
                        yield JournalEntry(row.event, row.fields, row.time_s, row.time_s)


class JournalFile:
    """An append-only file of lines. Full files are renamed: `journal.1.jsonl` is the newest.

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
        return self._folder / (f"journal.{age}.jsonl" if age else "journal.jsonl")

    def add(self, lines: Sequence[bytes]) -> None:
        """Add lines, all or none.

        Raises:
            OSError: They can't be written. The next call tries to open the file anew.
        """
        data = b"".join(lines)
        try:
            if self._descriptor is None:
                self._open()
            if self._size_bytes and self._size_bytes + len(data) > self._size_max_bytes:
                self._rotate()
            self._write(data)
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

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size_bytes)
            raise
        self._size_bytes += len(data)

    def close(self) -> None:
        """Close the file. `add` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)
