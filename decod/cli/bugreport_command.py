"""`decod bugreport`: logs and facts of a node in one archive, without secrets."""

import getpass
import os
import pwd
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.environment import own_environment
from decod.cli.node_options import state_dir_option
from decod.config.node_config import invoking_user
from decod.paths import full_path
from decod.texts import clean_text

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
    from decod.cli.why_command import to_json
    from decod.errors import DecodError
    from decod.insight.why import answers_of
    from decod.insight.why_evidence import WhyQuestion, records_of

    try:
        records = records_of(state_dir)
        answers = [each for one in WhyQuestion for each in answers_of(records, one)]
    except DecodError as error:
        return _failure(error)
    return to_json(answers, records.unread)


def _doctor(state_dir: Path) -> dict[str, Any]:
    """Return what `decod doctor --json` prints; the reason if it fails."""
    import asyncio

    from decod.cli.doctor_command import to_json
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
        return {**to_json(told), "stopped_by": _failure(error)}
    return to_json(told)


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": str(error) or type(error).__name__}
