"""The audit log of a data node: who was let into the run, and what else bears on its security.

    {"seq":7,"time":"...","event":"...","actor":"...","node":"...","address":"...",
     "details":{...},"previous":"<SHA-256 of line 6>","statement":"<signature of this line>"}

Each line names the hash of the line before it, also across files. The last line of each write
carries a statement of the node about this line, and so about all lines before it. Somebody without
the node's key can add lines that are not signed, or cut lines off at the end, and nothing else.

A file is named after the number of its first line. A file that has grown too large is followed by
another one, and the oldest are removed. The first line of the new file says which lines are kept.
"""

import hashlib
import json
import math
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decod.clocks import wall_clock
from decod.files import open_ordinary, read_at, sync_folder
from decod.membership.papers import Membership
from decod.texts import clean_text, why_of

KIND = "audit-log"
"""Of the statements in a log."""
FOLDER = "audit_log"
"""In the folder of a membership."""
LINE_MAX_BYTES = 128 * 1024
"""Longest line that is read. Those that are written are shorter."""
FILE_SIZE_MAX_BYTES = 16 << 20
FILES_MAX = 8
NO_HASH = "0" * 64
"""Stands for the line before the first."""

OPENED, CLOSED = "audit_log.opened", "audit_log.closed"
ROTATED, ALTERED = "audit_log.rotated", "audit_log.altered"
"""Events about the log itself."""

_NAME = re.compile(r"[0-9]{12}\.jsonl\Z")
_CLOSED = f'"event":"{CLOSED}"'.encode()
_STATEMENT = re.compile(rb',"statement":"([A-Za-z0-9+/=]+)"\}\Z')
_JOIN_STRING = re.compile(r"decod1-\S+")
_DETAILS_MAX = 16
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """Something that happened, before it has its place in a log."""

    time_s: float
    """Seconds of the Unix epoch."""
    event: str
    actor: str
    """Who did it: the id of a node, or `operator`."""
    node: str = ""
    """The node that it is about, if any."""
    address: str = ""
    """That node's, if known."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Never secrets."""


@dataclass(frozen=True, slots=True)
class LogHead:
    """The last line of a log: its number, from 1, and its SHA-256."""

    seq: int = 0
    sha256: str = NO_HASH

    def after(self, line: bytes) -> "LogHead":
        """Return the head once `line` has been added."""
        return LogHead(self.seq + 1, hashlib.sha256(line).hexdigest())


EMPTY = LogHead()
"""The head of a log without lines."""


# --- lines and files --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawLine:
    """The bytes of one line, unchecked, without the end of line."""

    text: bytes
    """At most `LINE_MAX_BYTES`."""
    end: int
    """Offset of the first byte after the line."""
    ended: bool = True
    """The line has an end of line. The last one lacks it while it is being written, and after a
    crash."""
    too_long: bool = False
    """`text` is only the beginning."""


def log_files(folder: Path) -> list[Path]:
    """Return the files of a log, the oldest first.

    Raises:
        OSError: The folder can't be read.
    """
    return sorted(path for path in folder.iterdir() if _NAME.match(path.name))


def first_seq(path: Path) -> int:
    """Return the number of a file's first line, as the file's name says."""
    return int(path.stem)


def read_lines(path: Path) -> Iterator[RawLine]:
    """Yield the lines of a file. Takes little memory, however long they are.

    Raises:
        OSError: The file can't be read, or is not an ordinary file.
    """
    with open_ordinary(path, follow_links=False) as descriptor:
        rest, position, num_dropped = b"", 0, 0
        while piece := read_at(descriptor, position, _PIECE_BYTES):
            position += len(piece)
            if num_dropped and b"\n" not in piece:
                num_dropped += len(piece)
                continue
            *lines, rest = (rest + piece).split(b"\n")
            end = position - len(rest) - sum(len(line) + 1 for line in lines)
            for line in lines:
                end += len(line) + 1
                too_long = num_dropped + len(line) > LINE_MAX_BYTES
                yield RawLine(line[:LINE_MAX_BYTES], end, too_long=too_long)
                num_dropped = 0
            if len(rest) > LINE_MAX_BYTES:
                num_dropped += len(rest) - LINE_MAX_BYTES
                rest = rest[:LINE_MAX_BYTES]
        if rest:
            yield RawLine(rest, position, ended=False, too_long=num_dropped > 0)


def split_statement(line: bytes) -> tuple[bytes, bytes]:
    """Return what a line's statement is about, and the statement in base64; empty if unsigned."""
    found = _STATEMENT.search(line)
    return (line, b"") if found is None else (line[: found.start()] + b"}", found[1])


def _encoded(event: AuditEvent, previous: LogHead) -> bytes:
    time = datetime.fromtimestamp(event.time_s, UTC).isoformat(timespec="milliseconds")
    details = list(event.details.items())[:_DETAILS_MAX]
    content = {
        "seq": previous.seq + 1,
        "time": time,
        "event": _cleaned(event.event),
        "actor": _cleaned(event.actor),
        "node": _cleaned(event.node),
        "address": _cleaned(event.address),
        "details": {_cleaned(key): _plain(value) for key, value in details},
        "previous": previous.sha256,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _plain(value: object) -> Any:
    """Return a value that JSON can hold."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _cleaned(value)


def _cleaned(value: object) -> str:
    """Return a short text of one line. The token in a join string is left out."""
    return _JOIN_STRING.sub("decod1-...", clean_text(value))


# --- writing ----------------------------------------------------------------------------------


class AuditLog:
    """The only writer of one log. Its methods wait for the disk.

    Args:
        membership: This node's, which signs.
        folder: Where the log is kept. It is made with the first line.
        run: The run's name.
        file_size_max_bytes: A file of this size gets no further lines.
        files_max: How many files are kept, at least 2.
    """

    def __init__(
        self,
        membership: Membership,
        folder: Path,
        run: str,
        *,
        file_size_max_bytes: int = FILE_SIZE_MAX_BYTES,
        files_max: int = FILES_MAX,
    ) -> None:
        self._membership, self._folder, self._run = membership, folder, run
        self._size_max, self._files_max = file_size_max_bytes, files_max
        self._head = EMPTY
        self._file: _File | None = None
        """The newest file. None: the log must be opened first, as the disk holds it."""

    def append(self, events: Sequence[AuditEvent]) -> str:
        """Add events, and wait until the disk has them.

        Args:
            events: At least one, in their order.

        Returns:
            How somebody else has altered the newest file since the last call; empty if nobody has.

        Raises:
            OSError: Nothing was added. A later call may succeed.
        """
        file, altered = self._file, ""
        if file is None:
            self._open(events)
        elif altered := file.alteration():
            # What is left of the file stays as it is, and shows what happened to it.
            self._begin(events, ALTERED, file=file.path.name, found=altered)
        elif file.size_bytes >= self._size_max:
            self._rotate(events)
        else:
            self._add(file, events)
        return altered

    def close(self) -> None:
        """Say in the log that it ends in order, if it was written to. Raises as `append`."""
        if self._file is not None:
            self.append([self._own(CLOSED)])
            self._file = None

    def _open(self, events: Sequence[AuditEvent]) -> None:
        """Go on behind the last whole line on the disk. A torn one, by a crash, is cut off."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync_folder(self._folder.parent)
        torn_bytes, end, last = 0, _End(), None
        for path in reversed(log_files(self._folder)):
            end = _read_end(path)
            torn_bytes += end.torn_bytes
            if end.size_bytes:
                last = path
                break
            path.unlink()
        found: dict[str, object] = {"torn_bytes": torn_bytes} if torn_bytes else {}
        self._head = end.head
        if last is None:
            self._begin(events, OPENED, **found)
            return
        found |= {"closed": end.closed, "unsigned_lines": end.num_unsigned}
        file = _File.of(last)
        file.cut(end.size_bytes)
        self._add(file, [self._own(OPENED, **found), *events])

    def _rotate(self, events: Sequence[AuditEvent]) -> None:
        files = log_files(self._folder)
        kept = files[1 - self._files_max :]
        self._begin(events, ROTATED, kept_from=first_seq(kept[0]))
        # Only now, since the new file says that they are not missing.
        with suppress(OSError):  # One file too many does no harm.
            for path in files[: -len(kept)]:
                path.unlink()

    def _begin(self, events: Sequence[AuditEvent], event: str, **details: object) -> None:
        """Write a new file, which begins with an event about the log."""
        before = self._file, self._head
        self._file = None  # If this fails in a way that can't be undone, the log is opened anew.
        path = self._folder / f"{self._head.seq + 1:012d}.jsonl"
        file = _File.new(path)
        try:
            self._add(file, [self._own(event, **details), *events])
            sync_folder(self._folder)
        except OSError:
            with suppress(OSError):
                path.unlink()
                self._file, self._head = before
            raise

    def _add(self, file: "_File", events: Sequence[AuditEvent]) -> None:
        lines, head = list[bytes](), self._head
        for event in events:
            line = _encoded(event, head)
            lines.append(self._signed(line) if event is events[-1] else line)
            head = head.after(lines[-1])
        try:
            file.add(b"".join(line + b"\n" for line in lines))
        except OSError:
            if file.alteration():
                self._file = None
            raise
        self._file, self._head = file, head

    def _signed(self, line: bytes) -> bytes:
        # The line stands beside the statement about it, which so need not repeat it.
        statement = replace(self._membership.state(KIND, line), body=b"")
        return line[:-1] + b',"statement":"' + b64encode(statement.to_bytes()) + b'"}'

    def _own(self, event: str, **details: object) -> AuditEvent:
        actor, details = self._membership.node_id, {"run": self._run, **details}
        return AuditEvent(time_s=wall_clock(), event=event, actor=actor, details=details)


@dataclass(slots=True)
class _File:
    """The file that is written to, as this process has left it."""

    path: Path
    inode: int
    size_bytes: int

    @classmethod
    def new(cls, path: Path) -> "_File":
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        return cls.of(path)

    @classmethod
    def of(cls, path: Path) -> "_File":
        found = path.lstat()
        return cls(path, found.st_ino, found.st_size)

    def alteration(self) -> str:
        """Return how the file differs from what this process has left; empty if it does not."""
        try:
            found = self.path.lstat()
        except OSError as error:
            return why_of(error)
        if found.st_ino != self.inode:
            return "another file has taken its place"
        if found.st_size != self.size_bytes:
            return f"it has {found.st_size} bytes instead of {self.size_bytes}"
        return ""

    def cut(self, size_bytes: int) -> None:
        """Cut off what is behind the first `size_bytes` bytes."""
        if size_bytes < self.size_bytes:
            os.truncate(self.path, size_bytes)
            self.size_bytes = size_bytes

    def add(self, text: bytes) -> None:
        """Add a text, wholly or not at all, and wait until the disk has it."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path, flags)
        try:
            written = 0
            while written < len(text):
                written += os.write(descriptor, text[written:])
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self.size_bytes)
            raise
        finally:
            os.close(descriptor)
        self.size_bytes += len(text)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a file."""

    head: LogHead = EMPTY
    """Its last whole line."""
    size_bytes: int = 0
    """Of its whole lines."""
    torn_bytes: int = 0
    """What is behind them."""
    num_unsigned: int = 0
    """Lines behind the last statement."""
    closed: bool = False
    """The last line says that the log ends in order."""


def _read_end(path: Path) -> _End:
    head, closed = LogHead(first_seq(path) - 1), False
    size_bytes = torn_bytes = num_unsigned = 0
    for line in read_lines(path):
        if not line.ended:
            torn_bytes = line.end - size_bytes
            break
        head, size_bytes = head.after(line.text), line.end
        num_unsigned = 0 if split_statement(line.text)[1] else num_unsigned + 1
        closed = _CLOSED in line.text
    return _End(head, size_bytes, torn_bytes, num_unsigned, closed)
