"""Reads the journals of nodes. They may come from other people, so every row is checked.

A bad line is reported and left out: a power loss tears the last line of a file, and that is no
reason not to analyse the rest.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from decod.errors import DataError
from decod.files import NotOrdinaryError, open_ordinary, read_beginning, read_pieces
from decod.journal.records import EventRow, HostRow, RoundRow, Row, parse_line
from decod.texts import clean_text, why_of

SUFFIX = ".jsonl"

_BEGINNING = b'{"version":'
"""Of every row, as `line_of` writes it."""

FILE_SIZE_MAX_BYTES = 1 << 28
FILES_MAX = 4096
PROBLEMS_MAX = 100
"""Most bad lines that are named."""


@dataclass(slots=True)
class Records:
    """The rows of some files, the oldest first, none twice."""

    rounds: list[RoundRow] = field(default_factory=list)
    hosts: list[HostRow] = field(default_factory=list)
    num_files: int = 0
    problems: list[str] = field(default_factory=list)
    """Bad lines, and why they were left out."""
    num_problems: int = 0

    def add_problem(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


def read_records(paths: Iterable[Path]) -> Records:
    """Return what files and folders hold.

    Args:
        paths: Files of journals, state folders, or folders that hold any of them at any depth.

    Raises:
        DataError: A path does not exist or can't be read (E-DAT-040), or there is no row in any
            (E-DAT-041).
    """
    paths = list(paths)
    records, seen = Records(), set[tuple[str, str, str, int, float]]()
    for path in files_of(paths):
        records.num_files += 1
        for row in _rows_of(path, records):
            if isinstance(row, EventRow):
                continue
            number = row.round if isinstance(row, RoundRow) else 0
            # The same file may have been collected twice.
            key = (row.kind, row.run, row.peer, number, row.time_s)
            if key in seen:
                continue
            seen.add(key)
            if isinstance(row, RoundRow):
                records.rounds.append(row)
            else:
                records.hosts.append(row)
    if not records.rounds:
        names = ", ".join(str(path) for path in paths)
        raise DataError(
            f"no round is recorded in {names}",
            why=records.problems[0]
            if records.problems
            else f"{records.num_files} files of journals were found there",
            fix="name a node's state folder or files of its journal, after it has trained a while",
            code="E-DAT-041",
        )
    records.rounds.sort(key=lambda row: row.time_s)
    records.hosts.sort(key=lambda row: row.time_s)
    return records


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Return the files of journals at some paths, each once.

    Of a folder, these are the files below it that begin with a row. It may hold other files.

    Raises:
        DataError: A path does not exist or can't be read (E-DAT-040).
    """
    found = dict[Path, None]()
    for path in paths:
        found |= dict.fromkeys(_walk(path) if path.is_dir() else (path,))
    return list(found)


def _walk(folder: Path) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        raise _unreadable(folder, why_of(error)) from error

    num_files = 0
    for parent, folders, names in os.walk(folder, onerror=failed):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix == SUFFIX and _begins_with_row(path):
                num_files += 1
                if num_files > FILES_MAX:
                    raise _unreadable(folder, f"it holds more than {FILES_MAX} files of journals")
                yield path


def _begins_with_row(path: Path) -> bool:
    try:
        return read_beginning(path, len(_BEGINNING)) == _BEGINNING
    except NotOrdinaryError:
        return False
    except OSError as error:
        raise _unreadable(path, why_of(error)) from error


def _rows_of(path: Path, records: Records) -> Iterator[Row]:
    """Yield the rows of one file. Bad lines become problems."""
    try:
        with open_ordinary(path) as descriptor:
            if os.fstat(descriptor).st_size > FILE_SIZE_MAX_BYTES:
                raise _unreadable(path, f"it is longer than {FILE_SIZE_MAX_BYTES} bytes")
            content = b"".join(read_pieces(descriptor, 0, None))
    except OSError as error:
        raise _unreadable(path, why_of(error)) from error
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        try:
            yield parse_line(line)
        except ValueError as error:
            # The error may quote the line.
            records.add_problem(f"{path}, line {number}: {clean_text(error, limit=200)}")


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        f"can't read the journal in {path}",
        why=why,
        fix="name a node's state folder, files of its journal, or a folder with those of several",
        code="E-DAT-040",
    )
