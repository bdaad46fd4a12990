"""`decod export`: the model of an iteration, while training goes on."""

import shlex
from pathlib import Path

import click

from decod.cli.error_lines import print_warning
from decod.cli.node_options import state_dir_option
from decod.cli.progress_bar import waiting
from decod.errors import ConfigError
from decod.paths import full_path
from decod.texts import clean_text

_TIMEOUT_S = 3600.0
"""Long, since the weights of all stages travel to this host, maybe over slow links."""


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Write into a folder that holds files already.")
@state_dir_option
def export(out: Path, state_dir: Path, *, force: bool) -> None:
    """Write the model into the folder OUT, in Hugging Face's format.

    \b
    Examples:
      decod export ./model
      decod export ./model --state-dir /tmp/leader

    Asks the leader, which runs on this host; all weights are those of one committed iteration, and
    training goes on. OUT gets config.json and model.safetensors, the tokenizer, and a model card.
    """
    from decod.daemon.control import ask

    folder = full_path(out)
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty",
            why="what is there could be replaced",
            fix="give another folder, or --force to write into this one",
            code="E-CFG-048",
        )
    request = {"command": "export", "path": str(folder)}
    with waiting("the leader puts the model together"):
        answer = ask(state_dir, request, timeout_s=_TIMEOUT_S)
    iteration = clean_text(answer.get("iteration"))
    path = clean_text(answer.get("path", request["path"]), limit=4096)
    click.echo(f"iteration {iteration} is in {path}")
    click.echo(f'next: decod generate --model {shlex.quote(path)} "Once upon a time"')
    if missing := answer.get("missing"):
        print_warning(f"the model there has {missing}")
