"""Copies of prepared corpora in object stores."""

from pathlib import Path

from decod.data.dataset import Dataset
from decod.data.index import INDEX_FILE
from decod.data.sources import OnRead
from decod.data.tokenizer import TOKENIZER_FILE
from decod.objects import ObjectFolder


def upload(folder: Path, url: str, on_read: OnRead | None = None) -> None:
    """Copy a corpus to an object store. The index comes last: then the copy is complete.

    Args:
        folder: A folder that `decod data prepare` wrote.
        url: The folder in the store.
        on_read: Called with the number of bytes copied.

    Raises:
        DataError: The folder holds no complete corpus.
        StoreError: The store refuses.
    """
    with Dataset.open(folder) as dataset:
        store = ObjectFolder(url)
        for shard in dataset.index.shards:
            store.write(folder / shard.file, shard.file)
            if on_read is not None:
                on_read(shard.num_bytes)
        if dataset.index.tokenizer.kind == TOKENIZER_FILE:
            store.write(folder / TOKENIZER_FILE, TOKENIZER_FILE)
        store.write(folder / INDEX_FILE, INDEX_FILE)
