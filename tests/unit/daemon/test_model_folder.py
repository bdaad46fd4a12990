"""An export is whole: transformers loads it as it is, and its card says what was trained."""

import dataclasses
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers

from decod.config.card import CardConfig
from decod.config.run_file import load_run_file
from decod.daemon.model_card import MARK, render_card
from decod.daemon.model_folder import complete_folder
from decod.data.dataset import Dataset
from decod.errors import ConfigError
from decod.model.config import Architecture
from tests.support.exports import (
    MODEL,
    card_facts,
    make_corpus,
    make_export,
    words_tokenizer,
    write_weights,
)

TEXT = "héllo  wörld 日本\n\tthe cat \x00 \x7f"


def sections(card: str) -> dict[str, str]:
    """The rows of a card's tables."""
    rows = [line.strip("| ").split(" | ", 1) for line in card.splitlines() if line[:2] == "| "]
    return {row[0]: row[1] for row in rows if len(row) == 2}


@pytest.mark.parametrize("architecture", Architecture)
def test_transformers_loads_tokenizer_and_model_of_a_run_on_bytes(
    architecture: Architecture, tmp_path: Path
) -> None:
    dataset = make_corpus(tmp_path / "corpus")
    model = dataclasses.replace(MODEL, model_type=architecture, num_key_value_heads=4)
    folder = make_export(tmp_path / "model", dataset, model)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == dataset.tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (256, 64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.generation_config.eos_token_id == 256


def test_transformers_gives_the_ids_that_the_run_was_trained_on(tmp_path: Path) -> None:
    """The file by itself adds a token that no document of the corpus began with, and cuts texts."""
    file = words_tokenizer(tmp_path / "words.json")
    dataset = make_corpus(tmp_path / "corpus", str(file))
    folder = make_export(tmp_path / "model", dataset)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the cat sat the cat"
    assert tokenizer(text)["input_ids"] == dataset.tokenizer.encode(text) == [1, 2, 3, 1, 2]
    assert tokenizer.eos_token == "</s>"


def test_the_hub_understands_the_card(tmp_path: Path) -> None:
    dataset = make_corpus(tmp_path / "corpus")
    card = CardConfig(license="cc-by-4.0", datasets="someone/books, more.text")
    text = render_card(card_facts(dataset, card=card))
    header = huggingface_hub.ModelCard(text).data.to_dict()
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["decod", "llama"],
        "license": "cc-by-4.0",
        "datasets": ["someone/books", "more.text"],
    }
    rows = sections(text)
    assert rows["iteration"] == "40 of 50"
    assert rows["training loss"] == "2.5000 nats per token"
    assert rows["run"] == f"`tiny`, run id `{'r' * 26}`"
    assert rows["nodes that contributed"] == "at least 3"
    # 40 iterations of 8 microbatches of 4 sequences of 32 tokens, over 601 tokens of text.
    assert rows["trained on"] == "at most 40,960 tokens, which is 68.15 times the corpus"
    assert rows["`optimizer.lr`"] == "`0.001`"
    assert 'AutoTokenizer.from_pretrained("FOLDER")' in text


def test_a_card_invents_nothing(tmp_path: Path) -> None:
    dataset = make_corpus(tmp_path / "corpus")
    text = render_card(card_facts(dataset, loss=None))
    header = huggingface_hub.ModelCard(text).data.to_dict()
    assert not {"license", "datasets"} & header.keys()
    rows = sections(text)
    assert (rows["training loss"], rows["datasets"]) == ("unknown", "not stated")
    resumed = dataclasses.replace(
        card_facts(dataset).manifest, initial_weights="a" * 64, start_iteration=20
    )
    rows = sections(render_card(card_facts(dataset, manifest=resumed)))
    assert rows["beginning"] == "resumed from a checkpoint of iteration 20"


def test_a_model_without_a_tokenizer_is_exported_and_the_card_says_so(tmp_path: Path) -> None:
    file = words_tokenizer(tmp_path / "words.json")
    make_corpus(tmp_path / "corpus", str(file))
    (tmp_path / "corpus/tokenizer.json").unlink()
    dataset = Dataset.open(tmp_path / "corpus")
    write_weights(tmp_path / "model")
    missing = complete_folder(tmp_path / "model", dataset, card_facts(dataset))
    assert missing.startswith("no tokenizer: ")
    assert "there is no such file" in missing
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md"}
    card = (tmp_path / "model/README.md").read_text()
    assert "This folder has no tokenizer: " in card
    assert str(tmp_path) not in card
    assert "AutoTokenizer" not in card
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model") is not None


def test_a_readme_of_somebody_else_stays(tmp_path: Path) -> None:
    """`decod leader --export .` in a folder with a project must not destroy anything."""
    dataset, folder = make_corpus(tmp_path / "corpus"), tmp_path / "model"
    make_export(folder, dataset)
    facts = card_facts(dataset, iteration=41)
    assert complete_folder(folder, dataset, facts) == ""
    card = (folder / "README.md").read_text()
    assert sections(card)["iteration"] == "41 of 50", "decod's own is replaced"
    mine = card.replace(MARK, "")
    (folder / "README.md").write_text(mine)
    missing = complete_folder(folder, dataset, facts)
    assert missing == "no model card: README.md is there and is not decod's"
    assert (folder / "README.md").read_text() == mine


def test_a_disk_that_refuses_the_card_costs_no_model(tmp_path: Path) -> None:
    dataset, folder = make_corpus(tmp_path / "corpus"), tmp_path / "model"
    make_export(folder, dataset)
    (folder / "README.md").unlink()
    (folder / "README.md").mkdir()
    missing = complete_folder(folder, dataset, card_facts(dataset))
    assert missing.startswith("no tokenizer or no model card, since the disk refuses them: ")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('license = "Apache 2.0"', "card.license is 'Apache 2.0'"),
        ('datasets = "good, ../bad"', "card.datasets is '../bad'"),
        (f'datasets = "{"x," * 101}"', "card.datasets is a list of 101 names"),
    ],
)
def test_a_card_that_the_hub_would_refuse_is_a_mistake_in_the_run_file(
    line: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[card]\n{line}\n")
    with pytest.raises(ConfigError, match=f"E-CFG-006 .*run.toml:2: {named}"):
        load_run_file(path)


def test_the_run_file_states_licence_and_datasets(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[card]\nlicense = "mit"\ndatasets = "a/b"\n')
    loaded = load_run_file(path)
    assert loaded.card == CardConfig(license="mit", datasets="a/b")
    path.write_text("")
    assert loaded.run == load_run_file(path).run, "members don't compare it"
