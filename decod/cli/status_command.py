"""`decod status`: who is there, what flows where, how fast, how good.

It answers at once, since it imports nothing heavier than a socket and a library for tables.
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from decod.cli.node_options import state_dir_option
from decod.cli.options import DurationType
from decod.cli.printing import json_text
from decod.errors import DecodError, NotRunningError
from decod.exit_codes import ExitCode

ANSWER_TIMEOUT_S = 5.0
OTHERS_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 2.0
WATCH_INTERVAL_MIN_S = 0.2

Status = Mapping[str, Any]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--watch",
    "interval_s",
    type=DurationType(minimum_s=WATCH_INTERVAL_MIN_S),
    is_flag=False,
    flag_value=f"{WATCH_INTERVAL_S:.0f}s",
    metavar="[=2s]",
    help="Look again and again, until Ctrl-C.",
)
@click.option("--flows", "with_flows", is_flag=True, help="Also show each flow, hop by hop.")
@click.option(
    "--check", is_flag=True, help=f"Exit with {ExitCode.DEGRADED} if the run is not well."
)
@state_dir_option
def status(
    *, as_json: bool, interval_s: float | None, with_flows: bool, check: bool, state_dir: Path
) -> int:
    """Show the run that this host takes part in.

    \b
    Examples:
      decod status
      decod status --watch=5s
      decod status --flows
      decod status --json
      decod status --check && echo training

    Exits with 7 if no daemon runs here, and names the nodes of this host that it can see. With
    --check it exits with 8 if one runs but does not
    train.
    """
    if check and interval_s is not None:
        raise click.UsageError("--check gives one answer: leave out --watch")
    show = Show(as_json=as_json, flows=with_flows)
    if interval_s is not None:
        return watch(lambda: _read(state_dir), show, pause=lambda: time.sleep(interval_s))
    try:
        answer = _read(state_dir)
    except NotRunningError as error:
        from decod.daemon.control import NO_NODE_YET

        if not as_json and error.code != NO_NODE_YET:
            _tell_of_others(state_dir)
        raise
    print_status(answer, show)
    return ExitCode.DEGRADED if check and not is_well(answer) else ExitCode.OK


@click.command(hidden=True)
@state_dir_option
def top(state_dir: Path) -> int:
    """Look at the run again and again, as `decod status --watch` does.

    \b
    Examples:
      decod status --watch
    """
    return watch(lambda: _read(state_dir), Show(), pause=lambda: time.sleep(WATCH_INTERVAL_S))


def _read(state_dir: Path) -> Status:
    from decod.daemon.control import ask

    return ask(state_dir, {"command": "status"}, timeout_s=ANSWER_TIMEOUT_S)


def _tell_of_others(state_dir: Path) -> None:
    """Print the nodes of this host that have other state folders, one a line."""
    from decod.daemon.control import ask, folders_of_host
    from decod.texts import clean_text

    for folder in folders_of_host():
        if folder == state_dir:
            continue
        words = "decod status"
        try:
            found = ask(folder, {"command": "status"}, timeout_s=OTHERS_TIMEOUT_S)
        except DecodError as error:
            told = f"it says nothing here: {error.why}"
        else:
            node = found.get("node")
            name = node.get("name") if isinstance(node, Mapping) else None
            run = found.get("run_name") or found.get("run")
            state = found.get("state") or "running"
            words = "decod optimizer status" if "collaboration" in found else words
            told = clean_text(f"{name or 'a node'}, {state}, run {run or '?'}", limit=300)
        click.echo(f"{words} --state-dir {shlex.quote(clean_text(folder, limit=4096))}   # {told}")


def is_well(answer: Status) -> bool:
    """Return whether the run trains and this node takes part in it."""
    return answer.get("run_state") in {"training", "aggregating"} and answer.get("state") in {
        "training",
        "aggregating",
        "syncing",
        "draining",
    }


@dataclass(frozen=True, slots=True)
class Show:
    """The form in which an answer is shown."""

    as_json: bool = False
    """One JSON object a line instead of tables."""
    flows: bool = False
    """Show each flow, hop by hop. JSON always holds the flows."""


def watch(read: Callable[[], Status], show: Show, *, pause: Callable[[], None]) -> int:
    """Show the status again and again: in place on a terminal, one after another elsewhere.

    Ends normally on Ctrl-C, and with an error when the daemon ends.

    Args:
        read: Asks the daemon.
        show: The form of the answers.
        pause: Waits until the next answer is due.

    Raises:
        NotRunningError: The daemon has gone.
    """
    try:
        if show.as_json or not sys.stdout.isatty():
            while True:
                print_status(read(), show)
                pause()
        _redraw(read, show, pause)
    except KeyboardInterrupt:
        return ExitCode.OK


def _redraw(read: Callable[[], Status], show: Show, pause: Callable[[], None]) -> NoReturn:
    from rich.live import Live

    from decod.cli.status_view import make_console, render_status

    console = make_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(render_status(known_status(read()), flows=show.flows), refresh=True)
            pause()


def print_status(answer: Status, show: Show) -> None:
    """Print what a daemon has answered."""
    if show.as_json:
        click.echo(json_text(answer))
        return
    from decod.cli.status_view import make_console, render_status

    make_console().print(render_status(known_status(answer), flows=show.flows), crop=False)


def known_status(answer: Status) -> Status:
    """Return the answer, if this release can draw it.

    Raises:
        NotRunningError: The daemon is of another release (E-RUN-010).
    """
    from decod.daemon.control import SCHEMA_VERSION

    if "collaboration" in answer:
        raise NotRunningError(
            "the node of a training script answers in that folder",
            why="it is in a collaborative run, which has no stages and flows",
            fix="decod optimizer status, with the same --state-dir",
            code="E-RUN-045",
        )
    version = answer.get("schema_version")
    if version != SCHEMA_VERSION:
        raise NotRunningError(
            f"the daemon gives status of version {version}, this command draws {SCHEMA_VERSION}",
            why=f"it is decod {answer.get('decod_version')}, another release",
            fix="use the release that the daemon was started with, or --json",
            code="E-RUN-010",
        )
    return answer
