"""Vocabularies of byte-level BPE in which nearly every cut shows, and texts hard to cut."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from decod.data.byte_level import SPLITS, FastEncoder, byte_characters

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "GPT-2": BYTE_LEVEL,
    "RoBERTa": BYTE_LEVEL | {"add_prefix_space": True},
} | {
    name: {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            },
            BYTE_LEVEL | {"use_regex": False},
        ],
    }
    for name, expression in SPLITS.items()
}
"""Every known way to cut a text into words."""

ATOMS = (
    *"aZslK'!_/1\t\n \u00e9\u00c9\u017f\u01c5\u02b0\u4e2d\u0301\u0966\u00bd\u00a0\u2028\u3000",
    *"\x85\x1c\u200d\ufeff\u180e\U0001f600",
    *("'s", "'LL", "  ", "\r\n", "12", "1234", " world", "foo()", ", ", "<end>", "<tool>"),
)
"""A character of every kind that an expression names, and what stands together in it."""
_CONTEXTS = ("a{}a", " {} ", "1{}1", "'{}", "\n{}\n", "A{}b", "{0}{0}", "!{}!", "  {}x")


def pairs_tokenizer(
    pre_tokenizer: Mapping[str, Any], *, num_pairs: int = 256**2, **model: object
) -> dict[str, Any]:
    """Return a `tokenizer.json` that merges pairs of bytes and some of these, in random order.

    With all pairs, a cut at another place changes ids, whatever the characters.
    """
    draw = random.Random(0)  # Text, not secrets.
    pairs = list(itertools.product(byte_characters(), repeat=2))
    draw.shuffle(pairs)
    del pairs[num_pairs:]
    doubles = ["".join(pair) for pair in pairs]
    quads = {(draw.choice(doubles), draw.choice(doubles)) for _ in range(10_000)}
    return bpe_tokenizer([*pairs, *sorted(quads)], pre_tokenizer, **model)


def random_tokenizer(draw: random.Random) -> dict[str, Any]:
    """Return a `tokenizer.json` with few merges, some twice, and ids in any order."""
    letters = [*"abcdefghi", "\u0120"][: draw.choice([2, 3, 4, 10])]
    merges: list[tuple[str, str]] = []
    words = list(letters)
    for _ in range(draw.choice([5, 20, 60, 200])):
        pair = draw.choice(words), draw.choice(words)
        if len("".join(pair)) <= draw.choice([4, 12, 40]):
            merges.append(pair)
            words.append("".join(pair))
    unmerged = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(20)]
    fields = bpe_tokenizer(merges, BYTE_LEVEL, unmerged, ignore_merges=draw.random() < 0.5)
    vocab = fields["model"]["vocab"]
    ids = draw.sample(range(len(vocab)), len(vocab)) if draw.random() < 0.5 else range(len(vocab))
    fields["model"]["vocab"] = dict(zip(vocab, ids, strict=True))
    return fields


def bpe_tokenizer(
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: Mapping[str, Any] | None,
    unmerged: Sequence[str] = (),
    **model: object,
) -> dict[str, Any]:
    """Return a `tokenizer.json` with these merges, and two added tokens of which one is special."""
    words = [*byte_characters(), *("".join(pair) for pair in merges), *unmerged]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    added = [
        {"id": len(vocab) + offset, "content": content, "special": content == "<end>"}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for offset, content in enumerate(("<end>", "<tool>"))
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        }
        | model,
    }


def differing_texts(
    fast: FastEncoder, exact: tokenizers.Tokenizer, texts: Sequence[str]
) -> list[str]:
    """Return those of `texts` that an encoder claims to know, and to which it gives other ids."""
    texts = [text for text in texts if fast.knows(text)]
    expected = exact.encode_batch_fast(texts, add_special_tokens=False)
    found = fast.encode_batch(texts)
    return [
        text
        for text, ids, encoding in zip(texts, found, expected, strict=True)
        if not np.array_equal(ids, encoding.ids)
    ]


def characters_in_contexts(characters: Sequence[str]) -> Iterator[str]:
    """Yield texts with every character in every context."""
    for start in range(0, len(characters), 128):
        block = characters[start : start + 128]
        yield from ("~".join(map(context.format, block)) for context in _CONTEXTS)


def short_texts(num_atoms: int) -> list[str]:
    """Return all texts of that many atoms."""
    return ["".join(atoms) for atoms in itertools.product(ATOMS, repeat=num_atoms)]


def random_text(draw: random.Random, num_atoms: int) -> str:
    """Return a text of atoms, all kinds or few."""
    kinds = draw.sample(ATOMS, draw.choice([3, 10, len(ATOMS)]))
    return "".join(draw.choices(kinds, k=num_atoms))


def texts_that_share_beginnings(draw: random.Random) -> list[str]:
    """Return long texts, cut off and continued at many places, with runs of one character.

    Libraries that keep the cuts of an earlier text, or cut parts of a text in threads, err here.
    """
    run = draw.choice([" ", "x", "1", "!", "\n", "\u00e9", "\u3000"])
    run *= draw.choice([1, 5, 700, 1500, 9000])
    size = draw.choice([1000, 5000, 40_000])
    text = random_text(draw, size) + run + random_text(draw, draw.choice([100, 5000]))
    texts = [text]
    for _ in range(4):
        beginning = text[: draw.randrange(len(text))]
        ends = ("x", " ", "  ", "\n", "\t", random_text(draw, 50))
        texts += [beginning + end for end in ends]
    draw.shuffle(texts)
    return texts
