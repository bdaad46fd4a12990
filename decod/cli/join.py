"""`decod join`: give this machine to a run."""

from typing import Any

import click

from decod.cli.node_options import node_config, node_options, speaking
from decod.cli.options import AutoOrCount
from decod.wire.validate import STAGE_INDEX_MAX


@click.command()
@click.argument("join_string", metavar="JOINSTRING")
@click.option(
    "--stage",
    type=AutoOrCount(minimum=1, maximum=STAGE_INDEX_MAX),
    default="auto",
    show_default=True,
    metavar="auto|K",
    help="Relay stage to run, from 1; auto lets the leader choose the busiest.",
)
@node_options
def join(join_string: str, **options: Any) -> int:
    """Give this machine to a run.

    \b
    Examples:
      decod join JOINSTRING
      decod join JOINSTRING --device cuda:0 --name brave-otter
      decod join JOINSTRING --listen 127.0.0.1:0 --state-dir /tmp/relay-1

    JOINSTRING is the line that `decod leader` printed. Ctrl-C finishes the work in hand, says
    goodbye and leaves.
    """
    from decod.daemon.volunteer import JoinOptions, run_join

    chosen = JoinOptions(
        join_string=join_string, node=node_config(options), stage_index=options["stage"]
    )
    with speaking() as say:
        return run_join(chosen, say)
