"""`decod credit` and `receipts`: what the nodes of this host have done, and who vouches for it."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from decod.cli.node_options import state_dir_option
from decod.cli.printing import json_text, print_warning
from decod.journal.credit import Credit, CreditRows, bytes_text, day_text, hours_text
from decod.paths import full_path
from decod.texts import clean_text, counted, why_of

SCHEMA_VERSION = 1
"""The version of the JSON object of `decod credit`. It grows when a field changes its meaning or
goes away."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--add",
    "others",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also count what another node's state folder holds. May be repeated.",
)
@state_dir_option
def credit(*, as_json: bool, others: tuple[Path, ...], state_dir: Path) -> None:
    """Show what this host has done for runs: microbatches, device hours, bytes.

    \b
    Examples:
      decod credit
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
        return
    for line in _lines_of(rows):
        click.echo(line)


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


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

_KEY_HELP = "The public key of the run's root: the 52 characters after the kind in a join string."


@click.group(invoke_without_command=True)
@_json_option
@state_dir_option
@click.pass_context
def receipts(context: click.Context, *, as_json: bool, state_dir: Path) -> None:
    """Show what this host has contributed to runs, and who vouches for it.

    \b
    Examples:
      decod receipts
      decod receipts export > mine.receipts
      decod receipts verify mine.receipts --run-key KEY

    Data nodes count the microbatches that a volunteer's node has worked on, once they are
    committed, and sign the count. A data node's own work is its own word. No daemon is asked.
    """
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context)
        return
    found = [(key, rows) for key, rows, _ in _kept(state_dir)]
    if as_json:
        runs = [{"run_key": key, "receipts": rows} for key, rows in found]
        click.echo(json_text({"runs": runs}))
        return
    for key, rows in found:
        click.echo(f"run key {key}")
        _print_rows(rows)
    if not found:
        click.echo(f"no receipts in {clean_text(state_dir / 'memberships', limit=4096)}")


@receipts.command()
@click.option("--run-key", metavar="KEY", help="Which run, if this host has receipts of several.")
@state_dir_option
def export(*, run_key: str | None, state_dir: Path) -> None:
    """Print this host's receipts, one a line, for others to verify.

    \b
    Examples:
      decod receipts export > mine.receipts
      decod receipts export --run-key KEY --state-dir /tmp/relay-1

    They hold nothing secret.
    """
    from decod.errors import DataError

    if run_key is not None:
        _root_of(run_key)
    found = {key: text for key, _, text in _kept(state_dir) if run_key in (None, key)}
    if len(found) > 1:
        raise click.UsageError(f"--run-key is one of {', '.join(found)}")
    if not found:
        raise DataError(
            f"there are no such receipts in {state_dir}",
            why="no data node has vouched for work of this host in that run",
            fix="see `decod receipts`, or name another folder with --state-dir",
            code="E-DAT-030",
        )
    click.echo(next(iter(found.values())), nl=False)


@receipts.command()
@click.argument("path", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--run-key", metavar="KEY", required=True, help=_KEY_HELP)
@_json_option
def verify(path: Path, *, run_key: str, as_json: bool) -> None:
    """Check the receipts in PATH, and add up what they say; `-` reads standard input.

    \b
    Examples:
      decod receipts verify mine.receipts --run-key KEY
      cat *.receipts | decod receipts verify - --run-key KEY

    Needs nothing but the key. A count that stands in several receipts counts once. Exits with 9 if
    a line is not a receipt of that run as its issuer has written it.
    """
    from decod.errors import DataError
    from decod.membership.receipts import read_receipts

    root = _root_of(run_key)
    read = read_receipts(_text_of(path), root)
    rows = read.receipts.rows()
    if as_json:
        click.echo(json_text({"receipts": rows, "problems": read.problems}))
    else:
        _print_rows(rows)
        for problem in read.problems:
            click.echo(clean_text(problem, limit=500), err=True)
    if read.problems or not rows:
        name = "standard input" if str(path) == "-" else str(path)
        num_bad = len(read.problems)
        raise DataError(
            f"{num_bad} lines of {name} are no receipts of this run"
            if num_bad
            else f"there are no receipts in {name}",
            why=read.problems[0] if num_bad else "nothing could be verified",
            fix="give what `decod receipts export` has printed, and the key of its run",
            code="E-DAT-031",
        )


def _refuse_misplaced(context: click.Context) -> None:
    """Refuse options that stand before a subcommand, where they would mean nothing."""
    for name, option in (("as_json", "--json"), ("state_dir", "--state-dir")):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} belongs after {context.invoked_subcommand}")


def _kept(state_dir: Path) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """Yield key, rows and text of the receipts of each run that this host has any of."""
    from decod.errors import DataError
    from decod.membership.receipts import RECEIPTS_FILE, load_receipts
    from decod.texts import from_base32

    for path in sorted((state_dir / "memberships").glob(f"*/{RECEIPTS_FILE}")):
        key = path.parent.name
        try:
            read = load_receipts(path.parent, from_base32(key))
        except (OSError, ValueError) as error:
            raise DataError(
                f"can't read {path}",
                why=getattr(error, "strerror", None) or str(error),
                fix="make it readable, or move it away",
                code="E-DAT-032",
            ) from error
        for problem in read.problems:
            click.echo(clean_text(f"{path}: {problem}", limit=4096), err=True)
        if len(read.receipts):
            yield key, read.receipts.rows(), read.receipts.text()


def _root_of(run_key: str) -> bytes:
    """Return the public key that a run key stands for."""
    from decod.membership.credential import PUBLIC_KEY_SIZE_BYTES
    from decod.texts import from_base32

    try:
        root = from_base32(run_key)
    except ValueError:
        root = b""
    if len(root) != PUBLIC_KEY_SIZE_BYTES:
        raise click.BadParameter(
            "it is 52 characters of a-z and 2-7, as in a join string", param_hint="--run-key"
        )
    return root


def _text_of(path: Path) -> str:
    from decod.errors import DataError
    from decod.files import read_beginning
    from decod.membership.receipts import FILE_MAX_BYTES

    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(FILE_MAX_BYTES)
        else:
            data = read_beginning(path, FILE_MAX_BYTES)
    except OSError as error:
        raise DataError(
            f"can't read receipts from {path}",
            why=error.strerror or str(error),
            fix="give the file that `decod receipts export` has written",
            code="E-DAT-032",
        ) from error
    return data.decode(errors="replace")


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    click.echo(
        f"{'RUN':<8}  {'NODE':<8}  {'MICROBATCHES':>12}  {'TOKENS':>15}  {'ITERATIONS':>13}  "
        f"{'LAST (UTC)':<16}  VOUCHED FOR BY"
    )
    for row in rows:
        iterations = f"{row['first_iteration']}-{row['last_iteration']}"
        by = "nobody: its own word" if row["own_word"] else f"data node {row['issuer'][:8]}"
        click.echo(
            f"{row['run_id'][:8]}  {row['holder'][:8]}  {row['num_microbatches']:>12,}  "
            f"{row['num_tokens']:>15,}  {iterations:>13}  {_minute(row['issued_s']):<16}  {by}"
        )


def _minute(seconds: int) -> str:
    """Return an instant of the Unix epoch, or what its issuer gave as one."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):
        return "?"
