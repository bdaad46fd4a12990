"""Option types that several commands share. A wrong value is a usage error: exit code 2."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from decod.config.node_config import DEFAULT_PORT, RESUME_AUTO, RESUME_LATEST, parse_listen
from decod.errors import ConfigError
from decod.objects import is_url
from decod.paths import full_path

_DURATION = re.compile(r"([0-9]{1,8}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)\Z")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

RUN_FILE = "run.toml"
"""The run file of a command that names none."""

_DURATION_MAX_S = 86_400.0
_STARTS = {"latest": RESUME_LATEST, "auto": RESUME_AUTO}


Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""Completes a value in a shell."""


def words(*known: str, files: bool = False) -> Completion:
    """Return what completes a value with one of these words, or also with the path of a file."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(word) for word in known if word.startswith(incomplete)]
        # The shell itself looks for files.
        return [*found, CompletionItem(incomplete, type="file")] if files else found

    return complete


class AddressType(click.ParamType[tuple[str, int]]):
    """`HOST:PORT`, with IPv6 in brackets. Becomes `(host, port)`."""

    name = "host:port"

    def __init__(self, *, default_port: int = DEFAULT_PORT) -> None:
        self._default_port = default_port

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_listen(str(value), default_port=self._default_port)
        except ConfigError as error:
            self.fail(f"{error.what}: {error.why}; {error.fix}", param, ctx)


class AutoOrCount(click.ParamType[int | None]):
    """`auto`, which becomes None, or a whole number from `minimum` to `maximum`."""

    name = "auto|n"

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return words("auto")(ctx, param, incomplete)

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        text = str(value)
        if text == "auto":
            return None
        # Longer texts are not converted: int() is slow for very long ones.
        plain = text.isascii() and text.isdecimal() and len(text) <= 9
        if not plain or not self._minimum <= int(text) <= self._maximum:
            limits = f"from {self._minimum} to {self._maximum}"
            self.fail(f"{text!r} is neither auto nor a number {limits}", param, ctx)
        return int(text)


class LatestOrIteration(click.ParamType[int]):
    """`latest`, `auto` (as `RESUME_LATEST`, `RESUME_AUTO`), or an iteration from 1."""

    name = "latest|auto|iteration"

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return words(*_STARTS)(ctx, param, incomplete)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if text in _STARTS:
            return _STARTS[text]
        if not (text.isascii() and text.isdecimal()) or len(text) > 15 or int(text) < 1:
            self.fail(f"{text!r} is neither latest, auto nor an iteration from 1", param, ctx)
        return int(text)


class DurationType(click.ParamType[float]):
    """A duration with its unit, like `2s`. Becomes seconds."""

    name = "duration"

    def __init__(self, *, minimum_s: float, maximum_s: float = _DURATION_MAX_S) -> None:
        self._minimum_s, self._maximum_s = minimum_s, maximum_s

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.match(str(value))
        if match is None:
            self.fail(f"{str(value)!r} is no length of time: write it like 2s or 1m", param, ctx)
        duration_s = float(match[1]) * _UNITS_S[match[2]]
        if not self._minimum_s <= duration_s <= self._maximum_s:
            limit = f"{self._maximum_s / 3600:g}h"
            self.fail(f"{value} is not between {self._minimum_s:g}s and {limit}", param, ctx)
        return duration_s


class WrittenType(click.ParamType[T]):
    """A value that a function reads from a text, such as a rate, a size or a schedule.

    Args:
        name: What it is, for `--help`.
        read: Returns the value, or raises ValueError with what is wrong.
        known: Values that a shell completes.
    """

    def __init__(self, name: str, read: Callable[[str], T], *known: str) -> None:
        self.name, self._read, self._known = name, read, known

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return words(*self._known)(ctx, param, incomplete)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


ADDRESS = AddressType()


class CorpusType(click.Path):
    """The place of a corpus: an absolute path, or a URL."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if is_url(str(value)):
            return str(value)
        super().convert(value, param, ctx)
        return str(full_path(Path(value)))


CORPUS = CorpusType()

data_option = click.option(
    "--data",
    type=CORPUS,
    metavar="DIR|URL",
    help="Corpus of this host, instead of the run file's data.path.",
)


def run_file_argument(name: str) -> Callable[[Function], Function]:
    """Return the argument that names a run file: `run.toml`, as `decod run init` writes it.

    Args:
        name: Of the function's parameter.
    """
    return click.argument(
        name, metavar="[RUN.toml]", type=click.Path(path_type=Path), default=Path(RUN_FILE)
    )
