"""`decod leader`: start a run from a run file, and print the join string to hand out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import (
    absolute,
    join_file_option,
    join_string_of,
    node_config,
    node_options,
    speaking,
)
from decod.cli.options import LatestOrIteration, data_option, run_file_argument
from decod.config.node_config import RESUME_AUTO


@click.command()
@run_file_argument("run_file")
@node_options
@click.option(
    "--init",
    type=click.Path(file_okay=False),
    metavar="DIR|ORG/NAME",
    help="Start from this model: a folder as `decod export` writes it, or ORG/NAME[@REVISION] on"
    " the Hugging Face Hub.",
)
@click.option(
    "--resume",
    type=LatestOrIteration(),
    metavar="latest|auto|ITERATION",
    help="auto, which is right after every stop: join the run again if others go on with it, else"
    " go on from its newest checkpoint, else begin it. latest, or an iteration: begin a second run"
    " from that checkpoint of the state folder.",
)
@click.option(
    "--new-run",
    "begins_anew",
    is_flag=True,
    help="Begin a second run of this name, even if the first goes on at other hosts.",
)
@data_option
@click.option(
    "--join",
    allow_from_autoenv=False,
    metavar="JOINSTRING",
    help="Be a further data node of a run that exists.",
)
@join_file_option()
@click.option(
    "--write-join",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the join string to this file too; only you may read it.",
)
@click.option(
    "--export",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the model goes when the run ends; in the state folder if left out.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write loss and rates of iterations here for TensorBoard; needs the extra tensorboard.",
)
@click.option(
    "--wandb",
    metavar="PROJECT",
    help="Send loss and rates of iterations to this project of Weights & Biases; needs the extra"
    " wandb.",
)
@click.option(
    "--public-page",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Show the run to the world at this port: read-only, and without addresses.",
)
def leader(run_file: Path, **options: Any) -> int:
    """Start a training run and print its join string.

    \b
    Examples:
      decod leader run.toml
      decod leader run.toml --listen 127.0.0.1:0 --state-dir /tmp/leader
      decod leader run.toml --init ./my-model --advertise example.org:7700
      decod leader run.toml --resume auto

    The leader is the run's first data node: it reads the data, runs embedding, head and loss, and
    decides who takes part. On Ctrl-C another data node leads, if there is one; else the run ends,
    after a last checkpoint, and --resume auto goes on from it, with a new join string to hand out.
    """
    from decod.cli.hub import fetched
    from decod.config.run_file import load_run_file
    from decod.daemon.entry import LeaderOptions
    from decod.daemon.leader_daemon import run_leader

    join = join_string_of(options["join"], options["join_file"], name="--join")
    if options["resume"] is not None and join is not None:
        raise click.UsageError("--resume and --join exclude each other")
    if options["resume"] not in (None, RESUME_AUTO) and options["init"] is not None:
        raise click.UsageError("--resume and --init exclude each other")
    if options["begins_anew"] and (join is not None or options["resume"] == RESUME_AUTO):
        raise click.UsageError("--new-run excludes --join and --resume auto, which begin no second")
    chosen = LeaderOptions(
        run_file=load_run_file(run_file),
        node=replace(node_config(options), base_dir=fetched(options["base"])),
        init_dir=fetched(options["init"]),
        resume=options["resume"],
        begins_anew=options["begins_anew"],
        join=join,
        export_dir=absolute(options["export"]),
        data=options["data"],
        join_path=absolute(options["write_join"]),
    )
    with speaking() as say:
        return run_leader(chosen, say)
