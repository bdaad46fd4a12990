"""Files that are not what they should be, and folders that fail: they are named, not waited for."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from decod.model.shape import model_shapes
from tests.support.cluster import (
    Cluster,
    Daemon,
    assert_refused,
    child_environment,
    run_decod,
)
from tests.support.disk import read_only
from tests.support.model_folders import write_folder
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ITERATIONS = 16


@contextmanager
def replaced_by_a_file(folder: Path) -> Iterator[None]:
    folder.rename(folder.with_name("before"))
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        folder.with_name("before").rename(folder)


@pytest.mark.parametrize("fails", [read_only, replaced_by_a_file])
def test_a_state_folder_that_fails_spoils_no_good_run(
    tmp_path: Path, corpus: Path, fails: Callable[[Path], "Iterator[None]"]
) -> None:
    """A volunteer's part is done. Only the leader has something to keep, and says that it can't."""
    run = make_run(num_iterations=ITERATIONS, min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "model")
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(3)

        def end(daemons: list[Daemon]) -> dict[str, int]:
            if not daemons:
                return cluster.wait_for_end()
            with fails(daemons[0].state_dir):  # type: ignore[attr-defined]
                return end(daemons[1:])

        assert end([leader, *relays]) == {"leader": 0, "relay-1-0": 0, "relay-2-0": 0}
        assert leader.iteration == ITERATIONS
        assert (tmp_path / "model" / "model.safetensors").exists()
        for daemon in cluster.daemons:
            assert "E-INT" not in daemon.stderr
            assert "error:" not in daemon.stderr
        assert f"the checkpoint of iteration {ITERATIONS} is not kept" in leader.stdout


def test_the_report_of_a_command_is_kept_apart_from_the_nodes_files(
    tmp_path: Path, corpus: Path
) -> None:
    """The command has a bug, which the running node has no part in."""
    with Cluster(tmp_path, make_run(), corpus) as cluster:
        leader = cluster.start_leader()
        code = """if True:
            import sys
            import decod.daemon.control
            def ask(*_, **__):
                raise ZeroDivisionError("oh")
            decod.daemon.control.ask = ask
            from decod.cli.main import main
            sys.exit(main())
        """
        result = subprocess.run(
            [sys.executable, "-c", code, "status", "--state-dir", str(leader.state_dir)],
            env={**child_environment(), "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert_refused(result, exit_code=1, holds=["E-INT-001 ZeroDivisionError: oh"])
        assert not [*leader.state_dir.glob("crash-*")]
        (report,) = (tmp_path / "cache" / "decod").glob("crash-*.txt")
        assert str(report) in result.stderr


# --- pipes ----------------------------------------------------------------------------------------


def make_pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        (["run", "check", "PIPE"], 3),
        (["leader", "PIPE", "--state-dir", "state"], 3),
        (["data", "show", "--run", "PIPE", "--iteration", "1"], 3),
        (["plan", "route", "PIPE"], 3),
        (["plan", "join", "PIPE", "--candidates", "PIPE"], 3),
        (["plan", "servers", "PIPE"], 3),
        (["simulate", "PIPE"], 3),
        (["data", "prepare", "out", "PIPE"], 9),
        (["data", "prepare", "out", "text.txt", "--tokenizer", "PIPE"], 9),
        (["run", "init", "--force", "PIPE"], 3),
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused(
    tmp_path: Path, command: list[str], exit_code: int
) -> None:
    """Nobody writes to it, so whoever opened it would wait for ever."""
    pipe = make_pipe(tmp_path / "pipe")
    (tmp_path / "text.txt").write_text("text")
    names = {"PIPE": pipe, "text.txt": tmp_path / "text.txt", "out": tmp_path / "out"}
    names |= {"state": tmp_path / "state"}
    result = run_decod(*(names.get(word, word) for word in command), timeout_s=20.0)
    assert_refused(result, exit_code=exit_code, holds=[str(pipe)])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "other.safetensors"])
def test_a_pipe_in_a_model_folder_is_refused(tmp_path: Path, corpus: Path, name: str) -> None:
    run = make_run()
    weights = {key: torch.randn(shape) for key, shape in model_shapes(run.model).items()}
    write_folder(tmp_path / "init", run.model, weights)
    make_pipe(tmp_path / "init" / name)
    run_file = Cluster(tmp_path / "other", run, corpus).run_file
    result = run_decod("run", "check", run_file, "--init", tmp_path / "init", timeout_s=20.0)
    assert_refused(result, exit_code=9, holds=[str(tmp_path / "init")])


@pytest.mark.parametrize("name", ["index.json", "shard-00001.bin"])
def test_a_pipe_in_a_corpus_is_refused(tmp_path: Path, corpus: Path, name: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for path in corpus.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    make_pipe(own / name)
    run_file = Cluster(tmp_path / "other", make_run(), own).run_file
    result = run_decod("run", "check", run_file, timeout_s=20.0)
    assert_refused(result, exit_code=9, holds=[str(own)])


@pytest.mark.parametrize(
    ("name", "exit_code"), [("lock", 3), ("identity.key", 3), ("node.log", 6), ("compute.log", 6)]
)
def test_a_pipe_in_the_state_folder_is_refused(
    tmp_path: Path, corpus: Path, name: str, exit_code: int
) -> None:
    run_file = Cluster(tmp_path / "other", make_run(), corpus).run_file
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    make_pipe(state_dir / name)
    place = ["--listen", "127.0.0.1:0", "--state-dir", state_dir]
    result = run_decod("leader", run_file, *place, timeout_s=30.0)
    assert_refused(result, exit_code=exit_code)
