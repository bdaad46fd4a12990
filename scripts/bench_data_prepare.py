"""Measures how fast `decod data prepare` makes tokens on one core, beside the bare tokenizer.

    python scripts/bench_data_prepare.py
    python scripts/bench_data_prepare.py --megabytes 200 --tokenizer tokenizer.json
    python scripts/bench_data_prepare.py --words

The text is source of Python's standard library, a document a file, as JSON lines. With `--words`,
it is words of random letters: no word comes twice, so that caches of words are of no use. Without
`--tokenizer`, a byte-level BPE with 32,768 tokens is trained on the library. Both subjects use one
thread. The bare tokenizer gets the documents in memory and its ids are dropped. decod reads them
from the disk, and writes, joins and hashes a corpus. The rounds are interleaved. Rates count the
seconds of the processor, so that other work on the machine does not matter.
"""

import argparse
import cProfile
import itertools
import json
import os
import pstats
import random
import string
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from decod.data import encoding
from decod.data.corpus import library_files
from decod.data.prepare import PrepareConfig, prepare

VOCAB_SIZE = 2**15
_TRAINING_DOCUMENTS = 200
_DOCUMENT_SIZE_CHARS = 20_000
_BATCH_DOCUMENTS = 256


def library_documents() -> list[str]:
    """Return source files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return [(library / name).read_text("utf-8", "ignore") for name in library_files(library)]


def word_documents(num_bytes: int) -> list[str]:
    """Return documents of words of ten random letters."""
    draw = random.Random(0)  # noqa: S311  # Text, not secrets.
    num_words = _DOCUMENT_SIZE_CHARS // 11
    return [
        " ".join("".join(draw.choices(string.ascii_lowercase, k=10)) for _ in range(num_words))
        for _ in range(1 + num_bytes // _DOCUMENT_SIZE_CHARS)
    ]


def write_lines(path: Path, documents: Sequence[str], num_bytes: int) -> list[str]:
    """Write documents over and over as JSON lines, up to a size. Return the documents written."""
    written, size = [], 0
    with path.open("w", encoding="utf-8") as file:
        for document in itertools.cycle(documents):
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
            written.append(document)
            size += len(document)
            if size >= num_bytes:
                return written
    raise ValueError("there are no documents")


def train_tokenizer(path: Path, documents: Sequence[str]) -> None:
    """Train a byte-level BPE and write its file."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = [text[:_DOCUMENT_SIZE_CHARS] for text in documents[:_TRAINING_DOCUMENTS]]
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(path))


def seconds(work: Callable[[], object]) -> float:
    """Return how many seconds of the processor a call took."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def encode_all(tokenizer: tokenizers.Tokenizer, documents: Sequence[str]) -> None:
    """Tokenize documents with the library alone."""
    for start in range(0, len(documents), _BATCH_DOCUMENTS):
        tokenizer.encode_batch(
            documents[start : start + _BATCH_DOCUMENTS], add_special_tokens=False
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--words", action="store_true", help="random words, none of them twice")
    parser.add_argument("--profile", action="store_true", help="print what decod's time goes into")
    options = parser.parse_args()
    # Read when a tokenizer is first used.
    os.environ["RAYON_NUM_THREADS"] = os.environ["FASTOKENS_BPE_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = library_documents()
        tokenizer = options.tokenizer or folder / "tokenizer.json"
        if options.tokenizer is None:
            train_tokenizer(tokenizer, documents)
        if options.words:
            documents = word_documents(options.megabytes * 10**6)
        documents = write_lines(folder / "text.jsonl", documents, options.megabytes * 10**6)
        num_bytes = sum(len(document.encode()) for document in documents)
        bare = tokenizers.Tokenizer.from_file(str(tokenizer))
        config = PrepareConfig(tokenizer=str(tokenizer), force=True)
        rates = []
        for _ in range(options.rounds):
            # Each round loads the tokenizer, and begins with empty caches of words.
            encoding._load_encoder.cache_clear()
            bare_s = seconds(lambda: encode_all(bare, documents))
            decod_s = seconds(lambda: prepare(folder / "out", [folder / "text.jsonl"], config))
            rates.append((num_bytes / 1e6 / bare_s, num_bytes / 1e6 / decod_s))
            print("tokenizers {:.2f} MB/s, decod {:.2f} MB/s".format(*rates[-1]), flush=True)
        ratio = median(decod / bare_rate for bare_rate, decod in rates)
        rate = median(decod for _, decod in rates)
        print(f"decod {rate:.2f} MB/s a core, {ratio:.2f} of the bare rate")
        if options.profile:
            with cProfile.Profile() as profile:
                prepare(folder / "out", [folder / "text.jsonl"], config)
            pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
