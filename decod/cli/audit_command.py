"""`decod audit`: shows and verifies the audit log of a data node. The daemon need not run."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from decod.cli.node_options import state_dir_option
from decod.cli.options import DurationType
from decod.cli.printing import json_text
from decod.texts import clean_text

if TYPE_CHECKING:
    from decod.membership.audit_log import AuditLine, Checked, FoundLog, LogHead, RawLine

_DAY_S = 86_400.0
_HEAD = re.compile(r"([0-9]{1,12}):([0-9a-f]{64})\Z")


class HeadType(click.ParamType["LogHead"]):
    """`LINE:SHA256`, as `decod audit verify` prints it."""

    name = "head"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> "LogHead":
        from decod.membership.audit_log import LogHead

        match = _HEAD.match(str(value))
        if match is None:
            self.fail(f"{str(value)[:80]!r} is not what `decod audit verify` prints", param, ctx)
        return LogHead(int(match[1]), match[2])


run_option = click.option(
    "--run",
    metavar="NAME",
    help="The log of this run, by its name or by the root in its join strings.",
)


@click.group(no_args_is_help=True)
def audit() -> None:
    """Show or verify the audit log of a data node.

    \b
    Examples:
      decod audit show --since 1h
      decod audit verify

    A data node writes there who was let into the run, who was refused, and what else bears on the
    run's security. The daemon need not run.
    """


@audit.command()
@run_option
@click.option(
    "--head",
    "noted",
    type=HeadType(),
    metavar="LINE:SHA256",
    help="What this command has printed before: lines at the end must not be missing since.",
)
@state_dir_option
def verify(*, run: str | None, noted: "LogHead | None", state_dir: Path) -> None:
    """Check that the audit logs are as their node wrote them.

    \b
    Examples:
      decod audit verify
      decod audit verify --run my-run --state-dir /tmp/leader
      decod audit verify --head 1042:5c09...

    Checks the logs of all runs, or that of --run. Exits with 9 at the first line that was altered.
    """
    from decod.daemon.node_folder import is_in_use
    from decod.membership.audit_log import check_log
    from decod.membership.identity import load_identity

    logs = _chosen(state_dir, run, one=noted is not None)
    try:
        node = load_identity(state_dir).node_id
    except FileNotFoundError:
        node = None  # A copy of the log, perhaps on another host.
    in_use = is_in_use(state_dir)
    for log in logs:
        try:
            found = check_log(log, node=node, noted=noted)
        except OSError as error:
            raise _unreadable(log.folder, error) from error
        for line in _told(log, found, in_use=in_use):
            click.echo(clean_text(line, limit=1000))
        if found.broken is not None:
            raise _broken(found)


@audit.command()
@run_option
@click.option(
    "--since",
    "since_s",
    type=DurationType(minimum_s=0.0, maximum_s=3650 * _DAY_S),
    metavar="TIME",
    help="Only what happened within this time, like 1h or 7d.",
)
@click.option("--event", metavar="NAME", help="Only this event, like token.used.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as a JSON object.")
@state_dir_option
def show(
    *, run: str | None, since_s: float | None, event: str | None, as_json: bool, state_dir: Path
) -> None:
    """Print an audit log, the oldest line first. Says nothing about whether it was altered.

    \b
    Examples:
      decod audit show
      decod audit show --since 1h
      decod audit show --event member.admitted --json
    """
    from decod.membership.audit_log import parse_line

    (log,) = _chosen(state_dir, run, one=True)
    after = None if since_s is None else datetime.now(UTC) - timedelta(seconds=since_s)
    bad: list[tuple[Path, int, str]] = []
    try:
        for path, number, raw in _lines_of(log):
            try:
                line = parse_line(raw)
            except ValueError as error:
                if raw.ended:
                    bad.append((path, number, str(error)))
                continue
            if (after is None or line.time >= after) and event in (None, line.event):
                click.echo(json_text(line.content) if as_json else _shown(line))
    except OSError as error:
        raise _unreadable(log.folder, error) from error
    if bad:
        raise _illegible(bad)


def _lines_of(log: "FoundLog") -> "Iterator[tuple[Path, int, RawLine]]":
    """Yield each line with its file, and its number there."""
    from decod.membership.audit_log import log_files, read_lines

    for path in log_files(log.folder):
        with suppress(FileNotFoundError):  # The node may have removed it, as the oldest.
            yield from ((path, number, raw) for number, raw in enumerate(read_lines(path), 1))


# --- what is printed --------------------------------------------------------------------------


def _shown(line: "AuditLine") -> str:
    """Return a line of the log for people. It holds texts from peers, so it is cleaned."""
    parts = [f"{line.time.astimezone(UTC):%Y-%m-%d %H:%M:%S}", f"{line.seq:>6}", line.event]
    if line.actor != line.node:
        parts.append(f"by {_named(line.actor)}")
    if line.node:
        parts.append(_named(line.node))
    if line.address:
        parts.append(f"at {line.address}")
    parts += [f"{key}={_value(value)}" for key, value in line.details.items()]
    return clean_text("  ".join(parts[:3]) + "  " + " ".join(parts[3:]), limit=2000)


def _named(node: str) -> str:
    """Return the name and the short id of a node; another text as it is."""
    from decod.ids import NodeId
    from decod.membership.identity import name_of
    from decod.texts import from_base32

    try:
        is_id = len(from_base32(node)) == 32
    except ValueError:
        is_id = False
    return f"{name_of(NodeId(node))} ({node[:8]})" if is_id else node


def _value(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() else json.dumps(value)


def _told(log: "FoundLog", found: "Checked", *, in_use: bool) -> list[str]:
    """Return what a log holds, up to its first break."""
    lines = [f"audit log of run {log.run or log.root_text}, by {_named(found.signer or 'nobody')}"]
    files = "1 file" if found.num_files == 1 else f"{found.num_files} files"
    span = ""
    if found.first is not None and found.last is not None:
        times = (f"{t.astimezone(UTC):%Y-%m-%d %H:%M:%S}" for t in (found.first, found.last))
        span = ", from {} to {} UTC".format(*times)
    lines.append(f"  {found.num_lines:,} lines in {files}{span}")
    if found.num_unclosed:
        why = "the node was killed, its disk failed, or lines are missing there"
        lines.append(f"  opened without having been closed before: {found.num_unclosed} ({why})")
    if found.num_taken_over:
        lines.append(f"  lines that were not signed when it was opened: {found.num_taken_over}")
    if found.broken is not None:
        return lines
    if in_use:
        lines.append("  a daemon uses this folder, and may be writing now")
    elif not found.is_closed:
        lines.append("  not closed: the node was killed, or lines at the end are missing")
    if found.num_unsigned:
        lines.append(
            f"  lines at the end that are not signed, and prove nothing: {found.num_unsigned}"
        )
    if found.is_torn:
        lines.append("  the last line is not whole; the node cuts it off when it starts again")
    lines.append(f"  no line was altered; head {found.head.seq}:{found.head.sha256}")
    return lines


# --- which log --------------------------------------------------------------------------------


def _chosen(state_dir: Path, run: str | None, *, one: bool) -> "list[FoundLog]":
    """Return the logs of a state folder, or those of one run.

    Args:
        state_dir: The folder.
        run: The run's name, or its root. None: any.
        one: There must be one only.

    Raises:
        DataError: There is none (E-DAT-030), or more than one (E-DAT-031).
    """
    from decod.errors import DataError
    from decod.membership.audit_log import find_logs

    try:
        logs = find_logs(state_dir)
    except OSError as error:
        raise _unreadable(state_dir, error) from error
    chosen = [log for log in logs if run in (None, log.run, log.root_text)]
    if not chosen:
        known = ", ".join(log.run or log.root_text for log in logs)
        raise DataError(
            f"{state_dir} holds no audit log" + (f" of run {run}" if run else ""),
            why=f"it holds those of {known}" if known else "data nodes write one, and no others",
            fix="name the folder of a data node with --state-dir, or another run with --run",
            code="E-DAT-030",
        )
    if one and len(chosen) > 1:
        known = ", ".join(f"{log.run} ({log.root_text})" for log in chosen)
        raise DataError(
            f"{state_dir} holds {len(chosen)} audit logs",
            why=f"it has taken part in {known}",
            fix="choose one with --run, by its name or by what stands behind the name",
            code="E-DAT-031",
        )
    return chosen


# --- errors -----------------------------------------------------------------------------------


def _unreadable(path: Path, error: OSError) -> Exception:
    from decod.errors import DataError
    from decod.texts import why_of

    return DataError(
        f"the audit log can't be read: {error.filename or path}",
        why=why_of(error),
        fix="make it readable, as the user who runs the node",
        code="E-DAT-032",
    )


def _broken(found: "Checked") -> Exception:
    from decod.errors import DataError

    assert found.broken is not None
    path = found.broken.path
    line = found.broken.line
    what = found.broken.what
    return DataError(
        f"the audit log is broken at line {line} of {path}: {clean_text(what)}",
        why="its node has not written it so: somebody has altered it, or the disk has",
        fix="keep the file, look who could write to it, and compare it with a copy",
        code="E-DAT-033",
    )


def _illegible(bad: list[tuple[Path, int, str]]) -> Exception:
    from decod.errors import DataError

    path, line, why = bad[0]
    return DataError(
        f"line {line} of {path} is none of an audit log, nor are {len(bad) - 1} others",
        why=clean_text(why),
        fix="look for the first line that was altered with: decod audit verify",
        code="E-DAT-034",
    )
