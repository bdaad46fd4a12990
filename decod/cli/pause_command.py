"""`decod pause`: the node of this host takes no microbatches for a while, and stays in the run."""

from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import state_dir_option

PAUSE_TIMEOUT_S = 20.0
"""Longer than the daemon waits for the leader."""


@click.command()
@click.option("--free-device", is_flag=True, help="End the compute process: free all its memory.")
@state_dir_option
def pause(*, free_device: bool, state_dir: Path) -> None:
    """Take no microbatches for a while, and stay in the run.

    \b
    Examples:
      decod pause
      decod pause --state-dir /tmp/relay-1
      decod pause --free-device       for something else that needs the memory

    The node ends the iteration in hand. From then on it computes nothing but its share of each
    step, and keeps its stage's weights loaded and up to date, until `decod resume`. A node that
    starts again is not paused. Refused, with exit code 5, if the stage would stop without it.

    With --free-device it leaves the run after one more iteration and ends its compute process; then
    `decod resume` joins again, loads the state, and takes work. The daemon goes on meanwhile.
    """
    from decod.daemon.control import ask

    request: dict[str, Any] = {"command": "pause"}
    if free_device:
        request["free_device"] = True
    answer = ask(state_dir, request, timeout_s=PAUSE_TIMEOUT_S)
    if answer.get("device_free"):
        click.echo("paused, and the device is free; `decod resume` ends that")
    elif free_device:
        click.echo("the device is free in an iteration or two: `decod status` shows it")
    elif answer.get("capacity") == 0:
        click.echo("paused; `decod resume` ends that")
    else:
        click.echo("pausing when the iteration in hand ends; `decod resume` ends that")
