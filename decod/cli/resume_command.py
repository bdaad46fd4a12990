"""`decod resume`: the node of this host takes microbatches again."""

from pathlib import Path

import click

from decod.cli.node_options import state_dir_option
from decod.cli.pause_command import PAUSE_TIMEOUT_S


@click.command()
@state_dir_option
def resume(state_dir: Path) -> None:
    """Take microbatches again, after `decod pause`.

    A node that its schedule or a rule pauses stays paused: see `decod set`.

    \b
    Examples:
      decod resume
      decod resume --state-dir /tmp/relay-1

    To go on with a run after a stop, see `decod leader --resume`.
    """
    from decod.cli.status_view import causes_text
    from decod.daemon.control import ask

    answer = ask(state_dir, {"command": "resume"}, timeout_s=PAUSE_TIMEOUT_S)
    if answer.get("causes"):
        click.echo(f"still paused: {causes_text(answer['causes'])}")
        click.echo("`decod set pause_when=none schedule=always` ends that, too")
    elif answer.get("device_free"):
        click.echo("this node joins the run again, and takes microbatches when it has its state")
    elif answer.get("capacity"):
        click.echo("this node takes microbatches")
    else:
        click.echo("this node takes microbatches when the iteration in hand ends")
