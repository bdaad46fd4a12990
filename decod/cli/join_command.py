"""`decod join`: give this machine to a run."""

from dataclasses import replace
from typing import Any

import click

from decod.cli.node_options import (
    join_file_option,
    join_string_of,
    moves_port,
    node_config,
    node_options,
    speaking,
    volunteer_options,
)
from decod.cli.options import AutoOrCount
from decod.exit_codes import ExitCode
from decod.limits import STAGE_INDEX_MAX
from decod.protocol.core.view import Duty


@click.command()
@click.argument(
    "join_string",
    metavar="[JOINSTRING]",
    nargs=-1,
    # Spaces within a pasted line make several words of it.
    callback=lambda _context, _parameter, words: " ".join(words) if words else None,
)
@join_file_option(envvar="DECOD_JOIN_FILE")
@click.option(
    "--stage",
    type=AutoOrCount(minimum=1, maximum=STAGE_INDEX_MAX),
    default="auto",
    show_default=True,
    metavar="auto|K",
    help="Relay stage to run, from 1; auto lets the leader choose the busiest.",
)
@click.option(
    "--server",
    "serves",
    is_flag=True,
    help="This host is reliable: keep a stage's state, and share its work out. Only for runs whose"
    " stages have servers.",
)
@click.option(
    "--duty",
    type=click.Choice([Duty.FRONTAL.value, Duty.BACKWARD.value]),
    help="What to do as a server; the leader chooses if left out. Implies --server.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what joining would download, open and use, and do not join.",
)
@volunteer_options
@node_options
def join(join_string: str | None, **options: Any) -> int:
    """Give this machine to a run.

    \b
    Examples:
      decod join JOINSTRING
      decod join JOINSTRING --device cuda:1 --name brave-otter
      decod join JOINSTRING --listen 127.0.0.1:0 --state-dir /tmp/relay-1
      decod join --join-file join.txt
      decod join JOINSTRING --upload-max 20Mbit --schedule 22:00-07:00
      decod join JOINSTRING --dry-run

    JOINSTRING is the line that `decod leader` printed. The node stays until the run is over, and
    joins again by itself if it falls out of it. Ctrl-C finishes the work in hand, says goodbye and
    leaves.
    """
    from decod.cli.hub import fetched
    from decod.daemon.demands import JoinOptions, run_dry
    from decod.daemon.life import run_join

    text = join_string_of(join_string, options["join_file"], name="JOINSTRING")
    if text is None:
        raise click.UsageError("Missing argument 'JOINSTRING': give it, or --join-file")
    duty = Duty(options["duty"] or Duty.NONE)
    node = replace(node_config(options), moves_port=moves_port(click.get_current_context()))
    if not options["dry_run"]:
        node = replace(node, base_dir=fetched(options["base"]))
    chosen = JoinOptions(
        join_string=text,
        node=node,
        stage_index=options["stage"],
        serves=options["serves"] or duty is not Duty.NONE,
        duty=duty,
    )
    with speaking() as say:
        if options["dry_run"]:
            code = run_dry(chosen, say)
            following = "the same command without --dry-run joins"
        else:
            code = run_join(chosen, say)
            following = f"decod credit --state-dir {node.state_dir} shows what this host has done"
        if code == ExitCode.OK:
            say(f"next: {following}")
        return code
