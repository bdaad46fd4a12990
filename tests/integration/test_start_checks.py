"""No line that can be pasted is printed before everything that it promises has been checked."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decod.data.prepare import PrepareConfig, prepare
from decod.model.shape import model_shapes
from tests.support.cluster import Cluster, assert_refused, run_decod
from tests.support.model_folders import write_folder
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

RUN = make_run()


@pytest.fixture
def init_dir(tmp_path: Path) -> Path:
    weights = {name: torch.randn(shape) for name, shape in model_shapes(RUN.model).items()}
    model = replace(RUN.model, dtype=RUN.model.dtype)
    write_folder(tmp_path / "init", model, weights)
    return tmp_path / "init"


def assert_refused_before_anybody_is_asked(
    tmp_path: Path, corpus: Path, *options: str | Path, exit_code: int, holds: list[str]
) -> None:
    """Checks both commands, with the same run file and options."""
    run_file = Cluster(tmp_path / "other", RUN, corpus).run_file
    place = ["--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state", "--threads", "1"]
    for command in (["leader", run_file, *place], ["run", "check", run_file]):
        result = run_decod(*command, *options)
        assert_refused(result, exit_code=exit_code, holds=holds)
        assert result.stdout == "", "nothing that could be pasted"


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("not finite", ["E-DAT-013", "model.norm.weight is not finite"]),
        ("another shape", ["E-DAT-013", "model.norm.weight is (31,), not (32,)"]),
        ("cut off", ["E-DAT-012", "model.safetensors"]),
        ("missing", ["E-DAT-012", "no model.safetensors in"]),
    ],
)
def test_unfit_weights_are_refused(
    tmp_path: Path, corpus: Path, init_dir: Path, kind: str, holds: list[str]
) -> None:
    path = init_dir / "model.safetensors"
    weights = load_file(path)
    norm = weights["model.norm.weight"]
    match kind:
        case "not finite":
            norm[3] = float("nan")
            save_file(weights, path)
        case "another shape":
            save_file(weights | {"model.norm.weight": norm[1:].clone()}, path)
        case "cut off":
            path.write_bytes(path.read_bytes()[:-1])
        case "missing":
            path.unlink()
    assert_refused_before_anybody_is_asked(
        tmp_path, corpus, "--init", init_dir, exit_code=9, holds=holds
    )


def test_data_that_fill_no_batch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc")
    prepare(tmp_path / "corpus", [tmp_path / "text.txt"], PrepareConfig())
    holds = ["E-DAT-024", "has 4 tokens, which is 0 sequences", "one iteration takes 16"]
    assert_refused_before_anybody_is_asked(tmp_path, tmp_path / "corpus", exit_code=9, holds=holds)


def test_a_shard_that_was_altered_is_refused(tmp_path: Path, corpus: Path) -> None:
    own = shutil.copytree(corpus, tmp_path / "own")
    shard = own / "shard-00002.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    holds = ["E-DAT-022", str(shard), "bytes 0 to 99999"]
    assert_refused_before_anybody_is_asked(tmp_path, own, exit_code=9, holds=holds)
    assert_refused_before_anybody_is_asked(
        tmp_path, corpus, "--data", own, exit_code=9, holds=holds
    )


def test_a_device_that_is_not_there_is_found_before_anybody_is_asked(
    tmp_path: Path, corpus: Path
) -> None:
    run_file = Cluster(tmp_path / "other", RUN, corpus).run_file
    place = ["--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state", "--threads", "1"]
    result = run_decod("leader", run_file, *place, "--device", "cuda:7")
    assert_refused(result, exit_code=6, holds=["E-HW-002", "cuda:7"])
    assert "join string" not in result.stdout


def test_check_accepts_what_a_run_can_start_from(
    tmp_path: Path, corpus: Path, init_dir: Path
) -> None:
    run_file = Cluster(tmp_path / "other", RUN, corpus).run_file
    result = run_decod("run", "check", run_file, "--init", init_dir, "--full")
    assert result.returncode == 0, result
    assert "all of the data hold against their hashes" in result.stdout
    assert "all there, of the right shapes, and finite" in result.stdout
