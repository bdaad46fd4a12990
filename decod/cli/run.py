"""`decod run init` writes a run file, `decod run check` shows what follows from one."""

import os
from pathlib import Path

import click

from decod.config import load_run_file
from decod.config.run_file import RunFile
from decod.config.schema import Manifest, activation_size_bytes, count_parameters
from decod.config.template import render_run_file
from decod.errors import ConfigError
from decod.model.config import stage_blocks


@click.group(no_args_is_help=True)
def run() -> None:
    """Write or check a run file.

    \b
    Examples:
      decod run init run.toml
      decod run check run.toml
    """


@run.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("run.toml"))
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(path: Path, *, force: bool) -> None:
    """Write a run file with every key, its default and what it means.

    PATH is run.toml if left out; `-` writes to the terminal.

    \b
    Example:
      decod run init run.toml
    """
    text = render_run_file()
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    _write(path, text, force=force)
    click.echo(f"wrote {path}; next: decod leader {path}")


def _write(path: Path, text: str, *, force: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists",
            why="it may hold your changes",
            fix="give another name, or --force to replace it",
            code="E-CFG-007",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}",
            why=error.strerror or type(error).__name__,
            fix="give a path in a folder that exists and that you may write to",
            code="E-CFG-007",
        ) from None


def _corpus_line(loaded: RunFile) -> str:
    """Return what the run's data is, after comparing it with the model.

    Raises:
        ConfigError: The model has too small a vocabulary for it.
        DataError: It is not there, or damaged.
    """
    from decod.data.corpus import DEFAULT_PATH
    from decod.data.dataset import Dataset

    if loaded.data.path == DEFAULT_PATH:
        return "the source text of Python's library, prepared on first use"
    with Dataset.open(Path(loaded.data.path)) as dataset:
        Manifest(
            run=loaded.run,
            data_index_sha256=dataset.index_sha256,
            data_vocab_size=dataset.vocab_size,
        )
        return f"{dataset.folder}: {dataset.num_tokens:,} tokens, {dataset.vocab_size:,} different"


@run.command()
@click.argument("path", type=click.Path(path_type=Path))
def check(path: Path) -> None:
    """Read a run file, look at its data, and show the sizes that follow.

    \b
    Example:
      decod run check run.toml
    """
    loaded = load_run_file(path)
    run, corpus = loaded.run, _corpus_line(loaded)
    blocks = stage_blocks(run.model, run.stages)
    batch = run.batch
    tokens = batch.tokens_per_microbatch * batch.num_microbatches * batch.num_data_nodes
    click.echo(f"{path} is valid")
    click.echo(f"parameters         {count_parameters(run.model):,}")
    click.echo(f"tokens / iteration {tokens:,}")
    click.echo(f"data               {corpus}")
    click.echo(f"activation         {activation_size_bytes(run) / 2**20:.2f} MiB per microbatch")
    for index, stage in enumerate(blocks):
        held = f"blocks {stage.start} to {stage.stop - 1}" if stage else "no blocks"
        extra = "embedding, final norm, head; " if index == 0 else ""
        click.echo(f"stage {index:<12} {extra}{held}")
