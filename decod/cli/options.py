"""Option types that several commands share. A wrong value is a usage error: exit code 2."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from typing_extensions import override

from decod.config.node_config import DEFAULT_PORT, RESUME_AUTO, RESUME_LATEST, parse_listen
from decod.errors import ConfigError, DecodError
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
        self._minimum_s = minimum_s
        self._maximum_s = maximum_s

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
        self.name = name
        self._read = read
        self._known = known

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


# Environment variables of options: their names, and what an error says of them.
#
# Every option has a variable, which is named after its command: `decod join --device` reads
# `DECOD_JOIN_DEVICE`. Options that hold the choices of one host also have a short variable, which
# all commands share: `DECOD_DEVICE`. Such an option declares it as its `envvar`. The command line
# wins over the command's own variable, and that over the short one.
#
# An option with `allow_from_autoenv=False` has no variable, since its value is a secret: every
# process that a command starts would inherit it.

PREFIX = "DECOD_"


class VariablesContext(click.Context):
    """The context of a command. It adds to an error the variables that the error is about."""

    @override
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> bool | None:
        if isinstance(exc_value, (click.UsageError, DecodError)):
            _tell_origin(exc_value, self)
        return super().__exit__(exc_type, exc_value, tb)


def name_variables(command: click.Command, *words: str) -> None:
    """Give every option of a command, and of the commands below it, its variable.

    Args:
        command: The command.
        words: What is typed for it behind `decod`.
    """
    command.context_class = VariablesContext
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            name_variables(child, *words, name)
    for option in command.params:
        if isinstance(option, click.Option) and option.expose_value and option.allow_from_autoenv:
            own = _variable((*words, _spelling(option)))
            option.envvar = [own, *(other for other in variables_of(option) if other != own)]
    command.epilog = _epilog(command)


def variables_of(option: click.Parameter) -> list[str]:
    """Return the variables that set an option; the first that is not empty counts."""
    names = option.envvar or []
    return [names] if isinstance(names, str) else list(names)


def given_by_environment(context: click.Context) -> Iterator[tuple[click.Option, str, str]]:
    """Yield each option that a variable has set, the variable, and its text."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if isinstance(option, click.Option) and source is ParameterSource.ENVIRONMENT:
            name = next(name for name in variables_of(option) if os.environ.get(name))
            yield option, name, os.environ[name]


def notes_of(error: BaseException) -> list[str]:
    """Return what has been added to an error."""
    return list(getattr(error, "__notes__", []))


def own_environment() -> dict[str, str]:
    """Return the variables that this process has and that options of decod read."""
    return {name: text for name, text in os.environ.items() if name.startswith(PREFIX)}


def has_desktop() -> bool:
    """Return whether programs that are started here can open a window before the operator."""
    shows = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return shows and not os.environ.get("SSH_CONNECTION")


def environment_of_nodes() -> dict[str, str]:
    """Return the environment for nodes whose command line says everything about them."""
    return {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}


def _variable(words: tuple[str, ...]) -> str:
    return PREFIX + "_".join(words).upper().replace("-", "_")


def _spelling(option: click.Option) -> str:
    return next(spelling for spelling in option.opts if spelling.startswith("--"))[2:]


def _epilog(command: click.Command) -> str | None:
    """Return the line of the help that shows the rule, by an option that has a short variable."""
    named = [p for p in reversed(command.params) if isinstance(p, click.Option) and p.envvar]
    if not named:
        return None
    option = max(named, key=lambda option: len(variables_of(option)))
    names = " or ".join(variables_of(option))
    return f"Environment variables set options, too: --{_spelling(option)} is {names}."


def _tell_origin(error: click.UsageError | DecodError, context: click.Context) -> None:
    """Add to an error the variables that have set what it names: an option, or a value."""
    text = error.format_message() if isinstance(error, click.UsageError) else str(error)
    for option, name, value in given_by_environment(context):
        # A number stands in many messages that have nothing to do with it.
        words = [*option.opts, *option.secondary_opts, *([] if value.isdecimal() else [value])]
        if not any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in words):
            continue
        # An error passes a context more than once.
        if (origin := f"(set by {name})") not in notes_of(error):
            error.add_note(origin)
