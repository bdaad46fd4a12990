"""`decod resume`: the node of this host takes microbatches again."""

from pathlib import Path

import click

from decod.cli.node_options import state_dir_option
from decod.cli.pause import PAUSE_TIMEOUT_S


@click.command()
@state_dir_option
def resume(state_dir: Path) -> None:
    """Take microbatches again, after `decod pause`.

    \b
    Examples:
      decod resume
      decod resume --state-dir /tmp/relay-1

    To go on with a run after a stop, see `decod leader --resume`.
    """
    from decod.daemon.control import ask

    answer = ask(state_dir, {"command": "resume"}, timeout_s=PAUSE_TIMEOUT_S)
    if answer.get("device_free"):
        click.echo("this node joins the run again, and takes microbatches when it has its state")
    elif answer.get("capacity"):
        click.echo("this node takes microbatches")
    else:
        click.echo("this node takes microbatches when the iteration in hand ends")
