"""`decod top`: the run on a terminal, live, until a key ends it."""

import sys
from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import state_dir_option
from decod.errors import ConfigError


@click.command()
@state_dir_option
def top(*, state_dir: Path) -> int:
    """Show the run that this host takes part in, live.

    \b
    Examples:
      decod top
      decod top --state-dir /tmp/relay-1

    q quits, and ? shows the other keys. Exits with 7 if no daemon runs here. If the daemon ends
    later, the last picture stays, and goes on when a daemon is back. Without a terminal, use
    `decod status`.
    """
    from decod.cli.pause_command import PAUSE_TIMEOUT_S
    from decod.cli.status_command import ANSWER_TIMEOUT_S
    from decod.cli.status_view import make_console
    from decod.cli.top_screen import show
    from decod.daemon.control import ask

    console = make_console()
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or console.is_dumb_terminal:
        raise ConfigError(
            "`decod top` has no terminal to draw on",
            why="it needs one for its picture and for keys",
            fix="`decod status`, or `decod status --watch`: they print lines",
            code="E-CFG-075",
        )

    def ask_node(request: dict[str, Any]) -> dict[str, Any]:
        changes = request["command"] in ("pause", "resume")
        timeout_s = PAUSE_TIMEOUT_S if changes else ANSWER_TIMEOUT_S
        return ask(state_dir, request, timeout_s=timeout_s)

    return show(ask_node, console)
