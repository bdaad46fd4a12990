"""Folders of exported models, as a leader writes them, without a run."""

import dataclasses
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from decod.config.run_file import CardConfig
from decod.config.schema import Manifest
from decod.daemon.exporting import CardFacts, complete_folder
from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, write_corpus
from decod.data.sources import split_document
from decod.data.tokenizer import load_tokenizer
from decod.ids import RunId
from decod.model.shape import model_shapes
from decod.model.stage import initial_weight
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from tests.support.model_folders import write_folder

MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
RUN = RunConfig(name="tiny", num_iterations=50, model=MODEL, batch=BatchConfig(sequence_length=32))


def words_tokenizer(path: Path) -> Path:
    """Write a tokenizer of words that begins every text with a token of its own."""
    words = ["<unk>", "the", "cat", "sat", "</s>", "<s>"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 5)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    return path


def make_corpus(folder: Path, tokenizer: str = "bytes", bos: str | None = None) -> Dataset:
    """Write a small corpus."""
    pieces = split_document("the cat sat " * 50)
    write_corpus(folder, pieces, load_tokenizer(tokenizer, bos=bos), PrepareConfig())
    return Dataset.open(folder)


def card_facts(dataset: Dataset, run: RunConfig = RUN, **changes: Any) -> CardFacts:
    manifest = Manifest(
        run=run, data_index_sha256=dataset.index_sha256, data_vocab_size=dataset.vocab_size
    )
    facts = CardFacts(
        manifest=manifest,
        run_id=RunId("r" * 26),
        card=CardConfig(),
        iteration=40,
        loss=2.5,
        num_data_tokens=dataset.num_tokens,
        tokenizer=dataset.index.tokenizer.kind,
        num_nodes=3,
    )
    return dataclasses.replace(facts, **changes)


def write_weights(folder: Path, model: ModelConfig = MODEL) -> None:
    """Write a model whose scores differ from token to token."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in model_shapes(model).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = initial_weight(model, seed=0, name=name, shape=shape) * 5 + 0.1 * noise
    write_folder(folder, model, weights)


def make_export(folder: Path, dataset: Dataset, model: ModelConfig = MODEL) -> Path:
    """Write a whole export."""
    write_weights(folder, model)
    facts = card_facts(dataset, dataclasses.replace(RUN, model=model))
    assert complete_folder(folder, dataset, facts) == ""
    return folder
