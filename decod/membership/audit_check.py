"""The audit log, read again: its lines, and whether they are those that its node wrote."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from decod.errors import MalformedMessageError
from decod.ids import NodeId
from decod.membership.audit_log import (
    CLOSED,
    EMPTY,
    FOLDER,
    KIND,
    OPENED,
    ROTATED,
    LogHead,
    RawLine,
    first_seq,
    log_files,
    read_lines,
    split_statement,
)
from decod.membership.credential import Credential, Statement, parse_statement
from decod.protocol.core.view import Role
from decod.texts import from_base32, no_constant, unique

_READINGS_MAX = 4
"""How often to read a log whose oldest files are removed meanwhile."""

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
    seq, details = content["seq"], content["details"]
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
            root, files = from_base32(folder.parent.name), log_files(folder)
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
    """In the file, from 1."""
    what: str


@dataclass(slots=True)
class Checked:
    """What a log holds, up to the first break."""

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
    """How often the log was opened again without having been closed before."""
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
    """Says in what a line differs from what the node wrote."""


class _Check:
    """One reading of a log."""

    def __init__(self, root: bytes, node: NodeId | None, noted: LogHead | None) -> None:
        self._root, self._node, self._noted = root, node, noted
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
        found, self._place = self._found, (path, 1)
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
        found, line = self._found, parse_line(raw)
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
        found.head, found.num_lines = found.head.after(raw.text), found.num_lines + 1
        found.first, found.last = found.first or line.time, line.time
        found.is_closed = line.event == CLOSED
        self._compare_noted()

    def _check_statement(self, text: bytes) -> None:
        found, (about, encoded) = self._found, split_statement(text)
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
        self._believed, found.signer, found.num_unsigned = credential, signer, 0

    def _compare_noted(self) -> None:
        noted, head = self._noted, self._found.head
        if noted is not None and noted.seq == head.seq and noted.sha256 != head.sha256:
            raise _BrokenError(f"line {head.seq} was another one when its hash was noted")

    def _look_back(self, oldest: Path) -> None:
        """Compare the ends of the log with what is known of them."""
        noted, head, first = self._noted, self._found.head, self._start.seq + 1
        if noted is not None and noted.seq > head.seq:
            raise _BrokenError(f"the log ends with line {head.seq}, and had line {noted.seq}")
        if self._found.signer is None:
            raise _BrokenError("none of the lines is signed")
        self._place = (oldest, 1)
        if first > self._kept_from:
            raise _BrokenError(f"lines {self._kept_from} to {first - 1} are missing before it")
        if noted is not None and noted.seq < self._start.seq:
            raise _BrokenError(f"line {noted.seq} is not kept any more: note a newer one")
