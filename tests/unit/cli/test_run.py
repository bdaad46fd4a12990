"""`decod run init` and `decod run check`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.compression.plan import Method
from decod.config import RunConfig, load_run_file
from decod.config.presets import MODEL_PRESETS, PRESETS
from decod.config.run_file import render_run_file
from decod.run.training_config import OptimizerConfig, SyncConfig, SyncMethod

USUAL_RUN = replace(
    RunConfig(),
    optimizer=OptimizerConfig(warmup_iterations=100, lr_min_ratio=0.1, clip_norm=1.0),
)


def test_init_writes_a_file_that_check_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert main(["run", "init", str(path)]) == 0
    assert load_run_file(path).run == USUAL_RUN
    assert main(["run", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert "is valid" in text
    assert "parameters         918,912" in text
    assert "averages           each iteration" in text
    assert "stage 2            blocks 2 to 3; averages of 1.63 MiB" in text


@pytest.mark.parametrize(
    ("keys", "often", "size"),
    [
        ({"compression": Method.NONE}, "every 4 iterations;", "1.63"),
        ({"compression": Method.INT8}, "every 4 iterations;", "0.41"),
        ({"fragments": 2}, "every 4 iterations, in 2 fragments;", "0.81"),
    ],
)
def test_check_shows_the_size_of_averages(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keys: dict[str, Any],
    often: str,
    size: str,
) -> None:
    path = tmp_path / "run.toml"
    sync = SyncConfig(method=SyncMethod.DILOCO, every=4, **keys)
    path.write_text(render_run_file(RunConfig(sync=sync)), encoding="utf-8")
    assert main(["run", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"averages           {often}" in text
    assert f"stage 2            blocks 2 to 3; averages of {size} MiB" in text


@pytest.mark.parametrize("preset", PRESETS)
def test_init_writes_the_keys_of_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    """The file is explicit, and a run with the default model can use it."""
    path = tmp_path / "run.toml"
    assert main(["run", "init", str(path), "--preset", preset]) == 0
    assert capsys.readouterr().out == f"wrote {path}; next: decod leader {path}\n"
    clip_norm = (
        0.0 if preset == "cocktailsgd" else 1.0
    )  # The norm of what is compressed is unknown.
    found, own = PRESETS[preset], PRESETS[preset].optimizer
    usual = replace(USUAL_RUN.optimizer, clip_norm=clip_norm)
    optimizer = replace(usual, name=own.name, beta1=own.beta1)
    assert load_run_file(path).run == RunConfig(sync=found.sync, optimizer=optimizer)
    assert main(["run", "check", str(path)]) == 0
    assert main(["run", "init", "--help"]) == 0
    assert f"\n    {preset} " in capsys.readouterr().out


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_init_writes_the_shape_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    """With it goes a method of averaging, and the plan comes next."""
    path = tmp_path / "run.toml"
    arguments = ["--preset", preset, "--preset", "diloco"]
    assert main(["run", "init", str(path), *arguments]) == 0
    assert capsys.readouterr().out == f"wrote {path}; next: decod run plan {path}\n"
    found, wanted = load_run_file(path).run, MODEL_PRESETS[preset]
    assert (found.model, found.stages, found.batch) == (wanted.model, wanted.stages, wanted.batch)
    assert found.sync == PRESETS["diloco"].sync
    assert main(["run", "plan", str(path)]) == 0
    assert main(["run", "init", "--help"]) == 0
    assert f"\n    {preset} " in capsys.readouterr().out


def test_init_names_the_presets_if_there_is_no_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init", "-", "--preset", "dilocoy"]) == 2
    said = capsys.readouterr().err
    assert all(preset in said for preset in (*PRESETS, *MODEL_PRESETS))


def test_init_takes_one_preset_of_a_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init", "-", "--preset", "gpt2", "--preset", "llama-1b"]) == 2
    assert "--preset gpt2 and --preset llama-1b set the same keys" in capsys.readouterr().err


def test_init_writes_to_the_terminal_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init", "-"]) == 0
    assert "[optimizer]" in capsys.readouterr().out


def test_init_replaces_a_file_only_when_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine" * 10_000)
    assert main(["run", "init", str(path)]) == 3
    assert "E-CFG-007" in capsys.readouterr().err
    assert path.read_text().startswith("mine")
    assert main(["run", "init", "--force", str(path)]) == 0
    assert load_run_file(path).run == USUAL_RUN


def test_init_says_why_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "init", str(tmp_path / "no" / "run.toml")]) == 3
    assert "No such file or directory" in capsys.readouterr().err


def test_check_names_the_line_of_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nhiden_size = 1\n")
    assert main(["run", "check", str(path)]) == 3
    assert "run.toml:2: unknown key model.hiden_size" in capsys.readouterr().err


def test_check_looks_at_the_data_beside_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths are as seen from the run file, wherever decod is called."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 2000)
    assert main(["data", "prepare", str(tmp_path / "job" / "corpus"), str(text)]) == 0
    path = tmp_path / "job" / "run.toml"
    path.write_text('[data]\npath = "corpus"\n')
    monkeypatch.chdir(tmp_path)
    assert load_run_file(path).data.path == str(tmp_path / "job" / "corpus")
    capsys.readouterr()
    assert main(["run", "check", "job/run.toml"]) == 0
    assert f"{tmp_path / 'job' / 'corpus'}: 38," in capsys.readouterr().out
    path.write_text('[data]\npath = "corpus"\n[model]\nvocab_size = 200\n')
    assert main(["run", "check", "job/run.toml"]) == 3
    assert "model.vocab_size is 200" in capsys.readouterr().err
    path.write_text('[data]\npath = "nowhere"\n')
    assert main(["run", "check", "job/run.toml"]) != 0
    assert "nowhere" in capsys.readouterr().err


def test_check_refuses_the_held_out_text_that_a_leader_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[evaluation]\nheld_out = "nowhere"\n')
    assert main(["run", "check", str(path)]) != 0
    error = capsys.readouterr().err
    assert "E-DAT-020" in error
    assert "nowhere" in error


def test_an_export_does_not_replace_files_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    arguments = ["export", str(tmp_path), "--state-dir", str(tmp_path / "state")]
    assert main(arguments) == 3
    assert "is not empty" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 7, "no daemon is there to be asked"
    assert (tmp_path / "config.json").read_text() == "mine"
