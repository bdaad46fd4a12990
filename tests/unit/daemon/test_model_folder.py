"""An export is whole: transformers loads it as it is, and its card says what was trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers

from decod.config.run_file import CardConfig, load_run_file
from decod.config.schema import CARRIED_MAX_CHARACTERS, NOTHING, Carried, Manifest
from decod.daemon.checkpointing import carried_in, differences, settings_in, settings_of
from decod.daemon.exporting import MARK, base_model_of, complete_folder, read_carried, render_card
from decod.data.dataset import Dataset
from decod.data.tokenizer import NO_BOS
from decod.errors import ConfigError
from decod.ids import MicrobatchId, NodeId
from decod.journal.history import SeenMember
from decod.run.model_config import FAMILIES, Architecture
from decod.run.training_config import BatchConfig, Documents
from tests.support.checkpoints import make_manifest
from tests.support.exports import (
    MODEL,
    card_facts,
    make_corpus,
    make_export,
    words_tokenizer,
    write_weights,
)
from tests.support.published_models import byte_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = "héllo  wörld 日本\n\tthe cat \x00 \x7f"


def sections(card: str) -> dict[str, str]:
    """The rows of a card's tables."""
    rows = [line.strip("| ").split(" | ", 1) for line in card.splitlines() if line[:2] == "| "]
    return {row[0]: row[1] for row in rows if len(row) == 2}


@pytest.mark.parametrize("architecture", FAMILIES)
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
    """Documents begin with the token that the file puts before a text. The file also cuts texts."""
    file = words_tokenizer(tmp_path / "words.json")
    dataset = make_corpus(tmp_path / "corpus", str(file))
    folder = make_export(tmp_path / "model", dataset)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the cat sat the cat"
    assert dataset.tokenizer.encode(text) == [1, 2, 3, 1, 2]
    assert tokenizer(text)["input_ids"] == [5, 1, 2, 3, 1, 2]
    assert (
        dataset.microbatch(
            MicrobatchId(1, 0, 0), BatchConfig(sequence_length=151, microbatch_size=1), seed=0
        )[0, 0]
        == 5
    )
    assert tokenizer.eos_token == "</s>"
    # A corpus from before, or with `--bos none`, has no such token. Its model must not get one.
    without = make_corpus(tmp_path / "without", str(file), bos=NO_BOS)
    assert without.index_sha256 != dataset.index_sha256
    folder = make_export(tmp_path / "other", without)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == [1, 2, 3, 1, 2]


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_chat_model(folder: Path) -> Path:
    """Writes what lies beside the weights of a chat model, with tokens that its base lacks."""
    folder.mkdir()
    special = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    (folder / "tokenizer.json").write_text(byte_tokenizer(special, begins="<s>"))
    write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token={"content": "<|im_end|>", "__type": "AddedToken"},
        pad_token="<pad>",
        padding_side="left",
        added_tokens_decoder={"256": {"content": "<s>", "special": True}},
        name_or_path="/home/me/secret",
    )
    (folder / "chat_template.jinja").write_text(CHAT)
    ends = {"eos_token_id": [260, 257], "pad_token_id": 258, "temperature": 0.6}
    write_json(folder / "generation_config.json", bos_token_id=256, **ends)
    write_json(folder / "special_tokens_map.json", bos_token="<s>", pad_token="<pad>")
    write_json(folder / "config.json", _name_or_path=f"someone/{folder.name}")
    return folder


def write_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("of_base", [False, True])
def test_what_lies_beside_the_weights_comes_back(of_base: bool, tmp_path: Path) -> None:
    """Also if the data were made with the tokenizer of the base model, which has no turns."""
    given = write_chat_model(tmp_path / "chat")
    file = given / "tokenizer.json"
    if of_base:
        file = tmp_path / "base.json"
        file.write_text(byte_tokenizer(["<s>", "</s>", "<pad>"], begins="<s>"))
    dataset = make_corpus(tmp_path / "corpus", str(file))
    carried, left_out = read_carried(given, dataset)
    assert left_out == []
    assert len(carried.added_tokens) == (2 if of_base else 0)
    manifest = dataclasses.replace(card_facts(dataset).manifest, carried=carried.to_text())
    assert Manifest.from_json(manifest.to_json()) == manifest
    write_weights(tmp_path / "model")
    facts = card_facts(dataset, manifest=manifest)
    assert complete_folder(tmp_path / "model", dataset, facts) == ""

    before: Any = transformers.AutoTokenizer.from_pretrained(given)
    after: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    turns = [{"role": "user", "content": "the cat"}]
    assert after.apply_chat_template(turns, tokenize=False) == before.apply_chat_template(
        turns, tokenize=False
    )
    text = "<|im_start|>the cat<|im_end|>"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    for name in ("bos_token", "eos_token", "pad_token", "padding_side", "all_special_ids"):
        assert getattr(after, name) == getattr(before, name), name
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "model")
    assert generation.eos_token_id == [260, 257]
    assert (generation.bos_token_id, generation.pad_token_id) == (256, 258)
    assert generation.temperature == 0.6
    assert (tmp_path / "model/special_tokens_map.json").exists()
    header = huggingface_hub.ModelCard((tmp_path / "model/README.md").read_text()).data
    assert header.base_model == "someone/chat"
    for path in (tmp_path / "model").glob("*.json"):
        assert "secret" not in path.read_text(), "what names places of a host stays there"


def test_the_run_file_names_the_base_model_if_the_folder_does_not(tmp_path: Path) -> None:
    dataset = make_corpus(tmp_path / "corpus")
    facts = card_facts(dataset, card=CardConfig(base_model="someone/base"))
    assert huggingface_hub.ModelCard(render_card(facts)).data.base_model == "someone/base"
    assert "base_model" not in render_card(card_facts(dataset))
    for folder, name in (
        ("hub/models--someone--base/snapshots/abc", "someone/base"),
        (f"hub/models--someone--base/snapshots/{COMMIT}", f"someone/base@{COMMIT}"),
        (f"hub/models--someone--base/snapshots/{COMMIT}/x", f"someone/base@{COMMIT}"),
        ("Base-1.1B", "Base-1.1B"),
        ("a folder", ""),
    ):
        assert base_model_of(tmp_path / folder) == name


def test_a_card_names_the_commit_unless_the_organiser_names_another_model(tmp_path: Path) -> None:
    dataset = make_corpus(tmp_path / "corpus")
    carried = Carried(base_model=f"someone/base@{COMMIT}")
    facts = card_facts(dataset)
    manifest = dataclasses.replace(facts.manifest, carried=carried.to_text())
    for named, model, table in (
        ("", "someone/base", f"`someone/base`, commit `{COMMIT}`"),
        ("someone/base", "someone/base", f"`someone/base`, commit `{COMMIT}`"),
        ("someone/other", "someone/other", "`someone/other`"),
    ):
        card = CardConfig(base_model=named)
        text = render_card(dataclasses.replace(facts, manifest=manifest, card=card))
        assert huggingface_hub.ModelCard(text).data.base_model == model
        assert f"| base model | {table} |" in text
    for name in ("someone/base@main", f"base@{COMMIT}", f"someone/base@{COMMIT}\n"):
        with pytest.raises(ConfigError, match="base_model"):
            Carried(base_model=name)


def test_a_tokenizer_that_is_too_long_to_travel_is_told(tmp_path: Path) -> None:
    given = write_chat_model(tmp_path / "chat")
    (given / "chat_template.jinja").write_text("x" * CARRIED_MAX_CHARACTERS)
    (given / "generation_config.json").write_text("<html>")
    dataset = make_corpus(tmp_path / "corpus", str(given))
    carried, left_out = read_carried(given, dataset)
    assert carried.template == ""
    assert carried.objects["tokenizer_config.json"]["pad_token"] == "<pad>"
    damaged, too_long = left_out
    assert "exports will lack generation_config.json" in damaged
    assert "page of HTML" in damaged
    assert "exports will lack chat_template.jinja" in too_long
    # Nor does a peer's text get anywhere but into the files of these names.
    for text in ('{"objects":{"../../x.json":{}}}', '{"template":3}', " {}", '{"a":1}', "[" * 9999):
        with pytest.raises(ConfigError, match="carried has"):
            Carried.from_text(text)


def test_a_release_that_did_not_know_documents_read_them_together(tmp_path: Path) -> None:
    manifest = card_facts(make_corpus(tmp_path / "corpus")).manifest
    batch = dataclasses.replace(manifest.run.batch, documents=Documents.TOGETHER)
    run = dataclasses.replace(manifest.run, batch=batch)
    manifest = dataclasses.replace(manifest, run=run)
    settings = settings_of(manifest)
    assert settings.pop("batch.documents") == "together"
    kept = make_manifest(3, settings=settings)
    assert differences(settings_in(kept), settings_of(manifest)) == []


def test_a_resumed_run_carries_what_its_checkpoint_names(tmp_path: Path) -> None:
    dataset = make_corpus(tmp_path / "corpus")
    text = Carried(template="x").to_text()
    manifest = dataclasses.replace(card_facts(dataset).manifest, carried=text)
    kept = make_manifest(3, settings=settings_of(manifest))
    assert carried_in(kept) == text
    assert differences(settings_in(kept), settings_of(card_facts(dataset).manifest)) == []
    assert carried_in(dataclasses.replace(kept, settings={})) == NOTHING


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


def test_a_card_names_those_who_lent_their_hosts(tmp_path: Path) -> None:
    """Their names are their own choice, and only text."""
    dataset = make_corpus(tmp_path)
    members = [
        SeenMember(NodeId("a"), "attic", 1, 300),
        SeenMember(NodeId("b"), "| `x` | <b>", 1, 100),
        SeenMember(NodeId("c"), "cellar", 2, 7),
    ]
    card = render_card(card_facts(dataset, contributors=members))
    rows = card.partition("## Contributors")[2].partition("## Use")[0].strip().splitlines()[2:]
    assert rows[2:] == [
        "| `attic` | 1 | 300 | 75.0% |",
        "| ` x  <b>` | 1 | 100 | 25.0% |",
        "| `cellar` | 2 | 7 | 100.0% |",
    ]
    many = [SeenMember(NodeId(str(n)), f"n{n}", 1, 1) for n in range(250)]
    assert "| and 50 more | | | |" in render_card(card_facts(dataset, contributors=many))
    assert "Contributors" not in render_card(card_facts(dataset))
