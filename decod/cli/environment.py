"""Environment variables of options: their names, and what an error says of them.

Every option has a variable, which is named after its command: `decod join --device` reads
`DECOD_JOIN_DEVICE`. Options that hold the choices of one host also have a short variable, which
all commands share: `DECOD_DEVICE`. Such an option declares it as its `envvar`. The command line
wins over the command's own variable, and that over the short one.

An option with `allow_from_autoenv=False` has no variable, since its value is a secret: every
process that a command starts would inherit it.
"""

import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType

import click
from click.core import ParameterSource
from typing_extensions import override

from decod.errors import DecodError

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
