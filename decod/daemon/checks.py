"""Checks before volunteers are asked to join a run, in `decod leader` and in `decod run check`.

    run file -> index, sizes of the shards -> batch against the amount of data -> weights of --init
    -> vocabulary -> blocks of the shards

The weights are read once, as their hash requires anyway. Small shards are read as a whole. Of large
shards, only some blocks are read, so that the start stays quick. The other blocks are compared with
their hashes when they are needed.
"""

from pathlib import Path

from decod.config.schema import Manifest, RunConfig
from decod.data.dataset import Dataset
from decod.data.sources import OnRead
from decod.data.tokenizer import TOKENIZER_FILE, FileTokenizer, read_tokenizer_file
from decod.errors import DataError
from decod.model.config import ModelConfig, require_same
from decod.model.header import read_config
from decod.model.weights import check_weights

READ_AT_START_MAX_BYTES = 128 * 2**20
"""Reading this takes a tenth of a second from a fast disk, and a few seconds from a slow one."""
READ_FROM_STORE_MAX_BYTES = 4 * 2**20
"""The same from an object store, which answers after tens of milliseconds."""


def manifest_of(run: RunConfig, dataset: Dataset, init_dir: Path | None) -> Manifest:
    """Check the parts of a new run, and return its manifest.

    Args:
        run: The configuration in the run file.
        dataset: The data to train on.
        init_dir: Folder of the model to start from, if any.

    Raises:
        ConfigError: The model's vocabulary is too small for the data.
        DataError: The data are too few for a batch, the weights do not fit the model, or the data
            were made with another tokenizer than the weights.
    """
    dataset.require_batch(run.batch)
    if init_dir is not None:
        _require_same_tokens(init_dir, dataset)
    return Manifest(
        run=run,
        data_index_sha256=dataset.index_sha256,
        data_vocab_size=dataset.vocab_size,
        initial_weights=_weights_hash(init_dir, run.model),
    )


def _weights_hash(init_dir: Path | None, model: ModelConfig) -> str:
    """Return the manifest's `initial_weights`: `seed`, or the hash of the weights in a folder."""
    if init_dir is None:
        return "seed"
    require_same(model, read_config(init_dir, dtype=model.dtype), init_dir / "config.json")
    return check_weights(init_dir, model)


def _require_same_tokens(init_dir: Path, dataset: Dataset) -> None:
    """Compare the data's tokenizer with that of a model folder, if both can be read.

    Only the tokens of text are compared. Special tokens may have been added since.
    """
    path = init_dir / TOKENIZER_FILE
    try:
        ours = dataset.tokenizer
        theirs = FileTokenizer(read_tokenizer_file(path), eos=ours.eos_id, name=str(path))
    except DataError:
        return
    if ours.vocabulary() != theirs.vocabulary():
        raise DataError(
            f"the data in {dataset.place} were made with another tokenizer than {path}",
            why="the model knows other tokens by these ids, so it would lose what it has learnt",
            fix=f"decod data prepare OUT PATH... --tokenizer {path}, and set data.path to OUT; if "
            "the model is to learn other tokens, remove its tokenizer.json",
            code="E-DAT-025",
        )


def read_at_start_bytes(dataset: Dataset) -> int:
    """Return how much of a corpus is read before a run begins, at most."""
    return READ_FROM_STORE_MAX_BYTES if dataset.is_stored else READ_AT_START_MAX_BYTES


def check_shards(
    dataset: Dataset,
    size_max_bytes: int | None = READ_AT_START_MAX_BYTES,
    *,
    on_read: OnRead | None = None,
) -> str:
    """Compare shards with their hashes; return a text that says how much was compared.

    Args:
        dataset: An open data set. Opening it has checked the sizes of its files.
        size_max_bytes: Most bytes to read; None reads everything.
        on_read: Called with the number of bytes read.

    Raises:
        DataError: A block is bad. The text names it.
    """
    num_bytes = dataset.verify(size_max_bytes=size_max_bytes, on_read=on_read)
    if num_bytes == dataset.num_bytes:
        return "all of the data hold against their hashes"
    read, total = (f"{size / 2**20:,.0f}" for size in (num_bytes, dataset.num_bytes))
    return f"{read} of {total} MiB of the data hold against their hashes; the rest is read later"
