"""`decod pause`: the node of this host takes no microbatches for a while, and stays in the run."""

from pathlib import Path

import click

from decod.cli.node_options import state_dir_option

_TIMEOUT_S = 20.0
"""Above the time that the daemon waits for the leader."""


@click.command()
@state_dir_option
def pause(state_dir: Path) -> None:
    """Take no microbatches for a while, and stay in the run.

    \b
    Examples:
      decod pause
      decod pause --state-dir /tmp/relay-1

    The node ends the iteration in hand. From then on it computes nothing but its share of each
    step, and keeps its stage's weights loaded and up to date, until `decod resume`. A node that
    starts again is not paused. Refused, with exit code 5, if the stage would stop without it.
    """
    from decod.daemon.control import ask

    answer = ask(state_dir, {"command": "pause"}, timeout_s=_TIMEOUT_S)
    if answer.get("capacity") == 0:
        click.echo("paused; `decod resume` ends that")
    else:
        click.echo("pausing when the iteration in hand ends; `decod resume` ends that")
