"""`decod evaluate`: the loss of an exported model on held-out text."""

import time
from pathlib import Path

import click

from decod.cli.error_lines import print_warning
from decod.cli.options import CORPUS
from decod.cli.standard_output import json_text
from decod.paths import full_path


@click.command()
@click.argument("model", type=click.Path(file_okay=False, path_type=Path))
@click.argument("corpus", type=CORPUS)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="How many sequences of CORPUS are read; all if it has fewer.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Tokens of a sequence; as many as the model can see if left out.",
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="cpu|auto|cuda:N", help="Computes there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: Path,
    corpus: str,
    *,
    sequences: int,
    sequence_length: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Say how well the model in the folder MODEL predicts a text.

    \b
    Examples:
      decod data prepare held-out/ held-out.txt
      decod evaluate ./model held-out/

    MODEL is what `decod export` writes, CORPUS what `decod data prepare` does, or the URL of that.
    Text that the model was not trained with shows how much it has learnt.
    """
    from decod.data.corpus import open_corpus
    from decod.train.evaluate import evaluate as evaluated
    from decod.worker.configure import set_num_threads
    from decod.worker.device import TorchCuda, choose_device

    begun_s = time.monotonic()
    set_num_threads({})
    chosen = choose_device(device, TorchCuda())
    with open_corpus(corpus) as dataset:
        found = evaluated(
            full_path(model),
            dataset,
            num_sequences=sequences,
            sequence_length=sequence_length,
            device=chosen.name,
        )
    seconds = time.monotonic() - begun_s
    answer = {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "num_sequences": found.num_sequences,
        "num_tokens": found.num_tokens,
        "duration_s": round(seconds, 3),
        "unchecked": list(found.unchecked),
    }
    for text in found.unchecked:
        print_warning(text)
    if as_json:
        click.echo(json_text(answer))
        return
    click.echo(f"loss {found.loss:.4f} nats, perplexity {found.perplexity:.2f}")
    length = found.num_tokens // found.num_sequences
    sequences_of = f"{found.num_sequences} sequences of {length}"
    click.echo(f"over {found.num_tokens} tokens in {sequences_of} (--sequence-length)")
