"""`decod credit`: what the nodes of this host have done, by run, and a card to show to others."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decod.cli.error_lines import print_warning
from decod.cli.node_options import state_dir_option
from decod.cli.standard_output import json_text
from decod.journal.credit import Credit, CreditRows, bytes_text, day_text, hours_text
from decod.paths import full_path
from decod.texts import clean_text, counted, why_of

if TYPE_CHECKING:
    from decod.errors import DecodError

SCHEMA_VERSION = 1
"""Of the JSON object. It grows when a field changes its meaning or goes away."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--card",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Also draw a card as SVG, to show to others.",
)
@click.option(
    "--add",
    "others",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also count what another node's state folder holds. May be repeated.",
)
@state_dir_option
def credit(*, as_json: bool, card: Path | None, others: tuple[Path, ...], state_dir: Path) -> None:
    """Show what this host has done for runs: microbatches, device hours, bytes.

    \b
    Examples:
      decod credit
      decod credit --card credit.svg
      decod credit --state-dir ~/decod-0 --add ~/decod-1

    A node counts its own work when an iteration is committed. Counts are this host's own word;
    `decod receipts` shows those for which data nodes vouch. No daemon is asked.
    """
    from decod.journal.credit_file import sum_of

    folders = [*dict.fromkeys(full_path(each) for each in (state_dir, *others))]
    rows = sum_of(_read(folder) for folder in folders)
    aside = [path for folder in folders for path in _damaged(folder)]
    for path in aside:
        print_warning(f"a damaged ledger is not counted: {path}")
    if as_json:
        click.echo(json_text(_to_json(rows, aside)))
    else:
        for line in _lines_of(rows):
            click.echo(line)
    if card is not None:
        _draw(rows, card)
        # The table alone is the output.
        click.echo(f"drawn: {card}", err=True)


def _read(folder: Path) -> CreditRows:
    from decod.errors import DataError
    from decod.journal.credit_file import FILE_NAME, DamagedLedgerError, read_credit

    path = folder / FILE_NAME
    try:
        return read_credit(folder)
    except DamagedLedgerError as error:
        raise DataError(
            f"the ledger {path} is damaged",
            why=str(error),
            fix="move it away, or start the node: it sets the file aside and begins a new one",
            code="E-DAT-050",
        ) from error
    except OSError as error:
        raise DataError(
            f"can't read the ledger {path}",
            why=why_of(error),
            fix="make it readable, or name another folder with --state-dir",
            code="E-DAT-051",
        ) from error


def _damaged(folder: Path) -> list[Path]:
    from decod.journal.credit_file import damaged_ledgers

    return damaged_ledgers(folder)


def _to_json(rows: CreditRows, aside: list[Path]) -> dict[str, object]:
    runs = [
        {
            "run_id": run_id,
            "run_name": row.run_name,
            "node_name": row.node_name,
            "first_s": row.first_s,
            "last_s": row.last_s,
            **asdict(row.credit),
        }
        for run_id, row in rows.runs.items()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "runs": runs,
        "earlier": {"num_runs": rows.earlier.num_runs, **asdict(rows.earlier.credit)},
        "total": {"num_runs": rows.num_runs, **asdict(rows.total)},
        "damaged": [str(path) for path in aside],
    }


def _lines_of(rows: CreditRows) -> Iterator[str]:
    """Yield a table with a line for each run, and the sum."""
    total = rows.total
    if not rows.num_runs:
        yield "nothing is counted yet: a node counts its work when an iteration is committed"
        return
    yield (
        f"{'RUN':<24}  {'MICROBATCHES':>12}  {'TOKENS':>15}  {'DEVICE HOURS':>12}  {'UP':>9}"
        f"  {'DOWN':>9}  {'FIRST (UTC)':<10}  LAST (UTC)"
    )
    for run_id, row in sorted(rows.runs.items(), key=lambda item: item[1].last_s):
        name = f"{clean_text(row.run_name, limit=14)} {clean_text(run_id)[:8]}"
        dates = f"{day_text(row.first_s):<10}   {day_text(row.last_s)}"
        yield f"{name:<24}  {_amounts(row.credit)}  {dates}"
    if rows.earlier.num_runs:
        name = counted(rows.earlier.num_runs, "earlier run")
        yield f"{name:<24}  {_amounts(rows.earlier.credit)}"
    yield ""
    runs = counted(rows.num_runs, "run")
    yield f"You did {total}, {bytes_text(total.received_bytes)} down, in {runs}"


def _amounts(credit: Credit) -> str:
    return (
        f"{credit.num_microbatches:>12,}  {credit.num_tokens:>15,}"
        f"  {hours_text(credit.device_s):>12}  {bytes_text(credit.sent_bytes):>9}"
        f"  {bytes_text(credit.received_bytes):>9}"
    )


def _draw(rows: CreditRows, path: Path) -> None:
    from decod.cli.credit_card import card_of
    from decod.files import replace_durably

    if not rows.runs:
        raise _nothing_to_draw()
    try:
        replace_durably(path, card_of(rows).encode())
    except OSError as error:
        from decod.errors import HardwareError

        raise HardwareError(
            f"can't write {path}",
            why=why_of(error),
            fix="free space, or name a file in another folder with --card",
            code="E-HW-015",
        ) from error


def _nothing_to_draw() -> "DecodError":
    from decod.errors import DataError

    return DataError(
        "no card is drawn",
        why="nothing is counted in this state folder yet",
        fix="draw it when `decod status` shows what you did, or name another --state-dir",
        code="E-DAT-052",
    )
