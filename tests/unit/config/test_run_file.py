"""Run files: what is written is read back, and every mistake is named with its line."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.run_file import (
    DataSource,
    field_comments,
    load_run_file,
    locate_keys,
    render_run_file,
)
from decod.errors import ConfigError
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.training_config import OptimizerConfig
from decod.train.checkpoint.store import CheckpointConfig


def _write(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _error(folder: Path, text: str | bytes) -> str:
    path = _write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_run_file(path)
    return str(caught.value).replace(f"{folder}/", "")


USUAL_RUN = dataclasses.replace(
    RunConfig(),
    optimizer=OptimizerConfig(warmup_iterations=100, lr_min_ratio=0.1, clip_norm=1.0),
)
"""What a file without a word gives."""


def test_the_template_reads_back_as_the_defaults(tmp_path: Path) -> None:
    read = load_run_file(_write(tmp_path, render_run_file()))
    assert (read.run, read.data) == (RunConfig(), DataSource())
    assert read.checkpoint == CheckpointConfig()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_run_file(_write(tmp_path, "")).run == USUAL_RUN
    assert load_run_file(_write(tmp_path, render_run_file(leaves_usual=True))).run == USUAL_RUN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_iterations = 5000", (100, "cosine", 5000, 0.1, 1.0)),
        ("num_iterations = 1000000", (2000, "cosine", 1000000, 0.1, 1.0)),
        ("num_iterations = 1", (0, "cosine", 1, 0.1, 1.0)),
        ("[optimizer]\ndecay_iterations = 500", (10, "cosine", 500, 0.1, 1.0)),
        (
            "num_iterations = 300\n[optimizer]\nwarmup_iterations = 300",
            (300, "constant", 0, 0.1, 1.0),
        ),
        ('num_iterations = 300\n[optimizer]\nschedule = "constant"', (6, "constant", 0, 0.1, 1.0)),
        ('num_iterations = 300\n[optimizer]\nschedule = "linear"', (6, "linear", 300, 0.1, 1.0)),
        ("num_iterations = 300\n[optimizer]\ndecay_iterations = 0", (100, "constant", 0, 0.1, 1.0)),
        (
            "num_iterations = 300\n[optimizer]\nlr_min_ratio = 0\nclip_norm = 0",
            (6, "cosine", 300, 0.0, 0.0),
        ),
        ('[sync]\ncompression = "int8"', (100, "constant", 0, 0.1, 0.0)),
        ('[sync]\nmethod = "diloco"\ncompression = "int8"', (100, "constant", 0, 0.1, 1.0)),
    ],
)
def test_the_optimizer_follows_the_field_where_a_file_says_nothing(
    tmp_path: Path, text: str, expected: tuple[object, ...]
) -> None:
    """A warm-up, a cosine until the end if it is known, and clipping."""
    found = load_run_file(_write(tmp_path, text)).run.optimizer
    keys = ("warmup_iterations", "schedule", "decay_iterations", "lr_min_ratio", "clip_norm")
    assert tuple(getattr(found, key) for key in keys) == expected


@pytest.mark.parametrize(
    "text",
    ["num_iterations = true", "optimizer = 3", "[optimizer]\ndecay_iterations = 'x'", "sync = 1"],
)
def test_what_is_of_a_wrong_type_is_refused_as_ever(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="E-CFG-005"):
        load_run_file(_write(tmp_path, text))


def test_values_other_than_the_defaults_survive_writing_and_reading(tmp_path: Path) -> None:
    run = dataclasses.replace(
        RunConfig(name="wiki-7b", seed=2**63 - 1),
        model=ModelConfig(hidden_size=64, norm_eps=1e-6, tie_word_embeddings=True),
    )
    data = DataSource(path='/data/with "quotes" and é')
    checkpoint = CheckpointConfig(every_iterations=7, keep=1)
    read = load_run_file(_write(tmp_path, render_run_file(run, data, checkpoint)))
    assert (read.run, read.data, read.checkpoint) == (run, data, checkpoint)


def test_a_url_stays_as_it_is_and_its_cache_is_seen_from_the_file(tmp_path: Path) -> None:
    text = '[data]\npath = "s3://bucket/corpus"\ncache = "blocks"\ncache_max_gib = 2\n'
    text += '[evaluation]\nheld_out = "https://host/held-out"\n'
    read = load_run_file(_write(tmp_path, text))
    cache = str(tmp_path / "blocks")
    assert read.data == DataSource(path="s3://bucket/corpus", cache=cache, cache_max_gib=2.0)
    assert read.evaluation.held_out == "https://host/held-out"


@pytest.mark.parametrize("size", ["0", "-1", "1e9"])
def test_an_impossible_cache_is_placed_in_the_file(tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-006 .*:2: data\.cache_max_gib is"):
        load_run_file(_write(tmp_path, f"[data]\ncache_max_gib = {size}\n"))


def test_an_impossible_wish_for_checkpoints_is_placed_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-006 .*:2: checkpoint\.keep is 0"):
        load_run_file(_write(tmp_path, "[checkpoint]\nkeep = 0\n"))
    expected = "every_iterations is -1: it is a number of iterations, from 0 to 2\\^40. "
    with pytest.raises(ConfigError, match=expected):
        load_run_file(_write(tmp_path, "[checkpoint]\nevery_iterations = -1\n"))


def test_every_key_of_the_template_has_a_comment() -> None:
    lines = render_run_file().splitlines()
    for above, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert above.startswith("# "), line


def test_field_comments_are_the_strings_in_the_source() -> None:
    assert field_comments(DataSource)["path"].startswith("Folder that `decod data prepare` wrote")


def test_an_integer_may_stand_for_a_float(tmp_path: Path) -> None:
    lr = load_run_file(_write(tmp_path, "[optimizer]\nlr = 1\n")).run.optimizer.lr
    assert isinstance(lr, float)
    assert lr == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[model]\nhiden_size = 3\n",
            ["E-CFG-004 run.toml:2: unknown key model.hiden_size", "mean model.hidden_size?"],
        ),
        ("[modle]\nhidden_size = 3\n", ["run.toml:1: unknown key modle", "did you mean model?"]),
        ("lr = 0.1\n", ["run.toml:1: unknown key lr", "did you mean optimizer.lr?"]),
        ("zzzzz = 1\n", ["run.toml:1: unknown key zzzzz", "remove it"]),
        ('[optimizer]\n\nlr = "0.1"\n', ["E-CFG-005 run.toml:3: optimizer.lr is '0.1'", "number"]),
        ("[optimizer]\nlr = nan\n", ["run.toml:2: optimizer.lr is nan", "finite number"]),
        ("[optimizer]\nlr = inf\n", ["run.toml:2: optimizer.lr is inf", "finite number"]),
        ("[optimizer]\nlr = true\n", ["run.toml:2: optimizer.lr is True", "number"]),
        ("[optimizer]\nlr = -1\n", ["E-CFG-006 run.toml:2: optimizer.lr is -1.0"]),
        ("seed = true\n", ["run.toml:1: seed is True", "an integer"]),
        ("seed = 1.0\n", ["run.toml:1: seed is 1.0", "an integer"]),
        ("seed = -1\n", ["run.toml:1: seed is -1"]),
        ("seed = 9223372036854775808\n", ["run.toml:1: seed is", "9223372036854775808"]),
        (f"seed = 0x{'f' * 9000}\n", ["run.toml:1: seed is an integer of 36000 bits"]),
        (f"[optimizer]\nlr = 0x{'f' * 9000}\n", ["run.toml:2: optimizer.lr is an integer of"]),
        ('name = "Big Name"\n', ["run.toml:1: name is 'Big Name'", "a-z, 0-9 and -"]),
        ('name = "a\\n"\n', ["run.toml:1: name is"]),
        ("model = 3\n", ["run.toml:1: model is 3", "a table of keys"]),
        ("[[model]]\nhidden_size = 3\n", ["run.toml:1: model is", "a table of keys"]),
        (
            '[model]\nmodel_type = "lama"\n',
            ["run.toml:2: model.model_type", "'gpt2' or 'transformers'"],
        ),
        (
            "[model]\nmodel_type = 1\n",
            ["run.toml:2: model.model_type", "'gpt2' or 'transformers'"],
        ),
        ("[model]\n\n\nhidden_size = 130\n", ["E-CFG-006 run.toml:4: model.hidden_size is 130"]),
        (
            "[model]\nnum_attention_heads = 3\n",
            ["run.toml:1: model.hidden_size is 128", "3 attention heads"],
        ),
        ("[optimizer]\nclip_norm = -0.5\n", ["run.toml:2: optimizer.clip_norm is -0.5"]),
        (
            '[model]\nrope_type = "linear"\n',
            ["run.toml:1: model.rope_factor is 0.0", "rope_type linear it must be 1 or more"],
        ),
        ("[model]\nrope_factor = 2.0\n", ["run.toml:2: model.rope_factor is 2.0"]),
        ('[model]\nrope_type = "yarn"\n', ["'default', 'linear' or 'llama3'"]),
        ("model = { hidden_size = 130 }\n", ["run.toml:1: model.hidden_size is 130"]),
        ("model.hidden_size = 130\n", ["run.toml:1: model.hidden_size is 130"]),
        ("[stages]\nnum_relay_stages = 5\n", ["run.toml:2: stages.num_relay_stages is 5"]),
        ('[stages]\nblocks = "3, 2"\n', ["run.toml:2: stages.blocks is '3, 2'", "sum is 4"]),
        ('[stages]\nblocks = "4, 0"\n', ["run.toml:2: stages.blocks is '4, 0'", "at least one"]),
        ('[stages]\nblocks = "4"\n', ["run.toml:2: stages.blocks is '4'", "give 2 numbers"]),
        ('[stages]\nblocks = "3 1"\n', ["run.toml:2: stages.blocks is '3 1'", 'or "auto"']),
        ('[stages]\nblocks = "5, -1"\n', ["run.toml:2: stages.blocks is '5, -1'", '"2, 2"']),
        ("[stages]\nblocks = [3, 1]\n", ["run.toml:2: stages.blocks is [3, 1]", "a string"]),
        ("[stages]\nnum_first_blocks = -1\n", ["run.toml:2: stages.num_first_blocks is -1"]),
        (
            "[batch]\nsequence_length = 2048\n",
            ["run.toml:2: batch.sequence_length is 2048", "max_position_embeddings"],
        ),
        ("[batch]\nmicrobatch_size = 65536\n", ["batch.microbatch_size is 65536", "8.0 GiB"]),
        (
            "[model]\nhidden_size = 262144\nnum_hidden_layers = 4096\n",
            ["run.toml:2: model.hidden_size", "2^40"],
        ),
        (
            "[model]\nnum_hidden_layers = 99999999\n",
            ["run.toml:2: model.num_hidden_layers is 99999999"],
        ),
        ("[model]\nvocab_size = 99999999999\n", ["run.toml:2: model.vocab_size is 99999999999"]),
        ("seed = \n", ["E-CFG-003 run.toml:1:8: not valid TOML", "invalid value"]),
        ("seed = 1\nseed = 2\n", ["run.toml:2:9: not valid TOML", "cannot overwrite a value"]),
        ('name = "open', ["run.toml:1: not valid TOML"]),
        (f"seed = {'[' * 5000}", ["run.toml: not valid TOML", "nested too deeply"]),
        (f"seed = {'9' * 5000}\n", ["not valid TOML", "4300"]),
        (b"seed = 1\n# caf\xe9\n", ["E-CFG-003 run.toml:2: byte 0xe9 is not UTF-8"]),
        (b"# " + b"x" * (1 << 20), ["E-CFG-002 run.toml is larger than 1048576 bytes"]),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(
    tmp_path: Path, text: str | bytes, expected: list[str]
) -> None:
    message = _error(tmp_path, text)
    for part in expected:
        assert part in message, message
    assert len(message) < 600


def test_of_several_mistakes_the_first_in_the_file_is_named(tmp_path: Path) -> None:
    message = _error(tmp_path, "[batch]\nx1 = 1\n[model]\nx2 = 1\n")
    assert "run.toml:2: unknown key batch.x1 (1 more like this in the file)" in message


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=f"E-CFG-002 cannot read {path}"):
            load_run_file(path)


def test_keys_inside_a_multi_line_string_are_not_taken_for_keys() -> None:
    text = 'a = """\nseed = 1\n[model]\n"""\nseed = 2\n[ "model" ]\n"x" = 1\n'
    assert locate_keys(text) == {"a": 1, "seed": 5, "model": 6, "model.x": 7}


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = _write(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogatepass"))
    try:
        load_run_file(path)
    except ConfigError as error:
        assert error.exit_code == 3  # noqa: PT017 - text that happens to be valid is fine too.
