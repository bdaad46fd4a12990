"""The run file: its tables beside those of `decod.run`, reading and writing.

It is TOML, checked key by key, with errors that name file, line and key. A file that is written
here has every key, its default, and a comment.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from decod.config.schema import validate
from decod.config.strict import MirrorError, Problem, build, read_file
from decod.data.index import DEFAULT_PATH
from decod.errors import ConfigError
from decod.objects import is_url
from decod.paths import absolute_path, full_path
from decod.run.run_config import RunConfig
from decod.run.training_config import Schedule, SyncMethod
from decod.train.checkpoint.store import EVERY_MAX, CheckpointConfig

# --- tables that are local: members need not agree on them ---

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}\Z")
_DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_.-]{1,96})?\Z")
_DATASETS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CardConfig:
    """Facts about an exported model that decod can't know."""

    license: str = ""
    """Licence of the model, by its name on the Hugging Face Hub, such as `apache-2.0`. Empty: the
    card names none."""
    base_model: str = ""
    """Name on the Hugging Face Hub of the model that the run began with, such as `owner/model`.
    Empty: as the folder of --init tells, and none without one."""
    datasets: str = ""
    """Where the text comes from: names of datasets on the Hugging Face Hub, separated by commas.
    Empty: the card names none."""

    def __post_init__(self) -> None:
        if self.license and not _LICENSE.match(self.license):
            raise ConfigError(
                f"card.license is {ascii(self.license)[:60]}",
                why="the Hugging Face Hub knows licences by short names",
                fix="give a name such as apache-2.0, cc-by-4.0 or other",
            )
        if self.base_model and not _DATASET.match(self.base_model):
            raise ConfigError(
                f"card.base_model is {ascii(self.base_model)[:100]}",
                why="it is the name of a model on the Hugging Face Hub",
                fix="give OWNER/NAME",
            )
        bad = [name for name in self.dataset_names if not _DATASET.match(name)]
        if bad or len(self.dataset_names) > _DATASETS_MAX:
            what = ascii(bad[0])[:100] if bad else f"a list of {len(self.dataset_names)} names"
            raise ConfigError(
                f"card.datasets is {what}",
                why=f"it holds names of datasets, at most {_DATASETS_MAX}",
                fix="give OWNER/NAME, and a comma between two of them",
            )

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The names of the datasets, one by one."""
        return tuple(name.strip() for name in self.datasets.split(",") if name.strip())


PROMPTS_MAX = 3
PROMPT_LENGTH_MAX = 500
"""In characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Settings of the leader's measurements on held-out text, and of what the model writes."""

    held_out: str = ""
    """Folder of that text, as `decod data prepare` writes it, absolute or as seen from this file,
    or its URL. Empty: nothing is evaluated."""
    every_iterations: int = 100
    """An evaluation after so many iterations; 0 for none. For each, the model travels to the leader
    and is written to its disk."""
    num_sequences: int = 64
    """Sequences of the text that an evaluation reads: always the same ones."""
    device: str = "cpu"
    """The leader's device for it: `cpu`, `auto` or `cuda:N`. A second copy of the model must fit
    there."""
    prompts: str = ""
    """Beginnings of texts, one on each line and at most three. The leader has the model go
    on with them now and then, on this device. Empty: none."""

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The prompts."""
        return tuple(line for line in self.prompts.splitlines() if line.strip())

    def __post_init__(self) -> None:
        longest = max(map(len, self.beginnings), default=0)
        if len(self.beginnings) > PROMPTS_MAX or longest > PROMPT_LENGTH_MAX:
            raise ConfigError(
                f"evaluation.prompts has {len(self.beginnings)} lines of {longest} characters",
                why=f"the model goes on with at most {PROMPTS_MAX} prompts of {PROMPT_LENGTH_MAX}"
                " characters each",
                fix="give fewer or shorter ones, each on a line of its own",
            )
        if not 0 <= self.every_iterations <= EVERY_MAX:
            raise ConfigError(
                f"evaluation.every_iterations is {self.every_iterations}",
                why="it is a number of iterations, from 0 to 2^40",
                fix="give 0 for no evaluations, or a number such as 100",
            )
        if self.num_sequences < 1:
            raise ConfigError(
                f"evaluation.num_sequences is {self.num_sequences}",
                why="without a sequence there is no loss",
                fix="give at least 1, such as 64",
            )


# The optimizer's settings that a run file leaves out, as the field chooses them.
#
# They depend on each other and on how long the run is, so no key has a constant default: a short
# warm-up, a cosine from there to the run's last iteration if that is known, and clipping at 1.0.

WARMUP_MAX = 2000
WARMUP_UNKNOWN = 100
_WARMUP_SHARE = 50
"""The warm-up of a run of known length is one in so many iterations, up to `WARMUP_MAX`."""
LR_MIN_RATIO = 0.1
CLIP_NORM = 1.0

USUAL_KEYS = ("warmup_iterations", "schedule", "decay_iterations", "lr_min_ratio", "clip_norm")
"""Keys of `[optimizer]` that `with_usual` adds."""


def with_usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run file with the optimizer's settings that it leaves out.

    What is of a wrong type stays as it is: the reader of the file says so.

    Args:
        values: Of the file, by section and key.
    """
    given = values.get("optimizer", {})
    length = values.get("num_iterations", 0)
    if not isinstance(given, dict) or type(length) is not int:
        return dict(values)
    decay = given.get("decay_iterations", length)
    if type(decay) is not int or type(given.get("warmup_iterations", 0)) is not int:
        return dict(values)
    usual_warmup = min(WARMUP_MAX, decay // _WARMUP_SHARE) if decay else WARMUP_UNKNOWN
    warmup = given.get("warmup_iterations", usual_warmup)
    falls = Schedule.COSINE if decay > warmup else Schedule.CONSTANT
    schedule = given.get("schedule", falls.value)
    found = {
        "warmup_iterations": warmup,
        "schedule": schedule,
        "decay_iterations": 0 if schedule == Schedule.CONSTANT else decay,
        "lr_min_ratio": LR_MIN_RATIO,
        "clip_norm": 0.0 if _is_compressed(values.get("sync")) else CLIP_NORM,
    }
    return {**values, "optimizer": {**found, **given}}


def _is_compressed(sync: object) -> bool:
    """Return whether gradients travel compressed. Then their norm is not known."""
    if not isinstance(sync, dict):
        return False
    steps_locally = sync.get("method", SyncMethod.GRADIENTS.value) != SyncMethod.GRADIENTS
    return not steps_locally and bool(sync.get("compression", "none") != "none")


# Reading of a run file: TOML, checked key by key, with errors that name file, line and key.

CACHE_MIN_GIB = 1 / 16
CACHE_MAX_GIB = 2.0**20

FILE_SIZE_MAX_BYTES = 1 << 20
"""A run file has about 4 KiB. A larger file than this is not a run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Who comes in with a join string."""

    ask: bool = False
    """Whether newcomers wait until the organiser lets them in."""


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
    """Measurements of the leader on held-out text. Members do not compare it."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    """Who comes in. Members do not compare it."""


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
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)


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
        run = RunConfig(
            **{name: getattr(sections, name) for name in RunConfig.__dataclass_fields__}
        )
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
        admission=sections.admission,
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
        why = "brackets are nested too deeply"
        place = _place(path, None)
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


# Writing of a run file with every key, its default, and a comment.
#
# The comments are the field docstrings in the owners' source, so each text exists only once.

_WIDTH = 98

_HEAD = """\
# A decod run. Start it with `decod leader THIS_FILE`; every volunteer gets these values from there.
# A key that is left out has its default, which `decod run init` without --preset writes.
"""

_USUAL = (
    "If the next keys are left out, they follow from num_iterations: a fiftieth of it is the "
    "warm-up, at most 2000 iterations, and the rate then falls as a cosine until its end. While it "
    "is 0, the warm-up is 100 iterations, and the rate stays. Take away the # to choose."
)


@cache
def field_comments(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]  # A class definition, by construction.
    comments = {}
    for declared, text in itertools.pairwise(body):
        match declared, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(comment))),
            ):
                comments[name] = " ".join(comment.split())
    return comments


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # An ASCII string in JSON is also a basic string in TOML.
        return json.dumps(str(value))
    return repr(value)


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _key_lines(cls: type, values: Any, left_out: Mapping[str, Any] | None = None) -> list[str]:
    """Return the lines of a section.

    Args:
        cls: Of the section.
        values: Of its keys.
        left_out: Keys that are written behind a #, with what counts then.
    """
    left_out = left_out or {}
    hints = get_type_hints(cls)
    comments = field_comments(cls)
    lines = []
    for each in dataclasses.fields(cls):
        hint = hints[each.name]
        if dataclasses.is_dataclass(hint):
            continue
        comment = comments[each.name]
        if issubclass(hint, Enum):
            comment += " One of: " + ", ".join(str(member.value) for member in hint) + "."
        if each.name == next(iter(left_out), None):
            lines += _comment_lines(_USUAL)
        lines += _comment_lines(comment)
        value = left_out.get(each.name, getattr(values, each.name))
        mark = "# " if each.name in left_out else ""
        lines.append(f"{mark}{each.name} = {_toml_value(value)}")
    return lines


def render_run_file(  # noqa: PLR0913 - one for each section.
    run: RunConfig | None = None,
    data: DataSource | None = None,
    checkpoint: CheckpointConfig | None = None,
    card: CardConfig | None = None,
    evaluation: EvaluationConfig | None = None,
    admission: AdmissionConfig | None = None,
    *,
    leaves_usual: bool = False,
) -> str:
    """Return the text of a run file. Reading it back gives the same values.

    Args:
        run: Values to write; the defaults if absent.
        data: The place of the data; the default corpus if absent.
        checkpoint: When the run's state is kept; the defaults if absent.
        card: What the exported model's card says; the defaults if absent.
        evaluation: What is measured on held-out text; the defaults if absent.
        admission: Who comes in with a join string; the defaults if absent.
        leaves_usual: Leave out what follows from the length of the run. See `with_usual`.
    """
    run = run or RunConfig()
    usual = _usual_of(run) if leaves_usual else {}
    hints = get_type_hints(RunConfig)
    comments = field_comments(RunConfig)
    lines = [_HEAD, *_key_lines(RunConfig, run)]
    sections = [
        (name, comments[name], hints[name], getattr(run, name))
        for name in hints
        if dataclasses.is_dataclass(hints[name])
    ]
    sections += [
        (
            "data",
            "Where this host's data is. This part and those below may differ from host to host.",
            DataSource,
            data or DataSource(),
        ),
        (
            "checkpoint",
            "When the leader keeps the run's state on its disk, to go on from after a stop.",
            CheckpointConfig,
            checkpoint or CheckpointConfig(),
        ),
        (
            "card",
            "What the card of the exported model says beside what decod knows.",
            CardConfig,
            card or CardConfig(),
        ),
        (
            "evaluation",
            "What the leader measures on text that the model is not trained with.",
            EvaluationConfig,
            evaluation or EvaluationConfig(),
        ),
        (
            "admission",
            "Who comes in with a join string.",
            AdmissionConfig,
            admission or AdmissionConfig(),
        ),
    ]
    for name, comment, cls, values in sections:
        assert isinstance(cls, type)
        left_out = usual if name == "optimizer" else {}
        lines += ["", *_comment_lines(comment), f"[{name}]", *_key_lines(cls, values, left_out)]
    return "\n".join(lines) + "\n"


def _usual_of(run: RunConfig) -> dict[str, Any]:
    sync = {"method": run.sync.method.value, "compression": run.sync.compression.value}
    found = with_usual({"num_iterations": run.num_iterations, "sync": sync})["optimizer"]
    return {key: found[key] for key in USUAL_KEYS}
