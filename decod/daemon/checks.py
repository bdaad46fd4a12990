"""Checks before volunteers are asked to join a run, in `decod leader` and in `decod run check`.

    run file -> index, sizes of the shards -> batch against the amount of data -> weights of --init
    -> vocabulary -> blocks of the shards

The weights are read once, as their hash requires anyway. Small shards are read as a whole. Of large
shards, only some blocks are read, so that the start stays quick. The other blocks are compared with
their hashes when they are needed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from decod.config.schema import NOTHING, Manifest
from decod.daemon.exporting import read_carried
from decod.data.block import OnRead
from decod.data.dataset import Dataset
from decod.errors import ConfigError
from decod.model.hf import require_same
from decod.model.weights import check_weights
from decod.run.run_config import RunConfig
from decod.run.training_config import Documents
from decod.train.checkpoint.base import UNKNOWN_HASH, base_hashes
from decod.train.model_folder import judge_folder

READ_AT_START_MAX_BYTES = 128 * 2**20
"""Reading this takes a tenth of a second from a fast disk, and a few seconds from a slow one."""
READ_FROM_STORE_MAX_BYTES = 4 * 2**20
"""The same from an object store, which answers after tens of milliseconds."""


def chosen_model(run: RunConfig, init_dir: Path | None, base_dir: Path | None) -> Path | None:
    """Return the folder of the model to start from, or beside which an adapter is trained.

    Args:
        run: The configuration in the run file.
        init_dir: The folder of `--init`.
        base_dir: That of `--base`.

    Raises:
        ConfigError: The run can't use the folder that is given, or lacks one (E-CFG-110).
    """
    if run.trains_all and base_dir is None and (init_dir is not None or not run.model.is_built):
        return init_dir
    if run.trains_all and base_dir is None:
        what = "the model is built by transformers, and there are no weights to begin with"
        why = "decod draws first weights for its own models alone"
        fix = "give the folder of the model with --init FOLDER"
    elif run.trains_all:
        what = f"--base is {base_dir}, and the run trains all parameters of its model"
        why = "only beside an adapter are weights that are not trained"
        fix = 'give the folder with --init, or set adapter.kind = "lora" in the run file'
    elif init_dir is not None:
        what = f"--init is {init_dir}, and the run trains an adapter"
        why = "the adapter itself begins anew, beside the weights of a model"
        fix = f"give the folder of the model with --base {init_dir}"
    elif base_dir is None:
        what = "the run trains an adapter, and there is no model for it"
        why = "an adapter changes a model that has been trained"
        fix = "give the folder of the model with --base FOLDER"
    else:
        return base_dir
    raise ConfigError(what, why=why, fix=fix, code="E-CFG-110")


def manifest_of(
    run: RunConfig,
    dataset: Dataset,
    init_dir: Path | None,
    say: Callable[[str], None] = lambda _text: None,
) -> Manifest:
    """Check the parts of a new run, and return its manifest.

    Args:
        run: The configuration in the run file.
        dataset: The data to train on.
        init_dir: Folder of the model to start from, or beside which an adapter is trained, if any.
            Without one, the hashes of weights that are not trained are unknown.
        say: Takes a sentence on each check that could not be made, and on what an export will lack.

    Raises:
        ConfigError: The model's vocabulary is too small for the data.
        DataError: The data are too few for a batch, the weights do not fit the model, or the data
            were made with another tokenizer than the weights.
    """
    dataset.require_batch(run.batch)
    if run.batch.documents is Documents.AUTO:
        found = Documents.TOGETHER if dataset.index.marks is None else Documents.APART
        run = replace(run, batch=replace(run.batch, documents=found))
    weights, carried = "seed", NOTHING
    base = UNKNOWN_HASH * run.num_base_parts
    if init_dir is not None:
        given = judge_folder(
            init_dir,
            dataset=dataset,
            dtype=run.model.dtype,
            trains=True,
            built=run.model.is_built,
        )
        require_same(run.model, given.config, init_dir / "config.json")
        if run.trains_all:
            weights = check_weights(init_dir, run.model)
        else:
            base = "".join(base_hashes(init_dir, run.model))
        carried_files, left_out = read_carried(init_dir, dataset)
        carried = carried_files.to_text()
        for text in (*given.unchecked, *left_out):
            say(text)
    return Manifest(
        run=run,
        data_index_sha256=dataset.index_sha256,
        data_vocab_size=dataset.vocab_size,
        initial_weights=weights,
        base=base,
        carried=carried,
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
