"""`decod run init` writes a run file, `decod run check` checks one and shows its sizes.

`decod run plan` is one of the lab's (`decod.lab.cli.run_plan_command`).
"""

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.node_options import state_dir_option
from decod.cli.options import RUN_FILE, data_option, run_file_argument
from decod.cli.printing import print_warning, progress, waiting
from decod.errors import ConfigError

if TYPE_CHECKING:
    from decod.run.run_config import RunConfig

SYNC_PRESET_NAMES = ("all-reduce", "diloco", "opendiloco", "muloco", "dilocox", "cocktailsgd")
"""Keys of `decod.config.presets.PRESETS`, which is slow to import: a shell completes them."""

RECUT_TIMEOUT_S = 20.0
"""The daemon only computes the cut, and answers at once."""

_CORPUS = "corpus"
"""The folder in which a run file that is written for a model expects its data: beside itself."""

MODEL_PRESET_NAMES = ("gpt2", "qwen2.5-0.5b", "qwen3-0.6b", "llama-1b", "llama-8b")
"""Keys of `decod.config.presets.MODEL_PRESETS`."""


@click.group(no_args_is_help=True)
def run() -> None:
    """Write, check or plan a run file, or change how a run cuts its model.

    \b
    Examples:
      decod run init run.toml
      decod run plan run.toml
      decod run check run.toml
      decod run recut
    """


@run.command()
@click.option(
    "--blocks",
    metavar="N,N..",
    help="The number of blocks of each relay stage, such as 1,5,10, instead of the best ones.",
)
@state_dir_option
def recut(*, blocks: str | None, state_dir: Path) -> None:
    """Cut the model anew while it trains, so that fast hosts run more blocks. At the leader.

    \b
    Examples:
      decod run recut
      decod run recut --blocks 1,5,10

    The cut holds from the next average on. Members fetch the blocks that are new to them from each
    other, and go on from the same iteration. If anything goes wrong before all have written their
    states to their disks, the old cut stays.
    """
    from decod.daemon.control import ask

    request: dict[str, Any] = {"command": "recut"}
    if blocks is not None:
        request["blocks"] = blocks
    with waiting("the leader decides on the cut"):
        answer = ask(state_dir, request, timeout_s=RECUT_TIMEOUT_S)
    before, after = (", ".join(map(str, answer.get(key, ()))) for key in ("before", "blocks"))
    if not answer.get("changed"):
        click.echo(f"the stages have {before} blocks already: nothing suits the hosts better")
        return
    size = f"{float(answer.get('moved_bytes', 0)) / 1e9:.2g} GB"
    click.echo(f"stages of {before} blocks become stages of {after} at the next average")
    click.echo(f"about {size} move between members; `decod status` shows when it is done")


@run.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path(RUN_FILE))
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option(
    "--preset",
    "presets",
    type=click.Choice(MODEL_PRESET_NAMES + SYNC_PRESET_NAMES),
    multiple=True,
    help="The shape of a model, or how members keep together. Give one of each, or either.",
)
@click.option(
    "--from",
    "given",
    type=click.Path(file_okay=False),
    metavar="DIR|ORG/NAME",
    help="The model to start from, as a folder or on the Hugging Face Hub: [model] and what follows"
    " from it.",
)
def init(path: Path, *, force: bool, presets: tuple[str, ...], given: str | None) -> None:
    """Write a run file with every key, its default and what it means.

    PATH is run.toml if left out; `-` writes to the terminal.

    \b
    Presets of models: [model], [stages] and [batch]
      gpt2          124 million parameters
      qwen2.5-0.5b  494 million
      qwen3-0.6b    596 million
      llama-1b      1.2 billion: Llama 3.2
      llama-8b      8.0 billion: Llama 3.1

    \b
    Presets of averages: [sync], and the optimizer of muloco
      all-reduce   average each iteration's gradients, in float32
      diloco       average seldom, in float32
      opendiloco   average seldom, in float16
      muloco       average seldom, in 4 bits, while members train on, with Muon
      dilocox      average seldom, compressed, while members train on
      cocktailsgd  average each iteration's gradients, compressed

    \b
    Examples:
      decod run init run.toml
      decod run init run.toml --preset muloco
      decod run init run.toml --preset llama-1b --preset muloco
      decod run init run.toml --from ./my-model
      decod run init run.toml --from someone/my-model
    """
    from decod.cli.hub import model_folder
    from decod.config.run_file import render_run_file

    run = _preset_run(presets)
    if given is None:
        text = render_run_file(run, leaves_usual=True)
    else:
        if named := [name for name in presets if name in MODEL_PRESET_NAMES]:
            raise click.UsageError(f"--preset {named[0]} and --from set the same keys: give one")
        text = _text_from(run, model_folder(given))
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    _write(path, text, force=force)
    if given is None:
        click.echo(f"wrote {path}; next: {_next_command(presets)} {path}")
        return
    model = shlex.quote(given)
    file = shlex.quote(str(path))
    corpus = shlex.quote(str(path.parent / _CORPUS))
    click.echo(f"wrote {path}")
    click.echo(f"next: decod data prepare {corpus} PATH... --tokenizer {model}")
    click.echo(f"then: decod run check {file} --init {model}")
    click.echo(f"then: decod leader {file} --init {model}")
    click.echo(f'for an adapter: adapter.kind = "lora", and --base {model} instead of --init')


def _text_from(run: "RunConfig", folder: Path) -> str:
    """Return the text of a run file that trains the model in a folder.

    Raises:
        DataError: It holds no model that decod trains exactly.
    """
    from decod.config.presets import preset_for
    from decod.config.run_file import CardConfig, DataSource, render_run_file
    from decod.daemon.exporting import base_model_of
    from decod.model.weights import training_dtype
    from decod.train.model_folder import judge_folder

    given = judge_folder(folder, trains=True).config
    found = preset_for(replace(given, dtype=training_dtype(folder)))
    base_model = base_model_of(folder).partition("@")[0]
    return render_run_file(
        replace(run, model=found.model, stages=found.stages, batch=found.batch),
        data=DataSource(path=_CORPUS),
        card=CardConfig(base_model=base_model if "/" in base_model else ""),
        leaves_usual=True,
    )


def _preset_run(presets: tuple[str, ...]) -> "RunConfig":
    """Return the run of some presets.

    Raises:
        UsageError: Two are of one kind.
    """
    from decod.config.presets import MODEL_PRESETS, PRESETS
    from decod.run.run_config import RunConfig

    run = RunConfig()
    for names in (MODEL_PRESET_NAMES, SYNC_PRESET_NAMES):
        chosen = [name for name in dict.fromkeys(presets) if name in names]
        if len(chosen) > 1:
            raise click.UsageError(
                f"--preset {chosen[0]} and --preset {chosen[1]} set the same keys: give one of them"
            )
        for name in chosen:
            if name in PRESETS:
                run = replace(run, sync=PRESETS[name].sync, optimizer=PRESETS[name].optimizer)
            else:
                found = MODEL_PRESETS[name]
                run = replace(run, model=found.model, stages=found.stages, batch=found.batch)
    return run


def _next_command(presets: tuple[str, ...]) -> str:
    """Return what comes next: for a large model, a look at what it takes."""
    return "decod run plan" if set(presets) & set(MODEL_PRESET_NAMES) else "decod leader"


def _write(path: Path, text: str, *, force: bool) -> None:
    # Without O_NONBLOCK, a pipe that nobody reads would block this command forever.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | (os.O_TRUNC if force else os.O_EXCL)
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


@run.command()
@run_file_argument("path")
@click.option(
    "--init",
    type=click.Path(file_okay=False),
    metavar="DIR|ORG/NAME",
    help="Check this model too: `decod leader --init` would start from it.",
)
@click.option(
    "--base",
    type=click.Path(file_okay=False),
    metavar="DIR|ORG/NAME",
    help="Check this model too: `decod leader --base` would adapt it.",
)
@data_option
@click.option("--full", is_flag=True, help="Read all of the data, however much that is.")
def check(path: Path, *, init: str | None, base: str | None, data: str | None, full: bool) -> None:
    """Check all that `decod leader` checks before it prints a join string, and show the sizes.

    That is: the run file, the data and whether they fill a batch, the vocabulary, the held-out
    text, and the model of --init or --base. Of large data only parts are read, as at the start of a
    run; --full reads all.

    \b
    Examples:
      decod run check run.toml
      decod run check run.toml --init ./my-model
      decod run check run.toml --full
    """
    from decod.cli.hub import fetched
    from decod.config.run_file import load_run_file
    from decod.config.schema import activation_size_bytes, average_size_bytes, count_parameters
    from decod.daemon.checks import check_shards, chosen_model, manifest_of, read_at_start_bytes
    from decod.daemon.evaluating import require_held_out
    from decod.data.corpus import open_corpus
    from decod.run.stages_config import stage_blocks

    loaded = load_run_file(path)
    with open_corpus(data or loaded.data.path) as dataset:
        model = chosen_model(loaded.run, fetched(init), fetched(base))
        manifest_of(loaded.run, dataset, model, print_warning)
        require_held_out(loaded, dataset)
        most_bytes = None if full else read_at_start_bytes(dataset)
        num_bytes = min(dataset.num_bytes, most_bytes or dataset.num_bytes)
        with progress("reading data", num_bytes) as on_read:
            checked = check_shards(dataset, most_bytes, on_read=on_read)
        size = f"{dataset.num_tokens:,} tokens, {dataset.vocab_size:,} different"
    run = loaded.run
    blocks = stage_blocks(run.model, run.stages)
    batch = run.batch
    tokens = batch.tokens_per_microbatch * batch.num_microbatches * batch.num_data_nodes
    click.echo(f"{path} is valid")
    click.echo(f"parameters         {count_parameters(run.model):,}")
    click.echo(f"tokens / iteration {tokens:,}")
    click.echo(f"data               {dataset.place}: {size}")
    click.echo(f"                   {checked}")
    if model is not None:
        click.echo(f"weights            {model}: all there, of the right shapes, and finite")
    click.echo(f"activation         {activation_size_bytes(run) / 2**20:.2f} MiB per microbatch")
    sizes = average_size_bytes(run)
    often = "each iteration" if run.sync.every == 1 else f"every {run.sync.every} iterations"
    if run.sync.fragments > 1:
        often += f", in {run.sync.fragments} fragments"
    click.echo(f"averages           {often}; a member sends their size once or twice")
    for index, (stage, size_bytes) in enumerate(zip(blocks, sizes, strict=True)):
        held = f"blocks {stage.start} to {stage.stop - 1}" if stage else "no blocks"
        extra = "embedding, final norm, head; " if index == 0 else ""
        average = f"averages of {size_bytes / 2**20:.2f} MiB"
        click.echo(f"stage {index:<12} {extra}{held}; {average}")
