"""The `decod` command: finds the subcommand, and turns every error into one line and a code.

Subcommands are imported when they are used, so that `decod status` and `decod --help` answer at
once. Therefore their lines in the overview are in this module.
"""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from decod import __version__
from decod.cli.options import name_variables, notes_of
from decod.cli.printing import (
    OutputError,
    ReaderGoneError,
    ReportPlace,
    find_decod_error,
    output_failed,
    report_decod_error,
    report_unexpected,
    use_color,
)
from decod.exit_codes import ExitCode

SECTIONS: dict[str, dict[str, str]] = {
    "Volunteers": {
        "join": "Give this machine to a run.",
        "status": "Show who is there, what flows where, how fast, how good.",
        "doctor": "Say what is wrong with this host, and what to do.",
        "why": "Say why this node is idle, its run slow, or why it was removed.",
        "version": "Say which release this is, and how to update it.",
        "bugreport": "Pack logs and facts for a bug report, without secrets.",
        "pause": "Take no microbatches for a while, and stay in the run.",
        "resume": "Take microbatches again.",
        "set": "Show or change caps, schedule and pauses of the running node.",
        "drain": "Finish what is in hand and leave the run.",
        "credit": "Show what this host has done for runs.",
        "receipts": "Show what this host has contributed; verify what others say.",
    },
    "Organisers": {
        "run": "Write, check or plan a run file.",
        "data": "Turn text into token shards, or look at them.",
        "leader": "Start a training run and print its join string.",
        "token": "Make, list and revoke what lets others join.",
        "node": "List the run's nodes, ban one, or lift a ban.",
        "checkpoint": "List or verify the checkpoints of this host's runs.",
        "export": "Write the model in Hugging Face's format.",
        "push": "Upload the model to the Hugging Face Hub.",
        "generate": "Continue a text with an exported model, or with the run's own.",
        "evaluate": "Say how well an exported model predicts a text.",
        "analyse": "Say what holds a run back, and what would help.",
        "audit": "Show or verify the audit log of a data node.",
    },
    "Planning and study": {
        "lab": "Plan, simulate, and repeat experiments of the papers.",
        "optimizer": "Show a run of the collaborative optimizer, or simulate one.",
    },
    "This machine": {
        "demo": "Train a small model with several nodes on this machine.",
        "service": "Have a node start with this machine, and start again.",
        "identity": "Show, copy or bring back the key by which others know this node.",
    },
}
"""Sections of the overview: each command, under the people or the purpose that it is for."""

EVERYDAY = (
    *("join", "status", "doctor", "why", "pause", "drain"),
    *("run", "data", "leader", "token", "export", "service"),
)
"""Commands that most people need: `decod --help` shows these, and `decod --help-all` all."""

COMMANDS: dict[str, str] = {
    name: line for section in SECTIONS.values() for name, line in section.items()
}
"""Each command, and its line in the overview. `<name>` is in `decod.cli.<name>_command`, in a
module that `MODULES` names, or in the lab."""

MODULES = {
    **dict.fromkeys(("resume", "drain", "set"), "pause"),
    **dict.fromkeys(("why", "doctor", "analyse", "version", "bugreport"), "insight"),
    **dict.fromkeys(("export", "push", "generate", "evaluate"), "model"),
    **dict.fromkeys(("token", "node"), "members"),
    "receipts": "credit",
    "top": "status",
}
"""Commands that share a module: `drain` is in `pause_command`."""

LAB_NAMES = ("plan", "simulate", "study")
"""Commands of `decod lab` that can be typed without `lab`. They are in no overview."""

OLD_NAMES = ("top",)
"""Commands that have another name now, and still work. They are in no overview."""


class LazyGroup(click.Group):
    """A group whose commands are imported one at a time."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in {*COMMANDS, *LAB_NAMES, *OLD_NAMES}:
            return None
        in_lab = cmd_name == "lab" or cmd_name in LAB_NAMES
        command = _command("lab.cli" if in_lab else "cli", cmd_name)
        if cmd_name == "run":
            assert isinstance(command, click.Group)
            command.add_command(_command("lab.cli", "run_plan"), "plan")
        name_variables(command, *(["lab"] if cmd_name in LAB_NAMES else []), cmd_name)
        return command

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # By default, click imports every command to complete the name of one.
        found = [
            CompletionItem(name, help=line)
            for name, line in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            # By default, click looks for similar names only among imported commands.
            raise click.NoSuchCommand(error.command_name, possibilities=COMMANDS, ctx=ctx) from None

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = COMMANDS if _ALL in ctx.meta else EVERYDAY
        # One width for all sections, so that their second columns stand below each other.
        width = max(map(len, shown))
        for title, commands in SECTIONS.items():
            lines = [(f"{name:{width}}", commands[name]) for name in commands if name in shown]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)
        if shown is EVERYDAY:
            formatter.write_paragraph()
            formatter.write_text(f"All {len(COMMANDS)} commands: decod --help-all")


def _command(package: str, name: str) -> click.Command:
    """Import a command. Only here does the product know that there is a lab."""
    home = MODULES.get(name, name)
    command = getattr(importlib.import_module(f"decod.{package}.{home}_command"), name)
    assert isinstance(command, click.Command), name
    return command


_ALL = "decod.help_all"
"""The key in a context's `meta`: its help shows all commands."""


def _help_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


@click.group(
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_help_all,
    help="Show this message with all commands and exit.",
)
@click.version_option(__version__, message="decod %(version)s")
def cli() -> None:
    """Train a language model together, on GPUs that come and go.

    \b
    Examples:
      decod run init run.toml     write a run file
      decod leader run.toml       start the run; prints a join string
      decod join JOINSTRING       help with it, from any other machine
      decod status                see how it goes
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `decod` and return its exit code; see `decod.exit_codes`.

    Args:
        arguments: The command line after the program's name; if absent, the process's.
    """
    # A character that the terminal cannot show becomes an escape, and raises nothing.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    place = ReportPlace()
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="decod",
            standalone_mode=False,
            color=use_color(),
            obj=place,
        )
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
            for note in notes_of(error):
                click.echo(note, err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        with suppress(OSError):
            click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    except ReaderGoneError:
        return ExitCode.READER_GONE
    except OutputError as error:
        return report_decod_error(output_failed(error))
    except Exception as error:  # noqa: BLE001 - the top of the command line.
        ours = find_decod_error(error)
        return report_decod_error(ours) if ours else report_unexpected(error, place)
    # A command's exit code is the number that it returns or passes to `ctx.exit`.
    return result if isinstance(result, int) else ExitCode.OK
