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
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decod.clocks import wall_clock
from decod.errors import MalformedMessageError
from decod.files import open_ordinary, read_at, sync_folder
from decod.ids import NodeId
from decod.membership.credential import Credential, Statement, parse_statement
from decod.membership.papers import Membership
from decod.protocol.core.view import Role
from decod.texts import clean_text, from_base32, no_constant, unique, why_of

KIND = "audit-log"
"""The kind of the statements in a log."""
FOLDER = "audit_log"
"""The name in the folder of a membership."""
LINE_MAX_BYTES = 128 * 1024
"""Longest line that is read. Those that are written are shorter."""
FILE_SIZE_MAX_BYTES = 16 << 20
FILES_MAX = 8
NO_HASH = "0" * 64
"""Stands for the line before the first."""

OPENED = "audit_log.opened"
CLOSED = "audit_log.closed"
ROTATED = "audit_log.rotated"
ALTERED = "audit_log.altered"
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
    """The actor: the id of a node, or `operator`."""
    node: str = ""
    """The node that it is about, if any."""
    address: str = ""
    """The address of that node, if known."""
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
    """The bytes, at most `LINE_MAX_BYTES`."""
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
        rest = b""
        position = 0
        num_dropped = 0
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
        self._membership = membership
        self._folder = folder
        self._run = run
        self._size_max = file_size_max_bytes
        self._files_max = files_max
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
        file = self._file
        altered = ""
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
        torn_bytes = 0
        end = _End()
        last = None
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
        lines = list[bytes]()
        head = self._head
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
        self._file = file
        self._head = head

    def _signed(self, line: bytes) -> bytes:
        # The line stands beside the statement about it, which so need not repeat it.
        statement = replace(self._membership.state(KIND, line), body=b"")
        return line[:-1] + b',"statement":"' + b64encode(statement.to_bytes()) + b'"}'

    def _own(self, event: str, **details: object) -> AuditEvent:
        actor = self._membership.node_id
        details = {"run": self._run, **details}
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
    """The size of its whole lines."""
    torn_bytes: int = 0
    """The bytes behind them."""
    num_unsigned: int = 0
    """Lines behind the last statement."""
    closed: bool = False
    """The last line says that the log ends in order."""


def _read_end(path: Path) -> _End:
    head = LogHead(first_seq(path) - 1)
    closed = False
    size_bytes = torn_bytes = num_unsigned = 0
    for line in read_lines(path):
        if not line.ended:
            torn_bytes = line.end - size_bytes
            break
        head = head.after(line.text)
        size_bytes = line.end
        num_unsigned = 0 if split_statement(line.text)[1] else num_unsigned + 1
        closed = _CLOSED in line.text
    return _End(head, size_bytes, torn_bytes, num_unsigned, closed)


# The audit log, read again: its lines, and whether they are those that its node wrote.

_READINGS_MAX = 4
"""The number of times that a log is read whose oldest files are removed meanwhile."""

_TEXTS = ("event", "actor", "node", "address", "previous")
_FIELDS = {"seq", "time", *_TEXTS, "details"}


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of a log. Nothing of it is proven."""

    seq: int
    time: datetime
    event: str
    actor: str
    node: str
    address: str
    details: Mapping[str, Any]
    previous: str
    """SHA-256 of the line before it."""
    content: Mapping[str, Any]
    """All of it, as in the file."""


def parse_line(raw: RawLine) -> AuditLine:
    """Return the line in some bytes.

    Raises:
        ValueError: They are no line of an audit log; says why.
    """
    if raw.too_long:
        raise ValueError(f"it has more than {len(raw.text)} bytes")
    try:
        content = json.loads(raw.text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(content, dict) or content.keys() - {"statement"} != _FIELDS:
        raise ValueError("it has other fields than a line of an audit log")
    seq = content["seq"]
    details = content["details"]
    texts = {name: content[name] for name in _TEXTS}
    strings = all(isinstance(text, str) for text in (*texts.values(), content["time"]))
    if type(seq) is not int or not isinstance(details, dict) or not strings:
        raise ValueError("one of its fields is of the wrong kind")
    time = datetime.fromisoformat(content["time"])
    if time.tzinfo is None:
        raise ValueError("its time has no time zone")
    return AuditLine(seq=seq, time=time, details=details, content=content, **texts)


# --- finding ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundLog:
    """An audit log in a state folder."""

    folder: Path
    root: bytes
    """The public key of the run's root."""
    run: str
    """The run's name, as the log says. Empty if the log says none."""

    @property
    def root_text(self) -> str:
        """The root as join strings name it."""
        return self.folder.parent.name


def find_logs(state_dir: Path) -> list[FoundLog]:
    """Return the audit logs in a state folder.

    Raises:
        OSError: A folder is there, but can't be read.
    """
    found = []
    try:
        folders = sorted((state_dir / "memberships").iterdir())
    except FileNotFoundError:
        return []
    for folder in (each / FOLDER for each in folders):
        try:
            root = from_base32(folder.parent.name)
            files = log_files(folder)
        except (ValueError, FileNotFoundError, NotADirectoryError):
            continue
        if files:
            found.append(FoundLog(folder, root, _run_in(files[-1])))
    return found


def _run_in(path: Path) -> str:
    """Return the name of the run, which the first line of each file holds."""
    first = next(read_lines(path), None)
    try:
        return "" if first is None else str(parse_line(first).details.get("run", ""))
    except ValueError:
        return ""


# --- checking ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Break:
    """A place where a log is not as its node wrote it."""

    path: Path
    line: int
    """The number in the file, from 1."""
    what: str


@dataclass(slots=True)
class Checked:
    """The content of a log, up to the first break."""

    num_files: int = 0
    num_lines: int = 0
    first: datetime | None = None
    """Time of the first line."""
    last: datetime | None = None
    """Time of the last line."""
    head: LogHead = EMPTY
    signer: NodeId | None = None
    num_unsigned: int = 0
    """Lines at the end that no statement covers."""
    num_taken_over: int = 0
    """Other lines that had no statement yet when the log was opened again: a crash, or somebody
    else, has left them so."""
    num_unclosed: int = 0
    """The number of times that the log was opened again without having been closed before."""
    is_closed: bool = False
    """The last line says that the log ends in order."""
    is_torn: bool = False
    """There is a part of a line at the end."""
    broken: Break | None = None


def check_log(
    found: FoundLog, *, node: NodeId | None = None, noted: LogHead | None = None
) -> Checked:
    """Check each line and statement of a log until one does not hold.

    Args:
        found: The log.
        node: The node that must have signed it. None: any data node of the run.
        noted: A head of this log that somebody has noted before. The log must still hold it.

    Raises:
        OSError: The log can't be read.
    """
    for remaining in reversed(range(_READINGS_MAX)):
        try:
            return _Check(found.root, node, noted).run(log_files(found.folder))
        except FileNotFoundError:
            if not remaining:
                raise
    raise AssertionError


def _statement_in(encoded: bytes) -> Statement:
    """Return the statement in base64.

    Raises:
        ValueError, MalformedMessageError: There is none, or it is not in the one form of it.
    """
    statement = parse_statement(b64decode(encoded, validate=True))
    if b64encode(statement.to_bytes()) != encoded:
        raise ValueError("decod writes it in another way")
    return statement


class _BrokenError(Exception):
    """Return in what a line differs from what the node wrote."""


class _Check:
    """One reading of a log."""

    def __init__(self, root: bytes, node: NodeId | None, noted: LogHead | None) -> None:
        self._root = root
        self._node = node
        self._noted = noted
        self._believed: Credential | None = None
        self._start = EMPTY
        """The head before the oldest line."""
        self._place = (Path(), 1)
        """File and line that are being checked."""
        self._kept_from = 1
        """The oldest line that must be there, since no file was removed that held it."""
        self._found = Checked()

    def run(self, files: list[Path]) -> Checked:
        """Check these files, the oldest first."""
        found = self._found
        self._start = found.head = LogHead(first_seq(files[0]) - 1)
        try:
            for path in files:
                self._take_file(path, is_newest=path == files[-1])
            self._look_back(files[0])
        except (_BrokenError, ValueError) as error:
            found.broken = Break(*self._place, str(error))
        return found

    def _take_file(self, path: Path, *, is_newest: bool) -> None:
        found = self._found
        self._place = (path, 1)
        found.num_files += 1
        if first_seq(path) != found.head.seq + 1:
            raise _BrokenError(f"the file before it ends with line {found.head.seq}")
        for number, raw in enumerate(read_lines(path), 1):
            self._place = (path, number)
            if raw.ended or not is_newest:
                self._take(raw)
            else:
                found.is_torn = True

    def _take(self, raw: RawLine) -> None:
        """Check the next line.

        Raises:
            _BrokenError, ValueError: It is not as the node wrote it.
        """
        found = self._found
        line = parse_line(raw)
        if line.seq != found.head.seq + 1:
            raise _BrokenError(f"its number is {line.seq} instead of {found.head.seq + 1}")
        if found.head == self._start and line.seq > 1:
            found.head = LogHead(line.seq - 1, line.previous)
            self._compare_noted()
        elif line.previous != found.head.sha256:
            raise _BrokenError("it is not what followed the line before: one of them was altered")
        if line.event == OPENED and line.seq > 1:
            found.num_unclosed += not found.is_closed
            found.num_taken_over += found.num_unsigned
        kept_from = line.details.get("kept_from")
        if line.event == ROTATED and type(kept_from) is int:
            self._kept_from = max(self._kept_from, kept_from)
        if "statement" in line.content:
            self._check_statement(raw.text)
        else:
            found.num_unsigned += 1
        found.head = found.head.after(raw.text)
        found.num_lines += 1
        found.first = found.first or line.time
        found.last = line.time
        found.is_closed = line.event == CLOSED
        self._compare_noted()

    def _check_statement(self, text: bytes) -> None:
        found = self._found
        (about, encoded) = split_statement(text)
        try:
            statement = _statement_in(encoded)
            credential = statement.credential
            if credential != self._believed:
                credential.check(self._root, None)
            replace(statement, body=about).check_signature(self._root, KIND, now_s=None)
        except (ValueError, MalformedMessageError) as error:
            raise _BrokenError("its signature is not that of a member") from error
        signer = credential.node_id
        if credential.role is not Role.DATA or signer != (self._node or found.signer or signer):
            raise _BrokenError(f"{signer} has signed it, and not the node whose log this is")
        self._believed = credential
        found.signer = signer
        found.num_unsigned = 0

    def _compare_noted(self) -> None:
        noted = self._noted
        head = self._found.head
        if noted is not None and noted.seq == head.seq and noted.sha256 != head.sha256:
            raise _BrokenError(f"line {head.seq} was another one when its hash was noted")

    def _look_back(self, oldest: Path) -> None:
        """Compare the ends of the log with what is known of them."""
        noted = self._noted
        head = self._found.head
        first = self._start.seq + 1
        if noted is not None and noted.seq > head.seq:
            raise _BrokenError(f"the log ends with line {head.seq}, and had line {noted.seq}")
        if self._found.signer is None:
            raise _BrokenError("none of the lines is signed")
        self._place = (oldest, 1)
        if first > self._kept_from:
            raise _BrokenError(f"lines {self._kept_from} to {first - 1} are missing before it")
        if noted is not None and noted.seq < self._start.seq:
            raise _BrokenError(f"line {noted.seq} is not kept any more: note a newer one")
