"""A document that is tokenized in pieces gets the ids that the tokenizer gives it as a whole."""

import json
import random
from functools import cache

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from decod.data.encoding import encode
from decod.data.sources import split_document
from decod.data.tokenizer import FileTokenizer

SPECIAL = ["<unk>", "</s>"]
GAPS = [*[" "] * 8, "\n", "\n\n", "\n    ", "  ", ". ", ",", "\t", "\u3000"]


def text_of(draw: random.Random, size: int) -> str:
    """Return words with gaps of all kinds: some tokenizers join them with what stands before."""
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 7))) for _ in range(200)]
    words += ["žluť", "日本", "don't"]
    text = ""
    while len(text) < size:
        text += draw.choice(words) + draw.choice(GAPS)
    return text


def train(model: object, normalizer: object, pre_tokenizer: object) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    common = {"vocab_size": 600, "special_tokens": SPECIAL, "show_progress": False}
    match model:
        case models.Unigram():
            trainer: object = trainers.UnigramTrainer(**common, unk_token="<unk>")
        case models.WordPiece():
            trainer = trainers.WordPieceTrainer(**common)
        case _:
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(**common, initial_alphabet=alphabet)
    texts = [text_of(random.Random(7), 2000) for _ in range(20)]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_llama_2() -> tokenizers.Tokenizer:
    """Its normalizer puts the space before a text, and nothing cuts words."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    fields = json.loads(train(models.BPE(unk_token="<unk>"), None, metaspace).to_str())
    fields["pre_tokenizer"] = None
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


@cache
def tokenizer_of(kind: str) -> FileTokenizer:
    name, _, detail = kind.partition(" ")
    scheme, _, is_split = detail.partition(" ")
    match name:
        case "llama2":
            made = as_llama_2()
        case "metaspace-unigram" | "metaspace-bpe":
            metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=is_split == "split")
            model = models.Unigram() if name.endswith("unigram") else models.BPE(unk_token="<unk>")
            made = train(model, None, metaspace)
        case "t5":
            steps = [
                normalizers.NFKC(),
                normalizers.Strip(left=False, right=True),
                normalizers.Replace(Regex(" {2,}"), "▁"),
            ]
            metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
            made = train(models.Unigram(), normalizers.Sequence(steps), metaspace)
        case "bert":
            pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            model = models.WordPiece(unk_token="<unk>")
            made = train(model, normalizers.BertNormalizer(), pre_tokenizer)
        case _:
            bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=detail == "prefix")
            made = train(models.BPE(), normalizers.NFC() if detail == "nfc" else None, bytes_level)
    return FileTokenizer(made.to_str().encode(), eos="</s>", name=kind)


@pytest.mark.parametrize(
    "kind",
    [
        "llama2",
        "t5",
        "bert",
        "byte-level",
        "byte-level prefix",
        "byte-level nfc",
        *(f"metaspace-unigram {scheme} split" for scheme in ("always", "first", "never")),
        "metaspace-unigram always whole",
        *(f"metaspace-bpe {scheme} split" for scheme in ("always", "first")),
        "metaspace-bpe always whole",
    ],
)
def test_pieces_get_the_ids_of_the_whole_document(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no space or line end at which to cut."""
    monkeypatch.setattr("decod.data.sources.PIECE_SIZE_MAX_CHARS", 700)
    monkeypatch.setattr("decod.data.sources.CONTEXT_SIZE_CHARS", 100)
    encoder = tokenizer_of(kind)
    draw = random.Random(kind)
    dense = "".join(draw.choices(["日本語", "žluť", "abcd", "。"], k=2000))
    for document in [*(text_of(draw, 6000) for _ in range(4)), dense]:
        pieces = list(split_document([document]))
        assert len(pieces) > 5
        ids = np.concatenate(list(encode(pieces, encoder)))
        assert ids.tolist() == [*encoder.encode(document), encoder.eos_id]
        assert encoder.encode_within("abc", 0, 3).tolist() == encoder.encode("abc")
