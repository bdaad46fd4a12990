"""Options that several commands of `decod lab plan` take."""

from pathlib import Path

import click

path_type = click.Path(path_type=Path, allow_dash=True)

seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Start of everything random.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
