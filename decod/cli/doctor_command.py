"""`decod doctor`: says what is wrong with this host, or with its way to a run."""

from collections.abc import Sequence
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
from decod.cli.standard_output import json_text
from decod.exit_codes import ExitCode
from decod.paths import full_path
from decod.texts import clean_text

if TYPE_CHECKING:
    from decod.insight.host_checks import Diagnosis

SCHEMA_VERSION = 1
"""Of the JSON object. It grows when a field changes its meaning or goes away."""

_TEXT_MAX_CHARACTERS = 1000
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
        click.echo(json_text(to_json(told)))
    return exit_code_of(told)


def line_of(diagnosis: "Diagnosis") -> str:
    """Return one line for a terminal. Texts of other nodes are cleaned."""
    level = click.style(f"{diagnosis.level:<4}", fg=_COLORS[diagnosis.level], bold=True)
    found = clean_text(diagnosis.found, limit=_TEXT_MAX_CHARACTERS)
    remedy = clean_text(diagnosis.remedy, limit=_TEXT_MAX_CHARACTERS)
    return f"{level}  {diagnosis.check:<8}  {found}" + (f". Try: {remedy}" if remedy else "")


def to_json(told: Sequence["Diagnosis"]) -> dict[str, Any]:
    """Return all diagnoses as one JSON object."""
    from decod import __version__

    return {
        "schema_version": SCHEMA_VERSION,
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
