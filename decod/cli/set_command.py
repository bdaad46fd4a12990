"""`decod set`: shows or changes what the node of this host may use, and when it works."""

from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import state_dir_option
from decod.cli.options import words
from decod.config.node_settings import SETTINGS, UNSET
from decod.texts import clean_text

ANSWER_TIMEOUT_S = 10.0

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
    answer = ask(state_dir, request, timeout_s=ANSWER_TIMEOUT_S)
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
