"""What a bug report holds: a fixed list of files, each with a limit, all of them redacted.

Of a long file the newest lines are kept. What was cut or can't be read is said in the report.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decod.bugreport.redaction import Redactor, lines_of_keys
from decod.files import read_beginning, read_end
from decod.obs.logs import NUM_OLD_LOGS
from decod.texts import why_of

LOG_MAX_BYTES = 8 << 20
"""Of all parts of node.log together. The newest win."""
METRICS_MAX_BYTES = 2 << 20
OTHER_MAX_BYTES = 1 << 20
"""Of any other file."""
CRASHES_MAX = 5
"""Newest reports of unexpected errors."""
RUNS_MAX = 3
"""Newest runs whose iterations are in the report."""

_KEY_FILES = ("identity.key", "roots/*/*.key", "memberships/*/papers.json")
_KEY_FILE_MAX_BYTES = 1 << 20
_ADDRESS_FILES = "memberships/*/peers.json"


@dataclass(frozen=True, slots=True)
class ReportFile:
    """One file of the report."""

    name: str
    content: bytes = field(repr=False)
    cut: str = ""
    """Says which part is left out; empty if none is."""


@dataclass(slots=True)
class Contents:
    """The files of a report."""

    files: list[ReportFile] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Files that are not in the report, and why."""

    @property
    def size_bytes(self) -> int:
        return sum(len(file.content) for file in self.files)


@dataclass(frozen=True, slots=True)
class _Source:
    """A text before redaction."""

    name: str
    text: str
    cut: str = ""


def known_secrets(state_dir: Path) -> list[str]:
    """Return lines of the private keys in a state folder, so that they can be removed."""
    found = []
    for pattern in _KEY_FILES:
        for path in state_dir.glob(pattern):
            # What this user can't read is not in this user's report.
            with suppress(OSError):
                text = read_beginning(path, _KEY_FILE_MAX_BYTES).decode(errors="replace")
                found += lines_of_keys(text)
    return found


def contents_of(state_dir: Path, facts: Mapping[str, Any], redactor: Redactor) -> Contents:
    """Return the files of a report on the node of a state folder.

    Args:
        state_dir: The folder. Anything in it may be missing, damaged or unreadable.
        facts: Objects to write as JSON, by the name of their file.
        redactor: Learns all hosts, then redacts all texts.
    """
    found = Contents()
    sources = [
        _Source(name, json.dumps(each, indent=1, ensure_ascii=False))
        for name, each in facts.items()
    ]
    sources += _sources_of(state_dir, found.left_out)
    for path in state_dir.glob(_ADDRESS_FILES):
        with suppress(OSError):
            redactor.learn(read_beginning(path, OTHER_MAX_BYTES).decode(errors="replace"))
    for source in sources:
        redactor.learn(source.text)
    for source in sources:
        content = redactor.redact(source.text).encode(errors="replace")
        found.files.append(ReportFile(source.name, content, source.cut))
    found.left_out = [redactor.redact(each) for each in found.left_out]
    found.files.insert(0, ReportFile("CONTENTS.txt", _contents_text(found).encode()))
    return found


def _sources_of(state_dir: Path, left_out: list[str]) -> Iterator[_Source]:
    parts = ["node.log", *(f"node.log.{age}" for age in range(1, NUM_OLD_LOGS + 1))]
    metrics = ["metrics.jsonl", *(f"metrics.{age}.jsonl" for age in range(1, 4))]
    yield from _rotated(state_dir, parts, LOG_MAX_BYTES, left_out)
    yield from _rotated(state_dir / "metrics", metrics, METRICS_MAX_BYTES, left_out)
    paths = [state_dir / "compute.log", state_dir / "planning.log"]
    paths += _newest(state_dir.glob("crash-*.txt"), CRASHES_MAX)
    for path in paths:
        yield from _rotated(path.parent, [path.name], OTHER_MAX_BYTES, left_out)
    for path in _newest(state_dir.glob("runs/*/iterations.csv"), RUNS_MAX):
        for source in _rotated(path.parent, [path.name], OTHER_MAX_BYTES, left_out):
            yield _Source(f"runs/{path.parent.name}/{path.name}", source.text, source.cut)


def _newest(paths: Iterator[Path], num_max: int) -> list[Path]:
    def written_s(path: Path) -> float:
        with suppress(OSError):
            return path.lstat().st_mtime
        return 0.0

    return sorted(paths, key=written_s, reverse=True)[:num_max]


def _rotated(
    folder: Path, names: Sequence[str], size_max_bytes: int, left_out: list[str]
) -> Iterator[_Source]:
    """Yield the newest of a file's parts, which are named from the newest to the oldest."""
    left = size_max_bytes
    for name in names:
        path = folder / name
        try:
            size = path.lstat().st_size
            if left <= 0:
                left_out.append(f"{name}: {size:,} bytes, older than what the report has room for")
                continue
            text = read_end(path, left).decode(errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            left_out.append(f"{name}: {why_of(error)}")
            continue
        missing = max(0, size - len(text.encode(errors="replace")))
        cut = f"its oldest {missing:,} of {size:,} bytes" if size > left else ""
        left -= min(size, left)
        yield _Source(name, text, cut)


def _contents_text(contents: Contents) -> str:
    """Return the report's first file: what is in it, what is not, and how it was redacted."""
    lines = ["A bug report of decod. It holds:", ""]
    for file in contents.files:
        cut = f"  left out: {file.cut}" if file.cut else ""
        lines.append(f"{len(file.content):>12,} bytes  {file.name}{cut}")
    if contents.left_out:
        lines += ["", "Not in it:", "", *contents.left_out]
    lines += [
        "",
        "Private keys, join strings and tokens are removed. IP addresses and host names are host-1",
        "and so on, user names are user-1 and so on, and the user's home is ~. The same name has",
        "the same pseudonym in all files. Training data and weights are never part of a report.",
        "",
    ]
    return "\n".join(lines)
