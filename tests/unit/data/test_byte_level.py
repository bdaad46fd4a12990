"""A faster library encodes only what it encodes as `tokenizers` does.

`scripts/fuzz_tokenizers.py` compares the two on far more.
"""

import json
import random
import re
import sys
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tokenizers

from decod.data.byte_level import NFC_INERT, SPLITS, FastEncoder, fast_encoder
from decod.data.tokenizer import FileTokenizer
from tests.support.byte_level import (
    BYTE_LEVEL,
    PRE_TOKENIZERS,
    bpe_tokenizer,
    characters_in_contexts,
    differing_texts,
    pairs_tokenizer,
    random_text,
    random_tokenizer,
    short_texts,
    texts_that_share_beginnings,
)

MERGES = [("a", "b"), ("ab", "c")]
NUM_PAIRS = 256**2 // 4
"""A quarter: encoders are made fast, and each text still has many cuts that show."""


def both(fields: dict[str, Any]) -> tuple[FastEncoder, tokenizers.Tokenizer]:
    """Return both encoders of a file."""
    exact = parsed(fields)
    fast = fast_encoder(exact)
    assert fast is not None
    return fast, exact


def parsed(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    tokenizer.encode_special_tokens = True
    return tokenizer


@dataclass(frozen=True, slots=True)
class Cutting:
    """A way to cut texts into words, and encoders that cut so."""

    name: str
    fast: FastEncoder
    exact: tokenizers.Tokenizer


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def cutting(request: pytest.FixtureRequest) -> Cutting:
    """Give one way after the other: a fast encoder takes a tenth of a gigabyte."""
    fields = pairs_tokenizer(PRE_TOKENIZERS[request.param], num_pairs=NUM_PAIRS)
    return Cutting(request.param, *both(fields))


def test_words_are_cut_alike(cutting: Cutting) -> None:
    draw = random.Random(cutting.name)
    texts = ["", *short_texts(1), *short_texts(2)]
    texts += [random_text(draw, draw.choice([3, 4, 5, 8, 30])) for _ in range(2000)]
    assert not differing_texts(cutting.fast, cutting.exact, texts)


def test_characters_are_of_the_same_kind(cutting: Cutting) -> None:
    # 61 is prime to the size of blocks, so that the sample has characters of most scripts.
    characters = [chr(point) for point in range(0, sys.maxunicode, 61) if chr(point).isprintable()]
    texts = list(characters_in_contexts(characters))
    assert not differing_texts(cutting.fast, cutting.exact, texts)


def test_ids_depend_on_no_other_text(cutting: Cutting) -> None:
    fast, exact = cutting.fast, cutting.exact
    texts = texts_that_share_beginnings(random.Random(cutting.name))
    assert not differing_texts(fast, exact, texts)
    # One by one, because a batch is dealt out to threads.
    assert not [text for text in texts if differing_texts(fast, exact, [text])]


def test_pairs_are_merged_alike() -> None:
    draw = random.Random(0)
    for _ in range(15):
        fast, exact = both(random_tokenizer(draw))
        texts = ["".join(draw.choices("abcdefghi ", k=draw.choice([1, 3, 9, 60, 300])))]
        texts += ["".join(draw.choices("ab", k=draw.choice([2, 5, 9, 60]))) for _ in range(200)]
        assert not differing_texts(fast, exact, texts)


def test_words_of_the_vocabulary_may_ignore_merges() -> None:
    kind = PRE_TOKENIZERS["cl100k, Llama 3"]
    fields = pairs_tokenizer(kind, num_pairs=NUM_PAIRS, ignore_merges=True)
    draw = random.Random(0)
    texts = [random_text(draw, draw.choice([2, 5, 30])) for _ in range(2000)]
    assert not differing_texts(*both(fields), texts)


def test_batches_have_the_ids_of_single_texts_whoever_encodes_them() -> None:
    tokenizer = FileTokenizer(
        json.dumps(bpe_tokenizer(MERGES, BYTE_LEVEL)).encode(), eos="<end>", name="NAME"
    )
    texts = ["abc <end>abc", "abc<tool>abc", "'\u017fabc", "", "x abc"]
    ids = tokenizer.encode_batch(texts)
    assert [each.tolist() for each in ids] == [tokenizer.encode(text) for text in texts]
    assert all(each.dtype == np.uint32 for each in ids)
    # The special token is plain text, the other added token is a token.
    eos, tool = tokenizer.eos_id, tokenizer.eos_id + 1
    assert [(eos in each, tool in each) for each in ids[:2]] == [(False, False), (False, True)]


def test_what_the_libraries_treat_differently_is_left_out() -> None:
    fast, _ = both(bpe_tokenizer(MERGES, BYTE_LEVEL))
    known = ["abc", "it's <end>", "\u017f'", "\u0301"]
    unknown = ["a <tool> b", "it'\u017f"]
    assert [fast.knows(text) for text in known + unknown] == [True] * 4 + [False] * 2


def test_text_that_a_normalizer_may_change_is_left_out() -> None:
    fast, exact = both(bpe_tokenizer(MERGES, BYTE_LEVEL) | {"normalizer": {"type": "NFC"}})
    known = ["abc", "caf\u00e9 \u2013 \u201cyes\u201d", "\u4e2d\u6587", "\ud55c \U0001f600"]
    unknown = ["e\u0301", "\u212b", "\u1100\u1161", "\u0915\u093c"]
    assert [fast.knows(text) for text in known + unknown] == [True] * 4 + [False] * 4
    assert not differing_texts(fast, exact, known)


def test_nfc_leaves_its_inert_characters_alone() -> None:
    inert = re.compile(f"[{NFC_INERT}]")
    characters = [chr(i) for i in range(sys.maxunicode) if inert.match(chr(i))]
    for character in characters:
        assert not unicodedata.combining(character), hex(ord(character))
        assert unicodedata.normalize("NFC", character) == character, hex(ord(character))
    # A character changes beside others only if a pair with it second has a composed form.
    for point in range(sys.maxunicode):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            assert not inert.match(chr(int(parts[1], 16))), hex(point)


SPLIT = PRE_TOKENIZERS["o200k"]["pretokenizers"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "NFD"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": SPLIT},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    SPLIT | {"pattern": {"Regex": SPLITS["o200k"] + "|x"}},
                    BYTE_LEVEL | {"use_regex": False},
                ],
            }
        },
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [SPLIT | {"behavior": "Removed"}, BYTE_LEVEL],
            }
        },
    ],
)
def test_unknown_parts_are_left_to_tokenizers(changes: dict[str, Any]) -> None:
    assert fast_encoder(parsed(bpe_tokenizer(MERGES, BYTE_LEVEL) | changes)) is None


def test_unknown_models_are_left_to_tokenizers() -> None:
    suffix = bpe_tokenizer([], BYTE_LEVEL, end_of_word_suffix="</w>")
    assert fast_encoder(parsed(suffix)) is None
    fallback = bpe_tokenizer([], BYTE_LEVEL, byte_fallback=True)
    assert fast_encoder(parsed(fallback)) is None
    without_a_byte = bpe_tokenizer([], BYTE_LEVEL)
    del without_a_byte["model"]["vocab"]["\u0120"]
    assert fast_encoder(parsed(without_a_byte)) is None


def test_added_tokens_that_a_normalizer_changes_are_left_to_tokenizers() -> None:
    fields = bpe_tokenizer(MERGES, BYTE_LEVEL)
    fields["added_tokens"][1]["content"] = "e\u0301"
    assert fast_encoder(parsed(fields)) is not None
    assert fast_encoder(parsed(fields | {"normalizer": {"type": "NFC"}})) is None


def test_many_added_tokens_are_left_to_tokenizers() -> None:
    fields = bpe_tokenizer(MERGES, BYTE_LEVEL)
    tool = fields["added_tokens"][1]
    fields["added_tokens"] += [tool | {"id": 500 + i, "content": f"<{i}>"} for i in range(64)]
    assert fast_encoder(parsed(fields)) is None


def test_without_the_library_tokenizers_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    fields = bpe_tokenizer(MERGES, BYTE_LEVEL)
    tokenizer = FileTokenizer(json.dumps(fields).encode(), eos="<end>", name="NAME")
    assert tokenizer.encode_batch(["abc"])[0].tolist() == tokenizer.encode("abc")
