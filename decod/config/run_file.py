"""Reading of a run file: TOML, checked key by key, with errors that name file, line and key."""

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decod.config.card import CardConfig
from decod.config.evaluation import EvaluationConfig
from decod.config.mirror import MirrorError, Problem, build
from decod.config.schema import validate
from decod.config.strict import read_file
from decod.config.usual import with_usual
from decod.data.corpus import DEFAULT_PATH
from decod.errors import ConfigError
from decod.objects import is_url
from decod.paths import absolute_path, full_path
from decod.run.run_config import RunConfig
from decod.train.checkpoint.store import CheckpointConfig

CACHE_MIN_GIB, CACHE_MAX_GIB = 1 / 16, 2.0**20

FILE_SIZE_MAX_BYTES = 1 << 20
"""A run file has about 4 KiB. A larger file than this is not a run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """The place of the tokens on this host. Not shared, since paths differ from host to host."""

    path: str = DEFAULT_PATH
    """Folder that `decod data prepare` wrote, absolute or as seen from this file, or the URL of one
    in an object store, such as `s3://bucket/corpus`; `default` is the source text of Python's
    library."""
    cache: str = ""
    """Folder for what this host has fetched of a corpus at a URL, absolute or as seen from this
    file. Empty: `data` in the state folder."""
    cache_max_gib: float = 20.0
    """Most that the cache holds, in GiB, and at most half of `--disk-max`. What was used last
    stays."""

    def __post_init__(self) -> None:
        if not CACHE_MIN_GIB <= self.cache_max_gib <= CACHE_MAX_GIB:
            raise ConfigError(
                f"data.cache_max_gib is {self.cache_max_gib:g}",
                why="less than 64 MiB holds too little of a corpus, and above 1 PiB it limits"
                " nothing",
                fix="give a number of GiB, such as 20",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sections(RunConfig):
    """All sections that a run file may hold."""

    data: DataSource = field(default_factory=DataSource)
    """The place of the tokens on this host. Members do not compare it."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the leader keeps the run's state. Members do not compare it."""
    card: CardConfig = field(default_factory=CardConfig)
    """What the card of the exported model says. Members do not compare it."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What the leader measures on held-out text. Members do not compare it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run file that was read and is consistent."""

    run: RunConfig
    data: DataSource
    path: Path
    """The file itself."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    card: CardConfig = field(default_factory=CardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def load_run_file(path: Path) -> RunFile:
    """Return the run that a file describes.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or describes no possible run. Codes:
            E-CFG-002 unreadable, E-CFG-003 not TOML, E-CFG-004 unknown or missing key,
            E-CFG-005 wrong type, E-CFG-006 impossible value.
    """
    text = _read_text(path)
    values = _parse_toml(text, path)
    lines = locate_keys(text)
    try:
        sections = build(_Sections, with_usual(values))
        run = RunConfig(**{name: getattr(sections, name) for name in _run_fields()})
        validate(run)
    except MirrorError as error:
        raise _explain(error.problems, lines, path) from None
    except ConfigError as error:
        place = _place(path, _find_line(error.what.partition(" ")[0], lines))
        raise ConfigError(
            f"{place}: {error.what}", why=error.why, fix=error.fix, code="E-CFG-006"
        ) from None
    return RunFile(
        run=run,
        data=_located(sections.data, path),
        path=path,
        checkpoint=sections.checkpoint,
        card=sections.card,
        evaluation=_held_out_at(sections.evaluation, path),
    )


def _located(data: DataSource, path: Path) -> DataSource:
    """Resolve the data's paths relative to the run file, not to the working directory."""
    place = data.path if data.path == DEFAULT_PATH else _absolute(data.path, path)
    return replace(data, path=place, cache=_absolute(data.cache, path) if data.cache else "")


def _held_out_at(evaluation: EvaluationConfig, path: Path) -> EvaluationConfig:
    """Resolve the path of the held-out text, too."""
    if not evaluation.held_out:
        return evaluation
    return replace(evaluation, held_out=_absolute(evaluation.held_out, path))


def _absolute(folder: str, path: Path) -> str:
    if is_url(folder):
        return folder
    place = Path(folder)
    # A `~` is this user's home, and anything else is beside the run file.
    return str(full_path(place) if folder.startswith("~") else absolute_path(path).parent / place)


def _run_fields() -> list[str]:
    return list(RunConfig.__dataclass_fields__)


def _read_text(path: Path) -> str:
    content = read_file(
        path,
        FILE_SIZE_MAX_BYTES,
        why_large="a run file has a few kilobytes, so this is likely another file",
        fix=f"check the path, or write a new file with `decod run init {path.name}`",
        code="E-CFG-002",
    )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{_place(path, line)}: byte 0x{content[error.start]:02x} is not UTF-8",
            why="TOML files are UTF-8 text",
            fix="save the file as UTF-8",
            code="E-CFG-003",
        ) from None


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        why, place = "brackets are nested too deeply", _place(path, None)
    except ValueError as error:
        why = str(error)
        at = re.search(r"\(at line (\d+), column (\d+)\)", why)
        if at:
            place = f"{path}:{at[1]}:{at[2]}"
        elif "end of document" in why:
            place = _place(path, text.count("\n") + 1)
        else:
            place = _place(path, None)
        why = why.partition(" (at ")[0][:200]
    raise ConfigError(
        f"{place}: not valid TOML",
        why=why[:1].lower() + why[1:],
        fix='write key = value lines under [section] headers, strings in "quotes"',
        code="E-CFG-003",
    )


_HEADER = re.compile(r"\s*\[{1,2}\s*([^\]#]+?)\s*\]")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_.\-\s]|"[^"]*"|'[^']*')+?)\s*=""")


def locate_keys(text: str) -> dict[str, int]:
    """Return the first line, counted from 1, of each dotted key or table header.

    The standard library's parser keeps no positions. Keys inside inline tables are not found: look
    up the table's own line instead.
    """
    lines: dict[str, int] = {}
    table = ""
    open_quotes: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if open_quotes is None:
            if header := _HEADER.match(line):
                table = _plain_key(header[1])
                lines.setdefault(table, number)
            elif key := _KEY.match(line):
                name = _plain_key(key[1])
                lines.setdefault(f"{table}.{name}" if table else name, number)
        open_quotes = _open_after(line, open_quotes)
    return lines


def _plain_key(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def _open_after(line: str, open_quotes: str | None) -> str | None:
    """Return the triple quotes of a multi-line string that is open after this line, if any."""
    for quotes in re.findall(r'"""|\'\'\'', line):
        if open_quotes is None:
            open_quotes = quotes
        elif open_quotes == quotes:
            open_quotes = None
    return open_quotes


def _find_line(key: str, lines: dict[str, int]) -> int | None:
    """Return the line of a key, or else of the innermost table around it."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


def _place(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}:{line}"


def _explain(problems: list[Problem], lines: dict[str, int], path: Path) -> ConfigError:
    """Make an error of the problem that comes first in the file."""
    located = [(_find_line(problem.key, lines), problem) for problem in problems]
    line, problem = min(located, key=lambda item: item[0] or 0)
    more = len(problems) - 1
    also = f" ({more} more like this in the file)" if more else ""
    return ConfigError(
        f"{_place(path, line)}: {problem.what}{also}",
        why=problem.why,
        fix=problem.fix,
        code="E-CFG-005" if problem.what.startswith(f"{problem.key} is ") else "E-CFG-004",
    )
