"""`decod data`: make a corpus from text, and show what it holds and what a run reads from it."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decod.cli.options import RUN_FILE, words
from decod.cli.printing import print_warning, progress
from decod.host_limits import num_processors
from decod.texts import clean_text, counted, printable

if TYPE_CHECKING:
    from decod.data.dataset import Dataset, Document
    from decod.data.index import Index
    from decod.data.tokenizer import Tokenizer
    from decod.run.training_config import BatchConfig

_SHOWN_MAX_CHARS = 500
"""The part of a document that is shown, in characters."""
_SHOWN_MAX_TOKENS = 2000


@click.group(no_args_is_help=True)
def data() -> None:
    """Prepare text for training, and look at it.

    \b
    Example:
      decod data prepare corpus/ books/ notes.jsonl.gz
    """


@data.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="bytes|FILE|DIR|ORG/NAME",
    shell_complete=words("bytes", files=True),
    help="`bytes`, the path of a Hugging Face tokenizer.json or of a folder with one, or"
    " ORG/NAME[@REVISION] of a model on the Hub.",
)
@click.option(
    "--eos",
    metavar="TOKEN",
    help="End-of-document token of FILE; the one that the files beside it state if left out, else"
    " a guess.",
)
@click.option(
    "--bos",
    metavar="TOKEN|none",
    help="Token before every document; if left out, the one that transformers puts before a text.",
)
@click.option(
    "--text-field",
    default="text",
    show_default=True,
    metavar="NAME",
    help="JSON field or Parquet column that holds the text.",
)
@click.option(
    "--chat",
    is_flag=True,
    help="PATHs hold conversations; the chat template of the tokenizer's folder makes them text.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=2, max=2**24),
    metavar="L",
    help="Tokens of the windows into which conversations are packed: batch.sequence_length.",
)
@click.option(
    "--train-on",
    type=click.Choice(["answers", "all"]),
    default="answers",
    show_default=True,
    help="What training predicts of conversations.",
)
@click.option(
    "--document-masks",
    is_flag=True,
    help="Mark where documents begin, so that no token is predicted from another document.",
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    default=2**26,
    show_default=True,
    help="Tokens in a shard file, at most.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    show_default="cores of this host",
    metavar="N",
    help="Processes that tokenize.",
)
@click.option(
    "--dask",
    metavar="ADDRESS",
    help="Scheduler of a Dask cluster whose workers tokenize; they must see OUT.",
)
@click.option(
    "--skip-bad",
    is_flag=True,
    help="Leave out lines, rows and files of text that hold no usable text, and count them.",
)
@click.option("--force", is_flag=True, help="Replace what OUT holds.")
def prepare(
    out: Path,
    paths: tuple[str, ...],
    workers: int | None,
    dask: str | None,
    **options: str | int | bool | None,
) -> None:
    """Turn text files into a corpus in the folder OUT.

    \b
    Example:
      decod data prepare corpus/ books/ notes.jsonl.gz

    A PATH is a file, a folder of files, or a URL of either, such as s3://bucket/books. Names that
    end in .jsonl, .ndjson or .json hold one JSON object a line, .parquet a column of strings;
    anything else is UTF-8 text, one document a file. Text and JSON may be packed as .gz, .zst, .bz2
    or .xz. If the command is interrupted, the same command goes on where it was. Name the result in
    a run file as data.path, or as evaluation.held_out.
    """
    from decod.cli.hub import model_folder, on_hub
    from decod.data import engine as engines
    from decod.data.prepare import PrepareConfig
    from decod.data.prepare import prepare as prepare_corpus
    from decod.data.source_files import find_files
    from decod.data.tokenizer import FOLDER_FILES

    if out.is_file():
        raise click.UsageError(f"OUT is a folder, and comes first: decod data prepare OUT {out}")
    if workers and dask:
        raise click.UsageError("--workers is for this host; Dask's workers are set up with Dask.")
    if bool(options["chat"]) != (options["sequence_length"] is not None):
        raise click.UsageError("--chat and --sequence-length L need each other.")
    if options["document_masks"] and options["chat"]:
        raise click.UsageError("--chat marks where conversations begin; leave out --document-masks")
    num_bytes = sum(file.size_bytes for file in find_files(paths))
    if on_hub(tokenizer := str(options["tokenizer"])):
        options["tokenizer"] = str(model_folder(tokenizer, FOLDER_FILES))
    config = PrepareConfig(**options)  # type: ignore[arg-type]  # Click checked the types.
    workers = workers or num_processors()
    lent = engines.dask(dask) if dask else engines.processes(workers)
    found: list[Tokenizer] = []
    with lent as engine, progress("reading text", num_bytes) as on_read:
        index = prepare_corpus(
            out, paths, config, engine=engine, on_read=on_read, on_tokenizer=found.append
        )
    _say_ends(found[0], is_chat=config.chat)
    click.echo(
        f"{click.format_filename(out)}: {index.num_tokens} tokens in "
        f"{counted(len(index.shards), 'shard')}, vocabulary {index.tokenizer.vocab_size}, "
        f"index {index.sha256}"
    )
    for line in (*skipped_lines(index), *marks_lines(index)):
        click.echo(line)
    click.echo(
        "next: name it in the run file as data.path or evaluation.held_out, then decod run check"
        " RUN.toml"
    )


def _say_ends(tokenizer: "Tokenizer", *, is_chat: bool) -> None:
    """Say with which tokens documents begin and end, and warn if the end is a guess."""
    from decod.data.tokenizer import FileTokenizer

    if not isinstance(tokenizer, FileTokenizer):
        return
    end = f"{clean_text(tokenizer.eos_token)} (id {tokenizer.eos_id})"
    begin = "no token of their own"
    if tokenizer.bos_id is not None:
        begin = f"{clean_text(tokenizer.bos_token)} (id {tokenizer.bos_id})"
    what = f"documents begin with {begin} and end with {end}"
    if is_chat:
        what = f"windows are filled up with {end}"
    click.echo(f"{what}, {tokenizer.eos_origin}", err=True)
    if tokenizer.eos_is_guess:
        print_warning(
            f"no file beside the tokenizer states its end token: {end} is a guess by its spelling. "
            "Give another with --eos TOKEN if it is wrong"
        )


def skipped_lines(index: "Index") -> Iterator[str]:
    """Yield how many records are not in a corpus, and where the first of them were."""
    if index.skipped is None:
        return
    num = index.skipped.num_records
    first = index.skipped.first
    yield f"skipped: {counted(num, 'record')} without usable text"
    yield from (f"  {clean_text(place, limit=1000)}" for place in first)
    if num > len(first):
        yield f"  and {num - len(first)} more"


def marks_lines(index: "Index") -> Iterator[str]:
    """Yield what training predicts of a corpus, and what became of its conversations."""
    if index.marks is None:
        return
    yield f"targets: {index.marks.num_targets} of {index.num_tokens} tokens"
    counts = index.marks.conversations
    if counts is None:
        return
    padding = 1 - counts.num_tokens / index.num_tokens
    lost = counts.num_tokens_lost / (counts.num_tokens + counts.num_tokens_lost)
    yield (
        f"conversations: {counts.num_conversations} in windows of {index.sequence_length} tokens; "
        f"{padding:.1%} of the tokens are padding"
    )
    if counts.num_cut or counts.num_too_long:
        yield (
            f"too long for a window: {counts.num_cut} cut after an answer, {counts.num_too_long} "
            f"left out; {lost:.1%} of the tokens are lost"
        )
    if counts.num_unanswered:
        yield f"left out: {counted(counts.num_unanswered, 'conversation')} without an answer"


@data.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("url")
def upload(folder: Path, url: str) -> None:
    """Copy the corpus in FOLDER to the URL of a folder in an object store.

    \b
    Example:
      decod data upload corpus/ s3://bucket/corpus

    The index is copied last, so a corpus there is complete or not one at all. Name the URL in a run
    file as data.path. Running nodes are not disturbed if the same corpus is copied again.
    """
    from decod.data.index import read_index
    from decod.data.prepare import upload as copy
    from decod.objects import is_url, shown

    if not is_url(url):
        raise click.UsageError(f"{url} is no URL: write it like s3://bucket/corpus.")
    num_bytes = sum(shard.num_bytes for shard in read_index(folder).shards)
    with progress("copying", num_bytes) as on_read:
        copy(folder, url, on_read)
    click.echo(f"{shown(url)}: all of {click.format_filename(folder)} is there")
    click.echo("next: name it in the run file as data.path, then decod run check RUN.toml")


@data.command()
@click.argument("corpus", required=False)
@click.option(
    "--documents",
    "num_documents",
    type=click.IntRange(min=1, max=1_000_000),
    metavar="N",
    help="How many documents of CORPUS to show. Default: 3.",
)
@click.option(
    "--run",
    "run_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The run file. Default: {RUN_FILE}.",
)
@click.option(
    "--iteration",
    type=click.IntRange(min=1, max=2**63 - 1),
    help="Which iteration, from 1.",
)
def show(
    corpus: str | None, num_documents: int | None, run_file: Path | None, iteration: int | None
) -> None:
    """Print the first documents of CORPUS, or the tokens of one iteration of a run.

    \b
    Example:
      decod data show corpus/
      decod data show --iteration 1

    CORPUS is a folder that `decod data prepare` wrote, the URL of one, or `default`. Of each
    document, the first characters are shown, as the tokenizer decodes them. If a corpus has marks,
    what training predicts stands between ⟦ and ⟧. With --iteration, a JSON line is printed for
    each microbatch.
    """
    from decod.config.run_file import load_run_file
    from decod.data.corpus import open_corpus

    if corpus is not None and run_file is None and iteration is None:
        with open_corpus(corpus) as dataset:
            for line in document_lines(dataset, num_documents or 3):
                click.echo(line)
        return
    if corpus is not None or num_documents or iteration is None:
        raise click.UsageError("Give CORPUS, or the --iteration of a run.")
    loaded = load_run_file(run_file or Path(RUN_FILE))
    with open_corpus(loaded.data.path) as dataset:
        for line in microbatch_lines(dataset, loaded.run.batch, loaded.run.seed, iteration):
            click.echo(line)


def document_lines(dataset: "Dataset", num_documents: int) -> Iterator[str]:
    """Yield what a corpus is, and its first documents, decoded.

    Args:
        dataset: The corpus.
        num_documents: How many documents, at most.

    Raises:
        DataError: The corpus is damaged.
    """
    index = dataset.index
    yield (
        f"{dataset.place}: {index.num_tokens} tokens in {counted(len(index.shards), 'shard')}, "
        f"vocabulary {dataset.vocab_size}, tokenizer {index.tokenizer.kind}, "
        f"end token {index.tokenizer.eos_id} ({dataset.tokenizer.eos_token})"
    )
    yield from skipped_lines(index)
    yield from marks_lines(index)
    found = (each for each in dataset.documents(_SHOWN_MAX_TOKENS) if not _is_padding(each, index))
    for number, document in enumerate(itertools.islice(found, num_documents), start=1):
        place = ""
        if index.sequence_length is not None:
            place = f" in window {document.position // index.sequence_length}"
        if document.marks is None:
            text = dataset.tokenizer.decode(document.token_ids)
            size = _SHOWN_MAX_CHARS
        else:
            text = _with_targets(document.token_ids, document.marks, dataset.tokenizer)
            size = len(text)
        if document.num_tokens > len(document.token_ids) or len(text) > size:
            # The last token may be a part of a character.
            text = text[:size].rstrip("\ufffd") + " ..."
        yield f"--- document {number}: {counted(document.num_tokens, 'token')}{place}"
        yield printable(text)


def _is_padding(document: "Document", index: "Index") -> bool:
    is_packed = index.sequence_length is not None
    return is_packed and set(document.token_ids) == {index.tokenizer.eos_id}


def _with_targets(token_ids: list[int], marks: list[int], tokenizer: "Tokenizer") -> str:
    """Return the text of tokens, special ones spelled out, with brackets around the targets."""
    from decod.data.index import TARGET

    text = shown = ""
    end = 0
    for is_target, run in itertools.groupby(mark & TARGET for mark in marks):
        end += len(list(run))
        # A tokenizer may decode tokens otherwise without those before them.
        whole = tokenizer.decode(token_ids[:end], with_special=True)
        part = whole[len(text) :]
        shown += f"⟦{part}⟧" if is_target else part
        text = whole
    return shown


def microbatch_lines(
    dataset: "Dataset", batch: "BatchConfig", seed: int, iteration: int
) -> Iterator[str]:
    """Yield a JSON line for every microbatch of an iteration, by data node and index.

    Args:
        dataset: The run's corpus.
        batch: The run's batch.
        seed: The run's seed.
        iteration: The iteration, counted from 1.

    Raises:
        DataError: The corpus is too short or damaged.
    """
    from decod.ids import MicrobatchId

    for data_node_index in range(batch.num_data_nodes):
        for index in range(batch.num_microbatches):
            mb = MicrobatchId(iteration, data_node_index, index)
            tokens = dataset.microbatch(mb, batch, seed).tolist()
            record = {"iteration": iteration, "data_node_index": data_node_index, "index": index}
            record |= {"tokens": tokens}
            if dataset.index.marks is not None:
                record |= {"marks": dataset.marks(mb, batch, seed).tolist()}
            yield json.dumps(record, separators=(",", ":"))
