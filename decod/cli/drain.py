"""`decod drain`: the node of this host finishes its work and leaves the run."""

from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import state_dir_option
from decod.cli.options import DurationType
from decod.errors import NotRunningError
from decod.obs.text import clean_text

_ANSWER_TIMEOUT_S = 5.0

_END_TIMEOUT_S = 90_000.0
"""Longer than any drain timeout, which the daemon itself enforces. A leader may take longer."""

_ENDED_MEANWHILE = "E-RUN-007"


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=DurationType(minimum_s=0.0),
    metavar="TIME",
    help="Longest that it may take; then the node goes at once. As the daemon was told, if absent.",
)
@click.option("--end-run", is_flag=True, help="At the leader: end the run for everybody.")
@click.option("--no-wait", is_flag=True, help="Return at once; the node leaves by itself.")
@state_dir_option
def drain(*, timeout_s: float | None, end_run: bool, no_wait: bool, state_dir: Path) -> None:
    """Finish what is in hand and leave the run, as Ctrl-C does.

    \b
    Examples:
      decod drain
      decod drain --timeout 5m
      decod drain --timeout 0s        leave at once: others do its part again
      decod drain --state-dir /tmp/relay-1 --no-wait
      decod drain --end-run           at the leader: keep the model and let everybody go

    Waits until the node has left. The last node of a stage stays until somebody else serves it, or
    its time is up. A leader hands over to another data node; where there is none, or with
    --end-run, the run ends and its model is kept.
    """
    from decod.daemon.control import ask

    request: dict[str, Any] = {"command": "drain", "wait": not no_wait}
    if end_run:
        request["end_run"] = True
    if timeout_s is not None:
        request["timeout_s"] = timeout_s
    try:
        answer = ask(state_dir, request, timeout_s=_ANSWER_TIMEOUT_S if no_wait else _END_TIMEOUT_S)
    except NotRunningError as error:
        if error.code != _ENDED_MEANWHILE:
            raise
        answer = {"detail": "the daemon has ended"}
    detail = answer.get("detail")
    click.echo(f"left the run: {clean_text(detail)}" if detail else "leaving the run")
    if unkept := answer.get("unkept"):
        click.echo(clean_text(unkept), err=True)
