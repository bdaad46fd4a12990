"""Compares the two libraries that encode byte-level BPE, on every character and random texts.

    python scripts/fuzz_tokenizers.py
    python scripts/fuzz_tokenizers.py --seconds 600 --seed 7

Any text to which `fastokens` gives other ids than `tokenizers` is printed. For every known way to
cut words, it compares all characters of Unicode in several contexts, all short texts of characters
that the expressions name, and random texts until its time is up. Exits with 1 at a difference.
Run it before you allow another release of either library.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.data.byte_level import fast_encoder  # noqa: E402
from tests.support.byte_level import (  # noqa: E402
    PRE_TOKENIZERS,
    characters_in_contexts,
    differing_texts,
    pairs_tokenizer,
    random_text,
    random_tokenizer,
    short_texts,
    texts_that_share_beginnings,
)

_SURROGATES = range(0xD800, 0xE000)
_BATCH = 1024
_SHOWN_MAX_CHARS = 60


def fixed_texts() -> Iterator[str]:
    """Yield all characters in contexts, and all short texts."""
    points = (point for point in range(sys.maxunicode + 1) if point not in _SURROGATES)
    yield from characters_in_contexts([chr(point) for point in points])
    for num_atoms in (1, 2, 3):
        yield from short_texts(num_atoms)


def random_texts(draw: random.Random, end_s: float) -> Iterator[str]:
    """Yield random texts until a time of the monotonic clock."""
    while time.monotonic() < end_s:
        yield from texts_that_share_beginnings(draw)
        for _ in range(_BATCH):
            yield random_text(draw, draw.choice([4, 5, 6, 8, 12, 30, 300]))


def compare(fields: dict[str, object], texts: Iterator[str]) -> tuple[int, int]:
    """Print differing texts. Return the number of characters compared, and of differing texts."""
    exact = tokenizers.Tokenizer.from_str(json.dumps(fields))
    exact.encode_special_tokens = True
    fast = fast_encoder(exact)
    if fast is None:
        raise SystemExit("fastokens is not installed, or does not take a known tokenizer")
    num_chars = num_differing = 0
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) < _BATCH:
            continue
        for differing in differing_texts(fast, exact, batch):
            num_differing += 1
            print(f"  differs: {differing[:_SHOWN_MAX_CHARS]!a}, {len(differing)} characters")
        num_chars += sum(map(len, batch))
        batch.clear()
    return num_chars, num_differing + len(differing_texts(fast, exact, batch))


def compare_merges(draw: random.Random, end_s: float) -> int:
    """Compare random vocabularies. Return the number of differing texts."""
    num_differing = 0
    while time.monotonic() < end_s:
        texts = ("".join(draw.choices("abcdefghi ", k=draw.randint(1, 99))) for _ in range(_BATCH))
        num_differing += compare(random_tokenizer(draw), texts)[1]
    return num_differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of random texts, a tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PRE_TOKENIZERS, help="one way to cut words")
    options = parser.parse_args()
    total = 0
    for name in [options.only] if options.only else PRE_TOKENIZERS:
        fields = pairs_tokenizer(PRE_TOKENIZERS[name])
        fixed_chars, fixed = compare(fields, fixed_texts())
        draw = random.Random(options.seed)  # noqa: S311  # Text, not secrets.
        end_s = time.monotonic() + options.seconds
        random_chars, drawn = compare(fields, random_texts(draw, end_s))
        print(f"{name}: {fixed_chars + random_chars:,} characters, {fixed + drawn} texts differ")
        total += fixed + drawn
    merges = compare_merges(random.Random(options.seed), time.monotonic() + options.seconds)  # noqa: S311
    print(f"merges: {merges} texts differ")
    sys.exit(1 if total + merges else 0)


if __name__ == "__main__":
    main()
