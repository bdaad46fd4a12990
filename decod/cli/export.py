"""`decod export`: the model of an iteration, while training goes on."""

from pathlib import Path

import click

from decod.cli.node_options import state_dir_option
from decod.obs.text import clean_text

_TIMEOUT_S = 3600.0
"""Every stage's weights travel to this host, over whatever links there are."""


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@state_dir_option
def export(out: Path, state_dir: Path) -> None:
    """Write the model into the folder OUT, in Hugging Face's format.

    \b
    Examples:
      decod export ./model
      decod export ./model --state-dir /tmp/leader

    Asks the leader, or another data node, that runs on this host; all weights are those of one
    committed iteration, and training goes on. OUT gets config.json and model.safetensors.
    """
    from decod.daemon.control import ask

    request = {"command": "export", "path": str(out.expanduser().absolute())}
    answer = ask(state_dir, request, timeout_s=_TIMEOUT_S)
    iteration = clean_text(answer.get("iteration"))
    path = clean_text(answer.get("path", request["path"]), limit=4096)
    click.echo(f"iteration {iteration} is in {path}")
