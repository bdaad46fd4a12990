"""The loss of a model on held-out text, beside transformers'."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.model.shape import model_shapes
from decod.model.stage import initial_weight
from decod.run.model_config import ModelConfig
from decod.run.training_config import BatchConfig
from decod.train.evaluate import evaluate
from tests.support.chat_models import conversation, write_chat_model
from tests.support.model_folders import write_folder
from tests.support.oracle import load_transformers, transformers_loss
from tests.support.reference import documents_apart
from tests.support.runs import MODELS, prepare_corpus

LENGTH = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("data"))


def write_model(folder: Path, model: ModelConfig) -> None:
    weights = {
        name: 3 * initial_weight(model, seed=1, name=name, shape=shape)
        for name, shape in model_shapes(model).items()
    }
    write_folder(folder, model, weights)


@pytest.mark.parametrize("name", [*MODELS])
@pytest.mark.parametrize("num", [8, 10])
def test_the_loss_is_that_of_transformers_on_the_same_sequences(
    num: int, name: str, corpus: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, MODELS[name])
    batch = BatchConfig(sequence_length=LENGTH, microbatch_size=num, num_microbatches=1)
    with Dataset.open(corpus) as dataset:
        found = evaluate(tmp_path, dataset, num_sequences=num, sequence_length=LENGTH)
        tokens = dataset.microbatch(MicrobatchId(1, 0, 0), batch, seed=0)
    assert (found.num_sequences, found.num_tokens) == (num, num * LENGTH)
    assert found.loss == pytest.approx(transformers_loss(tmp_path, [tokens]), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_conversations_are_read_apart_and_answers_count(tmp_path: Path) -> None:
    """As transformers does with a label of -100 for what is no answer."""
    model = write_chat_model(tmp_path / "chat", "chatml")
    draw = random.Random(3)
    lines = [json.dumps({"messages": conversation(draw, "chatml")}) for _ in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    config = PrepareConfig(tokenizer=str(model), chat=True, sequence_length=32)
    prepare(tmp_path / "corpus", [tmp_path / "chat.jsonl"], config)
    with Dataset.open(tmp_path / "corpus") as dataset:
        write_model(tmp_path / "model", replace(MODELS["llama"], vocab_size=dataset.vocab_size))
        num = dataset.num_windows(32)
        batch = BatchConfig(sequence_length=32, microbatch_size=num, num_microbatches=1)
        found = evaluate(tmp_path / "model", dataset, num_sequences=num, sequence_length=32)
        mb = MicrobatchId(1, 0, 0)
        read = dataset.microbatch(mb, batch, 0), dataset.marks(mb, batch, 0)
    theirs = load_transformers(tmp_path / "model")
    total, num_targets = 0.0, 0
    for inputs, targets in documents_apart(*read):
        logits = theirs(torch.from_numpy(inputs)).logits[0]
        labels = torch.from_numpy(targets[0])
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
        num_targets += int((labels >= 0).sum())
    assert found.num_tokens == num_targets
    assert found.loss == pytest.approx(total / num_targets, rel=1e-5)


def test_a_short_text_is_read_whole_and_as_long_as_the_model_can_see(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc" * 40)
    prepare(tmp_path / "corpus", [tmp_path / "text"], PrepareConfig())
    write_model(tmp_path / "model", MODELS["llama"])
    with Dataset.open(tmp_path / "corpus") as dataset:
        found = evaluate(tmp_path / "model", dataset, num_sequences=64)
    assert (found.num_sequences, found.num_tokens) == (3, 3 * 32)


@pytest.mark.parametrize(
    ("changes", "length", "what"),
    [
        ({"vocab_size": 200}, LENGTH, "are not those of"),
        ({}, 33, "longer than the 32"),
        ({"max_position_embeddings": 1 << 20}, 1 << 20, "too short to predict"),
    ],
)
def test_a_text_that_does_not_fit_the_model_is_refused(
    changes: dict[str, Any], length: int, what: str, corpus: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, replace(MODELS["llama"], **changes))
    with Dataset.open(corpus) as dataset, pytest.raises(DataError, match=what) as caught:
        evaluate(tmp_path, dataset, num_sequences=1, sequence_length=length)
    assert caught.value.code == "E-DAT-043"
