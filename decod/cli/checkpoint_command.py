"""`decod checkpoint list` and `decod checkpoint verify`: the checkpoints on this host."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import checkpoint_store_option, state_dir_option
from decod.cli.options import LatestOrIteration
from decod.cli.printing import json_text, waiting
from decod.texts import clean_text

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")


@click.group(no_args_is_help=True)
def checkpoint() -> None:
    """List or verify the checkpoints of this host's runs.

    \b
    Examples:
      decod checkpoint list
      decod checkpoint verify
    """


@checkpoint.command("list")
@_json_option
@state_dir_option
@checkpoint_store_option
def list_(*, as_json: bool, state_dir: Path, checkpoint_store: str | None) -> None:
    """List the checkpoints that the leader on this host has written, the newest first.

    \b
    Examples:
      decod checkpoint list
      decod checkpoint list --state-dir /tmp/leader --json

    Only their manifests are read: `decod checkpoint verify` reads every byte.
    """
    from decod.train.checkpoint.store import require_readable

    _say_links(state_dir)
    rows = [_row(found) for found in _found(state_dir, checkpoint_store)]
    if as_json:
        click.echo(json_text(rows))
    elif rows:
        click.echo(f"{'ITERATION':>9}  {'WRITTEN (UTC)':<19}  {'SIZE':>10}  {'LOSS':>8}  RUN")
        for row in rows:
            click.echo(_line(row))
    require_readable(state_dir)
    if not rows and not as_json:
        places = " and ".join(filter(None, (str(state_dir / "runs"), checkpoint_store)))
        click.echo(f"no checkpoints in {clean_text(places, limit=4096)}")


def _found(state_dir: Path, store: str | None) -> list[Any]:
    """Return the checkpoints of a state folder, and of a store if one is given, newest first."""
    from decod.daemon.resume import find_all
    from decod.train.checkpoint.shared import open_store

    return find_all(state_dir, None if store is None else open_store(store))


@checkpoint.command()
@click.argument("iteration", type=LatestOrIteration(), required=False)
@_json_option
@state_dir_option
@checkpoint_store_option
def verify(
    iteration: int | None, *, as_json: bool, state_dir: Path, checkpoint_store: str | None
) -> None:
    """Read every byte of the checkpoints and compare it with its hash.

    \b
    Examples:
      decod checkpoint verify
      decod checkpoint verify latest
      decod checkpoint verify 1200 --state-dir /tmp/leader

    Verifies those of ITERATION, or all. Exits with 9 if one is bad, or there is none.
    """
    from decod.train.checkpoint.store import find_problems, require_readable

    _say_links(state_dir)
    found = _found(state_dir, checkpoint_store)
    if iteration == 0:
        found = found[:1]
    elif iteration is not None:
        found = [each for each in found if each.iteration == iteration]
    rows = []
    for each in found:
        with waiting(f"reading the checkpoint of iteration {each.iteration}"):
            problems = find_problems(each)
        # A checkpoint that its leader has removed meanwhile was too old, and is not bad.
        if not _is_gone(each.folder):
            rows.append(_row(each) | {"problems": problems})
            if not as_json:
                click.echo(f"{_line(rows[-1])}  {'BAD' if problems else 'ok'}")
                for problem in problems:
                    click.echo(f"           {clean_text(problem, limit=500)}")
    if as_json:
        click.echo(json_text(rows))
    require_readable(state_dir)
    _refuse_bad(rows, state_dir)


def _is_gone(folder: Any) -> bool:
    from decod.train.checkpoint.store import MANIFEST

    if not isinstance(folder, Path):
        return MANIFEST not in folder.names()
    try:
        folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _say_links(state_dir: Path) -> None:
    """Name on stderr the runs that are skipped because they are symlinks."""
    from decod.train.checkpoint.store import find_links

    for path in find_links(state_dir):
        text = "is passed over: it is a symlink; give the --state-dir that it leads to"
        click.echo(f"{clean_text(path, limit=4096)} {text}", err=True)


def _refuse_bad(rows: list[dict[str, Any]], state_dir: Path) -> None:
    from decod.errors import CheckpointError

    if not rows:
        raise CheckpointError(
            f"there is no such checkpoint in {state_dir / 'runs'}",
            why="nothing could be verified",
            fix="see `decod checkpoint list`, or give the leader's --state-dir",
            code="E-CKP-011",
        )
    bad = [row for row in rows if row["problems"]]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(rows)} checkpoints are bad, the newest in {bad[0]['folder']}",
            why=str(bad[0]["problems"][0]),
            fix="remove what does not belong there, make readable what is not, or else remove that "
            "folder; "
            "`decod leader --resume latest` passes bad ones over",
            code="E-CKP-010",
        )


def _row(found: Any) -> dict[str, Any]:
    manifest = found.manifest
    row: dict[str, Any] = {
        "iteration": found.iteration,
        "folder": str(found.folder),
        "run_id": found.run_id,
        "problem": found.problem or None,
    }
    if manifest is None:
        return row | dict.fromkeys(("run_name", "written_s", "size_bytes", "loss"))
    return row | {
        "run_name": manifest.settings.get("name"),
        "written_s": manifest.created_s,
        "size_bytes": manifest.size_bytes,
        "loss": manifest.loss,
    }


def _line(row: dict[str, Any]) -> str:
    if row["written_s"] is None:
        rest = f"{clean_text(row['problem'], limit=200)} ({clean_text(row['run_id'])})"
    else:
        written = datetime.fromtimestamp(row["written_s"], UTC)
        size = f"{row['size_bytes'] / 2**20:,.1f} MiB"
        name = clean_text(row["run_name"])
        run_id = clean_text(row["run_id"])
        rest = f"{written:%Y-%m-%d %H:%M:%S}  {size:>10}  {row['loss']:>8.4f}  {name} ({run_id})"
    return f"{row['iteration']:>9}  {rest}"
