"""`decod data`: what a person types and sees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from decod.cli.data_command import data, microbatch_lines
from decod.data.dataset import Dataset
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text to train on. " * 100)
    result = CliRunner().invoke(
        data, ["prepare", str(tmp_path / "corpus"), str(tmp_path / "a.txt")]
    )
    assert result.exit_code == 0, result.output
    assert "2301 tokens in 1 shard, vocabulary 257, index " in result.stdout
    told = result.stdout.splitlines()[-1]
    assert told.startswith("next: name it in the run file as data.path or evaluation.held_out")
    assert result.stderr == ""
    return tmp_path / "corpus"


def test_options_reach_the_preparation(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"body": "abcd"}\n')
    arguments = ["prepare", str(corpus), str(tmp_path / "b.jsonl"), "--text-field", "body"]
    arguments += ["--shard-tokens", "2", "--force"]
    assert CliRunner().invoke(data, arguments).exit_code == 0
    with Dataset.open(corpus, verify=True) as dataset:
        assert [shard.num_tokens for shard in dataset.index.shards] == [2, 2, 1]


def test_errors_are_passed_on_to_the_top(tmp_path: Path) -> None:
    result = CliRunner().invoke(data, ["prepare", str(tmp_path / "o"), str(tmp_path / "absent")])
    assert isinstance(result.exception, DataError)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "prepare",
        "prepare out",
        "prepare out in --shard-tokens 0",
        "show",
        "show --run x --iteration 0",
        "show --run x",
        "show corpus --run x --iteration 1",
        "show --documents 3",
    ],
)
def test_misuse_is_a_usage_error(arguments: str) -> None:
    assert CliRunner().invoke(data, arguments.split()).exit_code == 2


@pytest.mark.parametrize("command", [[], ["prepare"], ["show"]])
def test_help_begins_with_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(data, [*command, "--help"])
    assert result.exit_code == 0
    assert result.output.index("Example:") < result.output.index("Options:")


def test_microbatches_of_all_data_nodes_are_shown_in_order(corpus: Path) -> None:
    batch = BatchConfig(sequence_length=8, microbatch_size=2, num_microbatches=3, num_data_nodes=2)
    with Dataset.open(corpus) as dataset:
        records = [json.loads(line) for line in microbatch_lines(dataset, batch, 5, 4)]
        assert [(r["iteration"], r["data_node_index"], r["index"]) for r in records] == [
            (4, node, index) for node in range(2) for index in range(3)
        ]
        expected = dataset.microbatch(MicrobatchId(4, 1, 2), batch, 5)
        assert records[-1]["tokens"] == expected.tolist()


def test_first_documents_are_shown_decoded_without_a_run_file(tmp_path: Path) -> None:
    lines = ["first\ttext\n", "escape \x1b[2J sequence", "žirafa" * 1000, "fourth"]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines) + "{}\n")
    out = tmp_path / "corpus"
    arguments = ["prepare", str(out), str(source), "--shard-tokens", "4000", "--skip-bad"]
    told = CliRunner().invoke(data, arguments).stdout
    skipped = f"skipped: 1 record without usable text\n  {source}, line 5: it has no field 'text'"
    assert skipped in told
    result = CliRunner().invoke(data, ["show", str(out)])
    assert result.exit_code == 0, result.output
    shown = result.stdout.splitlines()
    assert shown[0] == (
        f"{out}: 7041 tokens in 2 shards, vocabulary 257, tokenizer bytes, end token 256 "
        "(<|endoftext|>)"
    )
    assert skipped in result.stdout
    assert shown[3:7] == [
        "--- document 1: 11 tokens",
        "first\ttext",
        "",
        "--- document 2: 20 tokens",
    ]
    assert shown[7] == "escape ?[2J sequence"
    assert shown[8:] == ["--- document 3: 7000 tokens", ("žirafa" * 1000)[:500] + " ..."]
    result = CliRunner().invoke(data, ["show", str(out), "--documents", "9"])
    assert result.stdout.splitlines()[-2:] == ["--- document 4: 6 tokens", "fourth"]


def test_show_reads_run_file_and_corpus(tmp_path: Path, corpus: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""
seed = 9
[model]
vocab_size = 257
[batch]
sequence_length = 8
microbatch_size = 1
num_microbatches = 2
[data]
path = "{corpus}"
"""
    )
    result = CliRunner().invoke(data, ["show", "--run", str(run_file), "--iteration", "1"])
    assert result.exception is None, result.exception
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(record["tokens"][0]) for record in records] == [9, 9]


def test_neither_the_command_nor_the_data_package_loads_torch() -> None:
    code = "import sys, decod.cli.data_command; assert 'numpy' not in sys.modules, 'numpy'\n"
    code += "import decod.data.corpus; assert 'torch' not in sys.modules, 'torch'"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_corpus_is_uploaded_and_then_shown_from_there(tmp_path: Path, corpus: Path) -> None:
    pytest.importorskip("fsspec")
    url = "memory://cli/corpus"
    result = CliRunner().invoke(data, ["upload", str(corpus), url])
    assert result.exit_code == 0, result.output
    assert f"{url}: all of {corpus} is there" in result.stdout
    shown = []
    for place in (str(corpus), url):
        run_file = tmp_path / "run.toml"
        run_file.write_text(f'[batch]\nsequence_length = 32\n[data]\npath = "{place}"\n')
        arguments = ["show", "--run", str(run_file), "--iteration", "1"]
        result = CliRunner().invoke(data, arguments)
        assert result.exit_code == 0, result.output
        shown.append(result.stdout)
    assert shown[0] == shown[1] != ""


def test_what_cannot_be_uploaded_is_refused(tmp_path: Path, corpus: Path) -> None:
    pytest.importorskip("fsspec")
    result = CliRunner().invoke(data, ["upload", str(corpus), "elsewhere"])
    assert result.exit_code == 2
    assert "elsewhere is no URL" in result.stderr
    missing = CliRunner().invoke(data, ["upload", str(tmp_path / "none"), "memory://cli/none"])
    assert isinstance(missing.exception, DataError)
    assert "has no index.json" in str(missing.exception)


def test_a_file_where_a_folder_is_meant_is_named_as_that(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("some text")
    shown = CliRunner().invoke(data, ["show", str(book)])
    assert f"{book} is a file" in str(shown.exception)
    assert f"decod data prepare OUT {book}" in str(shown.exception)
    prepared = CliRunner().invoke(data, ["prepare", str(book), str(book)])
    assert prepared.exit_code == 2
    assert "OUT is a folder, and comes first" in prepared.stderr
    assert book.read_text() == "some text"
