"""`decod pause`, `resume`, `drain` and `set`: how much the node of this host works, and whether."""

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import state_dir_option
from decod.cli.options import DurationType, words
from decod.cli.printing import waiting
from decod.config.node_settings import SETTINGS, UNSET
from decod.errors import DecodError, NotRunningError
from decod.process import takes_a_line
from decod.texts import clean_text, span

PAUSE_TIMEOUT_S = 20.0
"""Longer than the daemon waits for the leader."""


@click.command()
@click.option("--free-device", is_flag=True, help="End the compute process: free all its memory.")
@state_dir_option
def pause(*, free_device: bool, state_dir: Path) -> None:
    """Take no microbatches for a while, and stay in the run.

    \b
    Examples:
      decod pause
      decod pause --state-dir /tmp/relay-1
      decod pause --free-device       for something else that needs the memory

    The node ends the iteration in hand. From then on it computes nothing but its share of each
    step, and keeps its stage's weights loaded and up to date, until `decod resume`. A node that
    starts again is not paused. Refused, with exit code 5, if the stage would stop without it.

    With --free-device it leaves the run after one more iteration and ends its compute process; then
    `decod resume` joins again, loads the state, and takes work. The daemon goes on meanwhile.
    """
    request: dict[str, Any] = {"command": "pause"}
    if free_device:
        request["free_device"] = True
    answer = _ask_leader(state_dir, request)
    if answer.get("device_free"):
        click.echo("paused, and the device is free; `decod resume` ends that")
    elif free_device:
        click.echo("the device is free in an iteration or two: `decod status` shows it")
    elif answer.get("capacity") == 0:
        click.echo("paused; `decod resume` ends that")
    else:
        click.echo("pausing when the iteration in hand ends; `decod resume` ends that")


@click.command()
@state_dir_option
def resume(state_dir: Path) -> None:
    """Take microbatches again, after `decod pause`.

    A node that its schedule or a rule pauses stays paused: see `decod set`.

    \b
    Examples:
      decod resume
      decod resume --state-dir /tmp/relay-1

    To go on with a run after a stop, see `decod leader --resume`.
    """
    from decod.cli.status_view import causes_text

    answer = _ask_leader(state_dir, {"command": "resume"})
    if answer.get("causes"):
        click.echo(f"still paused: {causes_text(answer['causes'])}")
        click.echo("`decod set pause_when=none schedule=always` ends that, too")
    elif answer.get("device_free"):
        click.echo("this node joins the run again, and takes microbatches when it has its state")
    elif answer.get("capacity"):
        click.echo("this node takes microbatches")
    else:
        click.echo("this node takes microbatches when the iteration in hand ends")


def _ask_leader(state_dir: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Have the node ask its leader."""
    from decod.daemon.control import ask

    with waiting("asking the leader"):
        return ask(state_dir, dict(request), timeout_s=PAUSE_TIMEOUT_S)


_ANSWER_TIMEOUT_S = 5.0

_END_TIMEOUT_S = 90_000.0
"""Longer than any drain timeout, which the daemon itself enforces. A leader may take longer."""

_ENDED_MEANWHILE = "E-RUN-007"

_INTERVAL_S = 1.0
"""Time between two looks at what a leaving node waits for."""

_LOOKS_PER_LINE = 10
"""The number of looks for one line where there is no terminal."""


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=DurationType(minimum_s=0.0),
    metavar="TIME",
    help="Longest that it may take; then the node goes at once. As the daemon was told, if absent.",
)
@click.option("--end-run", is_flag=True, help="At the leader: end the run for everybody.")
@click.option("--no-wait", is_flag=True, help="Return at once; the node leaves by itself.")
@click.option("--yes", is_flag=True, help="Do not ask, even if the run loses a stage, or ends.")
@state_dir_option
def drain(
    *, timeout_s: float | None, end_run: bool, no_wait: bool, yes: bool, state_dir: Path
) -> None:
    """Finish what is in hand and leave the run, as Ctrl-C does.

    \b
    Examples:
      decod drain
      decod drain --timeout 5m
      decod drain --timeout 0s        leave at once: others do its part again
      decod drain --state-dir /tmp/relay-1 --no-wait
      decod drain --end-run           at the leader: keep the model and let everybody go

    Waits until the node has left. The last node of a stage stays until somebody else serves it, or
    its time is up. A leader hands over to another data node; where there is none, or with
    --end-run, the run ends and its model is kept. If the run loses a stage or ends, the command
    says so first, and asks on a terminal.
    """
    from decod.daemon.control import ask

    request: dict[str, Any] = {"command": "drain", "wait": not no_wait}
    asked: dict[str, Any] = {"command": "leaving"}
    if timeout_s is not None:
        request["timeout_s"] = asked["timeout_s"] = timeout_s
    if end_run:
        request["end_run"] = True
    else:
        _require_will(look_ahead(state_dir, asked), yes=yes)
    limit_s = _ANSWER_TIMEOUT_S if no_wait else _END_TIMEOUT_S

    def leave() -> dict[str, Any]:
        try:
            return ask(state_dir, request, timeout_s=limit_s)
        except NotRunningError as error:
            if error.code != _ENDED_MEANWHILE:
                raise
            return {"detail": "the daemon has ended"}

    answer = leave() if no_wait else _counting(leave, lambda: look_ahead(state_dir, asked))
    detail = answer.get("detail")
    click.echo(f"left the run: {clean_text(detail)}" if detail else "leaving the run")
    if unkept := answer.get("unkept"):
        click.echo(clean_text(unkept), err=True)


def tell_cost(state_dir: Path) -> None:
    """Tell what leaving means for the run, before a service stops the node of a folder."""
    if means := look_ahead(state_dir, {"command": "leaving"}).get("means"):
        click.echo(clean_text(means, limit=1000), err=True)


def look_ahead(state_dir: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what leaving means for the run, as the node says it; empty if none can say it."""
    from decod.daemon.control import ask

    try:
        return ask(state_dir, dict(asked), timeout_s=_ANSWER_TIMEOUT_S)
    except DecodError:
        # What is wrong shows when the node is asked to leave.
        return {}


def _require_will(outlook: Mapping[str, Any], *, yes: bool) -> None:
    """Tell what leaving means. On a terminal, ask if it is worth asking.

    Raises:
        Abort: The answer is no.
    """
    if means := outlook.get("means"):
        click.echo(clean_text(means, limit=1000), err=True)
    if outlook.get("is_grave") and not yes and sys.stdin is not None and sys.stdin.isatty():
        click.confirm("leave all the same?", default=False, abort=True, err=True)


def _counting(
    leave: Callable[[], dict[str, Any]], look: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Leave, and show meanwhile for what the node waits and for how long it may."""
    ended = threading.Event()
    results = list[dict[str, Any] | BaseException]()

    def work() -> None:
        try:
            results.append(leave())
        except BaseException as error:  # noqa: BLE001 - raised below, where it is caught.
            results.append(error)
        ended.set()

    # It does not keep the process from ending at Ctrl-C.
    threading.Thread(target=work, daemon=True).start()
    on_terminal = sys.stderr.isatty()
    num_shown = 0
    try:
        while not ended.wait(_INTERVAL_S):
            text = _waited_for(look())
            if text and on_terminal:
                click.echo(f"\r\x1b[K{text}", nl=False, err=True)
            elif text and num_shown % _LOOKS_PER_LINE == 0 and takes_a_line(sys.stderr):
                click.echo(text, err=True)
            num_shown += 1
    except KeyboardInterrupt:
        click.echo("the node leaves all the same; `decod status` shows when it is gone", err=True)
        raise
    finally:
        if on_terminal and num_shown:
            click.echo("\r\x1b[K", nl=False, err=True)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _waited_for(outlook: Mapping[str, Any]) -> str:
    """Return a line on what a leaving node waits for; empty if it does not say."""
    left_s = outlook.get("left_s")
    stage = outlook.get("stage")
    if not isinstance(left_s, int | float):
        return ""
    what = "finishing what is in hand"
    if stage is not None:
        what = f"waiting for another member of stage {clean_text(stage)}"
    return f"{what}: leaves in {span(left_s)} at the latest"


_SET_TIMEOUT_S = 10.0

_ORIGINS = {"option": "{option} of this start", "file": "decod set", "default": "default"}


@click.command()
@click.argument(
    "assignments",
    metavar="[NAME=VALUE]...",
    nargs=-1,
    shell_complete=words(*(f"{name}=" for name in SETTINGS)),
)
@state_dir_option
def set(assignments: tuple[str, ...], state_dir: Path) -> None:  # noqa: A001 - the command's name.
    """Show or change caps, schedule and pauses of the running node.

    \b
    Examples:
      decod set
      decod set upload=20Mbit download=50Mbit threads=4
      decod set schedule="Mon-Fri 22:00-07:00, Sat Sun 00:00-24:00"
      decod set pause_when=battery,hot
      decod set disk=50GiB device_memory=10GiB
      decod set upload=default

    Without a NAME it shows all values, and where each comes from. Either all changes are made, or
    none. They are kept in settings.json of the node's folder and hold after a restart, unless the
    command line then says otherwise. The answer says from when each change counts.
    """
    from decod.daemon.control import ask

    values = dict(map(_parted, assignments))
    request: dict[str, Any] = {"command": "set", "values": values}
    answer = ask(state_dir, request, timeout_s=_SET_TIMEOUT_S)
    shown = [each for each in answer["settings"] if not values or each["name"] in values]
    width = max((len(clean_text(each["value"])) for each in shown), default=0)
    for each in shown:
        value = clean_text(each["value"], limit=1000)
        name = clean_text(each["name"])
        origin = _ORIGINS.get(each["origin"], "?").format(option=clean_text(each["option"]))
        said = clean_text(each["counts"], limit=200) if values else f"({origin})"
        click.echo(f"{name:<14} {value:<{width}}  {said}")
        if values and each.get("option_returns") is True:
            option = clean_text(each["option"])
            click.echo(f"{'':<14} a restart with {option} goes by that again")


def _parted(assignment: str) -> tuple[str, str]:
    name, equals, value = assignment.partition("=")
    if not equals or not name or not value:
        raise click.UsageError(
            f"{assignment[:60]!r} is not NAME=VALUE: write it like upload=20Mbit,"
            f" or upload={UNSET} for no cap"
        )
    return name.strip().replace("-", "_"), value.strip()
