"""`decod service`: a node that starts with the machine, and is restarted when it fails."""

import os
import pwd
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem, ShellComplete

from decod.cli.join_command import join
from decod.cli.leader_command import leader
from decod.cli.node_options import join_string_of, node_config
from decod.cli.options import given_by_environment, name_variables, words
from decod.cli.pause_command import tell_cost
from decod.cli.printing import print_warning
from decod.cli.service_manager import Manager, chosen_manager
from decod.cli.service_unit import Service, system_state_dir
from decod.config.node_config import RESUME_AUTO, NodeConfig, invoking_user
from decod.config.secret import write_join_string
from decod.errors import ConfigError, NotRunningError
from decod.exit_codes import ExitCode
from decod.paths import current_folder, full_path

_COMMANDS: dict[str, click.Command] = {"join": join, "leader": leader}
_UNIT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")


@click.group(no_args_is_help=True)
def service() -> None:
    """Have a node start with this machine, and start again when it fails.

    \b
    Examples:
      decod service install join --join-file join.txt --device cuda:0
      decod service logs -f
      decod service stop

    This takes systemd. A node of the whole system starts with the machine; one of a user, when that
    user logs in, or with the machine if the user may linger. On macOS it takes launchd, which
    starts a node when its user logs in.
    """


def _checked_unit(context: click.Context, parameter: click.Parameter, unit: str) -> str:
    if not _UNIT.match(unit):
        raise click.BadParameter(
            f"{unit!r} is no name of a unit: 1 to 64 letters, digits, dots, _ and -",
            ctx=context,
            param=parameter,
        )
    return unit


_unit_option = click.option(
    "--unit",
    default="decod",
    show_default=True,
    callback=_checked_unit,
    metavar="NAME",
    help="Name of the service: one for each node of a host.",
)
_system_option = click.option(
    "--system/--user",
    "of_system",
    default=None,
    help="A service of the machine, or of this user. For root: of the machine.",
)


def _complete_command(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a node's command line: first `join` or `leader`, then as that command does."""
    name, *rest = context.params.get(str(parameter.name)) or [""]
    if name not in _COMMANDS:
        return words(*_COMMANDS)(context, parameter, incomplete)
    return ShellComplete(_COMMANDS[name], {}, name, "").get_completions(rest, incomplete)


@service.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_unit_option
@_system_option
@click.option(
    "--run-as",
    metavar="USER",
    help="Whom a node of the machine runs as; who used sudo if left out.",
)
@click.option("--no-start", is_flag=True, help="Have it start with the machine, and not now.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit, and change nothing.")
@click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    required=True,
    metavar="join|leader ARGUMENT...",
    shell_complete=_complete_command,
)
def install(
    unit: str,
    command: tuple[str, ...],
    *,
    of_system: bool | None,
    run_as: str | None,
    no_start: bool,
    only_print: bool,
) -> None:
    """Install a node as a service, and start it.

    \b
    Examples:
      decod service install join --join-file join.txt --device cuda:0
      sudo decod service install --system join --join-file join.txt
      decod service install --unit decod-1 join --join-file join.txt --listen 0.0.0.0:7701
      decod service install leader run.toml

    Arguments are those of `decod join` or `decod leader`. The join string goes into a file that
    only the node's user may read. A leader goes on with what it has: see --resume auto.
    """
    manager = chosen_manager(of_system)
    if not only_print:
        manager.require()  # Before anything is written.
    asked = _parsed(command, manager, unit)
    user = _user_of(run_as) if manager.of_system else None
    planned = _planned(asked, unit, user)
    text = manager.render(planned)
    if only_print:
        click.echo(text, nl=False)
        return
    owner = None if user is None else (user.pw_uid, user.pw_gid)
    path = manager.unit_path(unit)
    join_path = manager.join_path(unit)
    try:
        if asked.join_string is not None:
            join_path.parent.mkdir(parents=True, exist_ok=True)
            write_join_string(join_path, asked.join_string, owner=owner)
        if not planned.manages_state_dir:
            _make_folder(planned.state_dir, owner)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(error) from error
    manager.enable(unit, starts=not no_start)
    click.echo(f"installed {path}" + ("" if no_start else " and started it"))
    click.echo(f"look at it with: decod status --state-dir {planned.state_dir}")


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parts of a node's command line."""

    arguments: list[str]
    """The arguments without the join string and the state folder."""
    join_string: str | None
    node: NodeConfig
    state_dir_given: bool
    written: list[Path]
    """Further files and folders that the node writes."""


def _parsed(command: Sequence[str], manager: Manager, unit: str) -> _Asked:
    """Check a node's command line as the node would.

    Raises:
        UsageError: It is not a valid command line.
        DecodError: It describes no possible node, or the run file or join string is bad.
    """
    name, *rest = command
    if name not in _COMMANDS:
        raise click.UsageError(f"{name!r} can't be a service: give join or leader")
    wrapped = _COMMANDS[name]
    name_variables(wrapped, name)
    context = wrapped.make_context(f"decod {name}", list(rest))
    raw = _texts_of(context, rest)
    given = context.params
    node = node_config(context.params)
    if given.get("dry_run"):
        raise click.UsageError("a dry run ends at once, and can't be a service")
    if given.get("begins_anew"):
        raise click.UsageError("--new-run would begin another run at every start of the service")
    joins = name == "join"
    text = join_string_of(
        given["join_string" if joins else "join"],
        given["join_file"],
        name="JOINSTRING" if joins else "--join",
    )
    if text is not None:
        from decod.net.join_string import JoinString

        JoinString.parse(text)
    elif joins:
        raise click.UsageError("give a join string, or better --join-file")
    else:
        from decod.config.run_file import load_run_file

        load_run_file(given["run_file"])
    arguments = [name, *_arguments_of(wrapped, raw)]
    if text is not None:
        arguments += ["--join-file", str(manager.join_path(unit))]
    elif given["resume"] is None:
        arguments += ["--resume", "auto"]
    elif given["resume"] != RESUME_AUTO:
        print_warning(
            "every start of the service begins a second run from that checkpoint; with --resume"
            " auto, or without the option, it goes on with the run"
        )
    written = [full_path(path) for name in _WRITTEN if (path := given.get(name))]
    return _Asked(arguments, text, node, "state_dir" in raw, written)


def _texts_of(context: click.Context, command: Sequence[str]) -> dict[str, Any]:
    """Return the texts of a node's parameters, by their names.

    They come from its command line and from variables, which the service would not see.
    """
    raw, _, _ = context.command.make_parser(context).parse_args([*command])
    for option, _, text in given_by_environment(context):
        if not option.is_flag or context.params[str(option.name)]:
            raw[str(option.name)] = text
    return dict(raw)


def _arguments_of(command: click.Command, texts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments that give these texts, without those that the service sets itself."""
    for parameter in command.params:
        if parameter.name not in texts or parameter.name in _OWN:
            continue
        value = texts[parameter.name]
        if isinstance(parameter, click.Option):
            yield from [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], value]
        elif value:
            yield value


_OWN = ("join_string", "join", "join_file", "state_dir")
"""Parameters of a node that the service sets itself."""

_WRITTEN = ("export", "write_join")
"""Parameters that name files and folders to which a node writes."""


def _planned(asked: _Asked, unit: str, user: pwd.struct_passwd | None) -> Service:
    state_dir = asked.node.state_dir
    if user is not None and not asked.state_dir_given:
        state_dir = system_state_dir(unit)
    return Service(
        unit=unit,
        arguments=[*asked.arguments, "--state-dir", str(state_dir)],
        python=sys.executable,
        folder=current_folder(),
        state_dir=state_dir,
        user=None if user is None else user.pw_name,
        writable=[path.parent for path in asked.written],
        drain_timeout_s=asked.node.drain_timeout_s,
        uses_cuda="cpu" not in asked.node.device,
    )


def _user_of(name: str | None) -> pwd.struct_passwd:
    """Return the user as whom a node of the machine runs: the named one, or sudo's caller.

    Raises:
        ConfigError: No user was named, or there is no such user (E-CFG-072).
    """
    name = name or invoking_user()
    if name is None:
        raise ConfigError(
            "nobody is named whom the node is to run as",
            why="it needs none of root's rights",
            fix="use sudo as the user who installed decod, or give --run-as USER",
            code="E-CFG-072",
        )
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(
            f"there is no user {ascii(name)[:60]}",
            why="the node is to run as that one",
            fix="give the name of one that exists with --run-as",
            code="E-CFG-072",
        ) from None


def _make_folder(path: Path, owner: tuple[int, int] | None) -> None:
    if path.is_dir():
        return
    path.mkdir(parents=True, mode=0o700)
    if owner is not None:
        os.chown(path, *owner)


def _unwritable(error: OSError) -> ConfigError:
    return ConfigError(
        f"can't write {error.filename}",
        why=error.strerror or str(error),
        fix="a service of the machine takes root: use sudo, or install one of this user (--user)",
        code="E-CFG-073",
    )


@service.command()
@_unit_option
@_system_option
def start(unit: str, *, of_system: bool | None) -> None:
    """Start an installed service.

    \b
    Example:
      decod service start
    """
    manager = _installed(of_system, unit)
    manager.start(unit)
    click.echo(f"started {unit}")


@service.command()
@_unit_option
@_system_option
def stop(unit: str, *, of_system: bool | None) -> None:
    """Have a service's node leave its run; it starts again with the machine.

    \b
    Example:
      decod service stop
    """
    manager = _installed(of_system, unit)
    _tell_cost(manager, unit)
    manager.stop(unit)
    click.echo(f"stopped {unit}")


def _tell_cost(manager: Manager, unit: str) -> None:
    """Tell what it means for the run that a service's node leaves it."""
    with suppress(OSError, ValueError):
        folder = manager.state_dir(unit)
        if folder is not None:
            tell_cost(folder)


@service.command()
@_unit_option
@_system_option
def uninstall(unit: str, *, of_system: bool | None) -> None:
    """Stop a service and remove it. The node's folder stays.

    \b
    Example:
      decod service uninstall
    """
    manager = _installed(of_system, unit)
    # Without a manager there are only files to remove.
    if manager.runs:
        _tell_cost(manager, unit)
        manager.disable(unit)
    try:
        manager.unit_path(unit).unlink()
        with suppress(FileNotFoundError):
            manager.join_path(unit).unlink()
    except OSError as error:
        raise _unwritable(error) from error
    if manager.runs:
        manager.forget()
    click.echo(f"removed {unit}; the node's state folder, with its identity, is where it was")


@service.command()
@_unit_option
@_system_option
def status(unit: str, *, of_system: bool | None) -> int:
    """Say whether a service runs, and show its node.

    \b
    Examples:
      decod service status
      decod service status --unit decod-1

    Exits with 0 if the service runs, and otherwise with 7.
    """
    from decod.cli.status_command import ANSWER_TIMEOUT_S, Show, print_status
    from decod.daemon.control import ask

    manager = _installed(of_system, unit)
    if not manager.show(unit):
        return ExitCode.NOT_RUNNING
    if (folder := manager.state_dir(unit)) is not None:
        try:
            answer = ask(folder, {"command": "status"}, timeout_s=ANSWER_TIMEOUT_S)
        except NotRunningError as error:
            click.echo(f"its node does not answer yet: {error.why}")
        else:
            print_status(answer, Show())
    return ExitCode.OK


@service.command()
@_unit_option
@_system_option
@click.option("-f", "--follow", is_flag=True, help="Go on showing what is written.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=1, max=1_000_000),
    default=100,
    show_default=True,
    help="How many lines to begin with.",
)
def logs(unit: str, *, of_system: bool | None, follow: bool, lines: int) -> NoReturn:
    """Show what a service's node has written.

    \b
    Examples:
      decod service logs
      decod service logs -f
    """
    manager = _installed(of_system, unit)
    command = manager.log_command(unit, lines, follow=follow)
    os.execv(command[0], command)  # noqa: S606 - journalctl or tail, by its path.


def _installed(of_system: bool | None, unit: str) -> Manager:  # noqa: FBT001 - a flag's value.
    """Return the manager of an installed unit.

    Raises:
        ConfigError: The unit is not installed (E-CFG-074).
    """
    manager = chosen_manager(of_system)
    if not manager.unit_path(unit).exists():
        kind = "the machine" if manager.of_system else "this user"
        raise ConfigError(
            f"{kind} has no service {unit}",
            why=f"{manager.unit_path(unit)} is not there",
            fix="install it, or name it with --unit, --system or --user",
            code="E-CFG-074",
        )
    return manager
