"""`decod why`, `doctor`, `analyse`, `bugreport` and `version`: what is the matter, and where."""

import getpass
import os
import pwd
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.node_options import (
    advertise_option,
    device_option,
    join_file_option,
    join_string_of,
    listen_option,
    state_dir_option,
)
from decod.cli.options import own_environment
from decod.cli.printing import json_text, print_warning
from decod.config.node_config import invoking_user
from decod.exit_codes import ExitCode
from decod.paths import full_path
from decod.texts import clean_text

if TYPE_CHECKING:
    from decod.insight.why_evidence import Explanation

WHY_SCHEMA_VERSION = 1
"""The version of the JSON object of `decod why`. It grows when a field changes its meaning or goes
away."""

_TEXT_MAX_CHARACTERS = 1000
_TITLES = {"idle": "IDLE", "slow": "SLOW", "removed": "REMOVED"}


@click.command()
@click.argument(
    "question", required=False, type=click.Choice(["idle", "slow", "removed"]), metavar="[QUESTION]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@state_dir_option
def why(*, question: str | None, as_json: bool, state_dir: Path) -> None:
    """Say why this node is idle, why its run is slow, or why it was removed.

    \b
    Examples:
      decod why               what applies now
      decod why idle
      decod why slow
      decod why removed --json

    Each answer is a cause, the figures that support it, and one remedy. They come from the node's
    log, its metrics, and its status if it runs. If these don't tell, the answer says so.
    """
    from decod.insight.why import answers_of
    from decod.insight.why_evidence import WhyQuestion, records_of

    records = records_of(full_path(state_dir))
    answers = answers_of(records, None if question is None else WhyQuestion(question))
    if as_json:
        click.echo(json_text(answers_json(answers, records.unread)))
        return
    for unread in records.unread:
        print_warning(f"not read, so not counted: {unread}")
    if not answers:
        click.echo("nothing to explain: the node works, the run is not slow, and nobody removed it")
    for answer in answers:
        click.echo("\n".join(_lines_of(answer)))


def answers_json(answers: Sequence["Explanation"], unread: Sequence[str]) -> dict[str, Any]:
    """Return answers as one JSON object.

    Args:
        answers: The answers.
        unread: What could not be read, and why.
    """
    return {
        "schema_version": WHY_SCHEMA_VERSION,
        "answers": [{**asdict(answer), "remedy": answer.remedy or None} for answer in answers],
        "unread": list(unread),
    }


def _lines_of(answer: "Explanation") -> list[str]:
    """Return an answer for a terminal. Texts of other nodes are cleaned."""
    title = click.style(f"{_TITLES[answer.question]:<8}", bold=True)
    unsure = "" if answer.known else " (the records don't tell the whole cause)"
    lines = [f"{title} {_clean(answer.cause)}.{unsure}"]
    lines += [f"         {_clean(figure.text)}" for figure in answer.figures]
    if answer.remedy:
        lines.append(f"         Try: {_clean(answer.remedy)}.")
    return lines


def _clean(text: str) -> str:
    return clean_text(text, limit=_TEXT_MAX_CHARACTERS)


if TYPE_CHECKING:
    from decod.insight.host_checks import Diagnosis

DOCTOR_SCHEMA_VERSION = 1
"""The version of the JSON object of `decod doctor`. It grows when a field changes its meaning or
goes away."""

_COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command()
@click.argument(
    "join_string",
    metavar="[JOINSTRING]",
    nargs=-1,
    # Spaces within a pasted line make several words of it.
    callback=lambda _context, _parameter, words: " ".join(words) if words else None,
)
@join_file_option(envvar="DECOD_JOIN_FILE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@listen_option
@advertise_option
@device_option
@state_dir_option
def doctor(
    join_string: str | None, join_file: Path | None, *, as_json: bool, **options: Any
) -> int:
    """Say what is wrong with this host, and what to do.

    \b
    Examples:
      decod doctor
      decod doctor JOINSTRING
      decod doctor --join-file join.txt --json

    Each line is one check: OK, WARN or FAIL, what was found, and one remedy. With JOINSTRING it
    also asks a node of that run, which uses up no invitation. If a node runs on this host, it is
    asked too, and its port and device are left alone.

    Exits with 0 unless a check fails. Then it exits as `decod join` would end for that reason.
    """
    from decod.config.node_config import NodeConfig
    from decod.driver.event_loop import run_loop
    from decod.insight.doctor import Patient, examine
    from decod.net.join_string import JoinString

    text = join_string_of(join_string, join_file, name="JOINSTRING")
    host, port = options["listen"]
    config = NodeConfig(
        listen_host=host,
        listen_port=port,
        advertise=options["advertise"],
        device=options["device"],
        state_dir=full_path(options["state_dir"]),
    )
    patient = Patient(config=config, join=None if text is None else JoinString.parse(text))
    told = list["Diagnosis"]()

    def tell(diagnosis: "Diagnosis") -> None:
        told.append(diagnosis)
        if not as_json:
            click.echo(line_of(diagnosis))

    run_loop(examine(patient, tell))
    if as_json:
        click.echo(json_text(diagnoses_json(told)))
    return exit_code_of(told)


def line_of(diagnosis: "Diagnosis") -> str:
    """Return one line for a terminal. Texts of other nodes are cleaned."""
    level = click.style(f"{diagnosis.level:<4}", fg=_COLORS[diagnosis.level], bold=True)
    found = clean_text(diagnosis.found, limit=_TEXT_MAX_CHARACTERS)
    remedy = clean_text(diagnosis.remedy, limit=_TEXT_MAX_CHARACTERS)
    return f"{level}  {diagnosis.check:<8}  {found}" + (f". Try: {remedy}" if remedy else "")


def diagnoses_json(told: Sequence["Diagnosis"]) -> dict[str, Any]:
    """Return all diagnoses as one JSON object."""
    from decod import __version__

    return {
        "schema_version": DOCTOR_SCHEMA_VERSION,
        "decod_version": __version__,
        "exit_code": exit_code_of(told),
        "checks": [
            {
                "check": each.check,
                "level": each.level,
                "found": each.found,
                "remedy": each.remedy or None,
            }
            for each in told
        ],
    }


def exit_code_of(told: Sequence["Diagnosis"]) -> int:
    """Return the exit code of the first check that fails; 0 if none does."""
    return next((each.exit_code for each in told if each.exit_code), ExitCode.OK)


@click.command()
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also draw plots into this folder. Needs matplotlib.",
)
@click.option("--run", metavar="ID", help="Which run, by its id or the beginning of it.")
@click.option(
    "--rounds",
    "rounds_max",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="How many of the newest rounds to look at.",
)
def analyse(
    paths: tuple[Path, ...], *, as_json: bool, plots: Path | None, run: str | None, rounds_max: int
) -> None:
    """Say what holds a run back, by how much, and what would help.

    \b
    Examples:
      decod analyse ~/.local/state/decod
      decod analyse collected/            files of several peers
      decod analyse journal.jsonl --json
      decod analyse collected/ --plots figures/

    RUN is a node's state folder, a file of its journal, or a folder with those of several peers.
    Each peer records only what it sees itself: collect the folder `journal` of all state folders
    for the whole picture. No daemon is asked.
    """
    from decod.insight.analysis_report import report_of, select, text_of
    from decod.insight.plots import check_plots, draw_plots
    from decod.insight.round_files import read_records

    if plots is not None:
        check_plots(plots)
    records = read_records(paths)
    selection = select(records, run=run, rounds_max=rounds_max)
    report = report_of(selection, records.problems)
    click.echo(json_text(report.to_json()) if as_json else text_of(report))
    if plots is not None:
        for path in draw_plots(selection, report, plots):
            click.echo(f"drawn: {path}", err=True)


if TYPE_CHECKING:
    from decod.insight.bugreport import Contents

DOCTOR_TIMEOUT_S = 60.0

_STATUS_TIMEOUT_S = 5.0
_SUFFIX = ".tar.gz"


@click.command()
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write it, as .tar.gz. Default: a new file in the present folder.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask before it is written.")
@state_dir_option
def bugreport(*, output: Path | None, yes: bool, state_dir: Path) -> None:
    """Pack logs, configuration, status and facts of this node for a bug report.

    \b
    Examples:
      decod bugreport
      decod bugreport --state-dir /tmp/relay-1
      decod bugreport --yes --output report.tar.gz

    It shows what the archive would hold, and asks before it writes it. Private keys, join strings,
    tokens, addresses, host names, user names and home paths are removed or replaced. Data and
    weights are left out. It works whether the node runs or not, and sends nothing anywhere.
    """
    from decod.clocks import wall_clock
    from decod.insight.bugreport import write_archive

    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise click.UsageError("there is no terminal to ask on: give --yes")
    now_s = wall_clock()
    path = _path_of(output, now_s)
    contents = _collect(full_path(state_dir))
    for file in contents.files:
        cut = f"  without {file.cut}" if file.cut else ""
        click.echo(clean_text(f"{len(file.content):>12,} bytes  {file.name}{cut}"))
    for left_out in contents.left_out:
        click.echo(clean_text(f"    left out  {left_out}", limit=500))
    click.echo(f"{contents.size_bytes:>12,} bytes together, before they are compressed")
    if not yes and not click.confirm(f"write {path}?", default=False):
        click.echo("nothing was written")
        return
    size_bytes = write_archive(path, contents.files, now_s=now_s)
    click.echo(f"written: {path} ({size_bytes:,} bytes)")
    click.echo("read it before you send it: tar -xzf extracts it")


def _path_of(output: Path | None, now_s: float) -> Path:
    """Return the path of the archive, which does not exist yet."""
    if output is None:
        now = datetime.fromtimestamp(now_s, UTC)
        output = Path(f"decod-bugreport-{now:%Y%m%dT%H%M%SZ}{_SUFFIX}")
    path = full_path(output)
    if not path.name.endswith(_SUFFIX):
        raise click.BadParameter(f"its name ends with {_SUFFIX}", param_hint="--output")
    if os.path.lexists(path):
        raise click.BadParameter(f"{path} exists already", param_hint="--output")
    return path


def _collect(state_dir: Path) -> "Contents":
    from decod.insight import bugreport as facts
    from decod.insight.bugreport import contents_of, known_secrets
    from decod.insight.redaction import Redactor

    environment = own_environment()
    configuration = facts.configuration(state_dir, environment)
    hosts = facts.own_hosts() + facts.hosts_of_options(configuration["command"], environment)
    redactor = Redactor(users=_users(), home=_home(), hosts=hosts, secrets=known_secrets(state_dir))
    click.echo("asking `decod doctor`, which takes some seconds", err=True)
    found = {
        "versions.json": facts.versions(),
        "system.json": facts.system(state_dir),
        "configuration.json": configuration,
        "status.json": _status(state_dir),
        "why.json": _why(state_dir),
        "doctor.json": _doctor(state_dir),
    }
    return contents_of(state_dir, found, redactor)


def _users() -> list[str]:
    """Return the names of the user of this command, and of who has used sudo for it."""
    found = [invoking_user()]
    # A user of a container may have no entry.
    with suppress(KeyError):
        found.append(pwd.getpwuid(os.getuid()).pw_name)
    with suppress(OSError, KeyError):
        found.append(getpass.getuser())
    return [name for name in dict.fromkeys(found) if name]


def _home() -> str:
    return os.path.expanduser("~")


def _status(state_dir: Path) -> dict[str, Any]:
    from decod.daemon.control import ask
    from decod.daemon.status import for_members
    from decod.errors import DecodError

    try:
        return for_members(ask(state_dir, {"command": "status"}, timeout_s=_STATUS_TIMEOUT_S))
    except DecodError as error:
        return _failure(error)


def _why(state_dir: Path) -> dict[str, Any]:
    from decod.errors import DecodError
    from decod.insight.why import answers_of
    from decod.insight.why_evidence import WhyQuestion, records_of

    try:
        records = records_of(state_dir)
        answers = [each for one in WhyQuestion for each in answers_of(records, one)]
    except DecodError as error:
        return _failure(error)
    return answers_json(answers, records.unread)


def _doctor(state_dir: Path) -> dict[str, Any]:
    """Return what `decod doctor --json` prints; the reason if it fails."""
    import asyncio

    from decod.config.node_config import NodeConfig
    from decod.driver.event_loop import run_loop
    from decod.errors import DecodError
    from decod.insight.doctor import Patient, examine
    from decod.insight.host_checks import Diagnosis

    told: list[Diagnosis] = []

    async def ask() -> None:
        async with asyncio.timeout(DOCTOR_TIMEOUT_S):
            await examine(Patient(config=NodeConfig(state_dir=state_dir)), told.append)

    try:
        run_loop(ask())
    except (DecodError, OSError) as error:
        return {**diagnoses_json(told), "stopped_by": _failure(error)}
    return diagnoses_json(told)


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": str(error) or type(error).__name__}


VERSION_SCHEMA_VERSION = 1
"""The version of the JSON object of `decod version`. It grows when a field changes its meaning or
goes away."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(*, as_json: bool) -> None:
    """Say which release this is, how it was installed, and how to update it.

    \b
    Examples:
      decod version
      decod version --json
    """
    import platform
    from importlib import metadata

    from decod import __version__
    from decod.installation import find_installation

    installed = find_installation()
    torch = None
    with suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    if as_json:
        answer = {
            "schema_version": VERSION_SCHEMA_VERSION,
            "decod": __version__,
            "python": platform.python_version(),
            "torch": torch,
            "installed": installed.way.value,
            "place": str(installed.place),
            "update": installed.update,
        }
        click.echo(json_text(answer))
        return
    click.echo(
        f"decod {__version__}, Python {platform.python_version()}, torch {torch or 'missing'}"
    )
    click.echo(f"installed by {installed.way} in {installed.place}")
    click.echo(f"to update: {installed.update}")
