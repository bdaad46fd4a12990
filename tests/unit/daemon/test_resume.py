"""Which checkpoint a run goes on from, and which it refuses."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.config.node_config import RESUME_LATEST
from decod.config.schema import Manifest
from decod.daemon.checkpointing import settings_of
from decod.daemon.resume import find_resumed, told_of
from decod.errors import CheckpointError, ConfigError
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerConfig
from decod.train.checkpoint.iteration_folders import StageBlob
from decod.train.checkpoint.manifest import CheckpointManifest
from decod.train.checkpoint.store import find_problems, find_tensors, read_checkpoint, run_folder
from tests.support.checkpoints import random_blobs, write_checkpoint
from tests.support.modes import modes_matter
from tests.unit.daemon.nodes import make_manifest


def write(state_dir: Path, iteration: int, num_relay_stages: int = 1, **changes: Any) -> Path:
    """Writes a checkpoint of the tiny run, cut into so many relay stages."""
    manifest = make_manifest()
    stages = StagesConfig(num_relay_stages=num_relay_stages)
    blobs = random_blobs(iteration, manifest.run.model, stages)
    return write_checkpoint(
        state_dir, iteration, **{"settings": settings_of(manifest), "blobs": blobs} | changes
    )


class Found:
    """A choice, and what was said about it."""

    def __init__(
        self, state_dir: Path, wanted: int = RESUME_LATEST, manifest: Manifest | None = None
    ) -> None:
        self.said: list[str] = []
        found = find_resumed(state_dir, manifest or make_manifest(), wanted, self.said.append)
        self.folder, self.manifest, self.chunks = found.folder, found.manifest, found.chunks

    @property
    def iteration(self) -> int:
        assert isinstance(self.manifest, CheckpointManifest)
        return self.manifest.iteration


def spoil(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_settings_are_those_of_the_manifest_without_what_changes_by_itself() -> None:
    settings = settings_of(make_manifest())
    assert settings["name"] == "tiny"
    assert settings["model.hidden_size"] == 16
    assert settings["data_index_sha256"] == "0" * 64
    assert not {"initial_weights", "start_iteration", "protocol_version"} & settings.keys()
    assert {type(value) for value in settings.values()} <= {str, int, float, bool}


def test_the_newest_is_used_or_the_one_that_is_named(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    assert Found(tmp_path).iteration == 30
    assert Found(tmp_path, 20).iteration == 20
    assert Found(tmp_path).said == []
    found = Found(tmp_path)
    assert found.chunks.keys() == find_tensors(read_checkpoint(found.folder)).keys()


def test_bad_ones_are_passed_over_and_named(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    spoil(tmp_path / "runs" / ("r" * 26) / "checkpoints" / "30")
    (tmp_path / "runs" / ("r" * 26) / "checkpoints" / "20" / "manifest.json").write_text("{")
    found = Found(tmp_path)
    assert found.iteration == 10
    assert {text.split()[1].rpartition("/")[2] for text in found.said} == {"20", "30"}
    assert all("is bad, the one before is used" in text for text in found.said)


def test_a_bad_one_that_is_named_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 10)
    spoil(write(tmp_path, 20))
    with pytest.raises(CheckpointError, match=r"E-CKP-010 .*/20 is bad: stage-1.* was altered"):
        Found(tmp_path, 20)


@pytest.mark.parametrize("wanted", [RESUME_LATEST, 20])
def test_where_there_is_none_it_is_said_where_was_looked(tmp_path: Path, wanted: int) -> None:
    spoil(write(tmp_path, 10))
    with pytest.raises(CheckpointError, match=rf"E-CKP-011 .* run tiny in {tmp_path}/runs"):
        Found(tmp_path, wanted)


def test_if_all_are_bad_the_newest_is_named(tmp_path: Path) -> None:
    spoil(write(tmp_path, 10))
    spoil(write(tmp_path, 20))
    with pytest.raises(CheckpointError, match=r"E-CKP-011 .*/20 is bad: stage-1.* was altered"):
        Found(tmp_path)


def without_a_tensor(blobs: list[StageBlob]) -> None:
    blobs[1] = replace(blobs[1], entries=blobs[1].entries[1:])


def with_one_twice(blobs: list[StageBlob]) -> None:
    blobs.append(replace(blobs[1], entries=blobs[1].entries[:1]))


def with_another_shape(blobs: list[StageBlob]) -> None:
    first, *others = blobs[1].entries
    blobs[1] = replace(blobs[1], entries=(replace(first, shape=(1, *first.shape)), *others))


@pytest.mark.parametrize("spoil", [without_a_tensor, with_one_twice, with_another_shape])
def test_one_that_is_whole_and_of_other_tensors_is_bad(
    tmp_path: Path, spoil: Callable[[list[StageBlob]], None]
) -> None:
    """Whoever joined would be refused its state, again and again."""
    write(tmp_path, 10)
    blobs = random_blobs(20, make_manifest().run.model)
    spoil(blobs)
    folder = write(tmp_path, 20, blobs=blobs)
    assert find_problems(read_checkpoint(folder)) == []
    found = Found(tmp_path)
    assert found.iteration == 10
    assert "is bad, the one before is used: state refused: " in found.said[0]
    with pytest.raises(CheckpointError, match=r"E-CKP-010 .*/20 is bad: state refused"):
        Found(tmp_path, 20)


def test_a_setting_that_came_with_a_later_release_was_at_its_default(tmp_path: Path) -> None:
    """A checkpoint outlives the release that wrote it."""
    settings = settings_of(make_manifest())
    later = ("model.rope_type", "model.rope_factor", "base")
    for key in [key for key in settings if key in later or key.startswith("adapter.")]:
        del settings[key]
    write(tmp_path, 20, settings=settings)
    found = Found(tmp_path)
    assert found.iteration == 20
    assert found.said == []


def test_the_number_of_stages_may_change(tmp_path: Path) -> None:
    write(tmp_path, 20, num_relay_stages=2)
    assert Found(tmp_path).iteration == 20


@pytest.mark.parametrize("wanted", [RESUME_LATEST, 20])
def test_where_all_are_of_another_name_the_names_are_said(tmp_path: Path, wanted: int) -> None:
    for iteration, name in ((10, "a"), (20, "b"), (30, "a")):
        write(tmp_path, iteration, settings=settings_of(make_manifest()) | {"name": name})
    with pytest.raises(CheckpointError, match=r"E-CKP-011 .* of another name: a, b\. .*\"a\""):
        Found(tmp_path, wanted)
    write(tmp_path, 40)
    with pytest.raises(CheckpointError, match=r"E-CKP-011 .* nothing to go on from"):
        Found(tmp_path, 10)


@pytest.mark.parametrize("closed", ["runs", "checkpoints"])
def test_a_folder_that_can_not_be_looked_into_may_hold_the_latest(
    tmp_path: Path, closed: str
) -> None:
    write(tmp_path, 10, run_id="s" * 26)
    checkpoints = write(tmp_path, 20).parent
    folder = checkpoints if closed == "checkpoints" else tmp_path / "runs"
    folder.chmod(0)
    with modes_matter():
        for wanted in (RESUME_LATEST, 20):
            with pytest.raises(CheckpointError, match=f"E-CKP-017 .* {folder}: Permission denied"):
                Found(tmp_path, wanted)
        if closed == "checkpoints":
            assert Found(tmp_path, 10).iteration == 10
    folder.chmod(0o700)
    assert Found(tmp_path).iteration == 20


def test_other_runs_of_the_same_folder_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 10)
    other = settings_of(make_manifest()) | {"name": "other", "seed": 5}
    write(tmp_path, 20, settings=other, run_id="s" * 26)
    assert Found(tmp_path).iteration == 10


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seed", 5, "seed is 0 in the run file and was 5 in the checkpoint"),
        ("model.hidden_size", 32, "model.hidden_size is 16 .* was 32"),
        ("batch.num_microbatches", 9, "batch.num_microbatches is 2 .* was 9"),
        ("data_index_sha256", "f" * 64, "data_index_sha256 is 0+ .* was f+"),
    ],
)
@pytest.mark.parametrize("wanted", [RESUME_LATEST, 20])
def test_another_training_job_is_refused_by_its_first_difference(
    tmp_path: Path, key: str, value: Any, text: str, wanted: int
) -> None:
    write(tmp_path, 20, settings=settings_of(make_manifest()) | {key: value})
    with pytest.raises(CheckpointError, match=f"E-CKP-013 {text}"):
        Found(tmp_path, wanted)


def test_what_may_change_is_said(tmp_path: Path) -> None:
    write(tmp_path, 20, num_deferred=3)
    found = Found(tmp_path, manifest=make_manifest(optimizer=OptimizerConfig(lr=0.5)))
    changed, deferred = found.said
    assert changed.endswith("optimizer.lr is 0.5 in the run file and was 0.001 in the checkpoint")
    assert deferred.startswith("3 microbatches had been put off")


def test_a_run_without_iterations_left_is_not_begun(tmp_path: Path) -> None:
    write(tmp_path, 20)
    with pytest.raises(ConfigError, match="E-CFG-054 num_iterations is 20"):
        Found(tmp_path, manifest=make_manifest(num_iterations=20))
    assert Found(tmp_path, manifest=make_manifest(num_iterations=21)).iteration == 20


def test_the_resumed_runs_manifest_names_its_start() -> None:
    start = {"initial_weights": "a" * 64, "start_iteration": 20}
    manifest = dataclasses.replace(make_manifest(), **start)  # type: ignore[arg-type]
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.first_difference(make_manifest()) == (
        f"initial_weights is {'a' * 64} here and seed there"
    )
    for bad in (-1, 1 << 41):
        with pytest.raises(ConfigError, match="start_iteration"):
            dataclasses.replace(manifest, start_iteration=bad)
    with pytest.raises(ConfigError, match="start_iteration is 20"):
        dataclasses.replace(manifest, initial_weights="seed")


def test_a_checkpoint_that_another_host_wrote_comes_with_a_warning(tmp_path: Path) -> None:
    """It was copied here, or lies in a store: this host can't ask whether that run goes on."""
    write(tmp_path, 4)
    said: list[str] = []
    found = find_resumed(tmp_path, make_manifest(), RESUME_LATEST, said.append)
    now_s = found.manifest.created_s + 180.0
    first, warning = told_of(found, tmp_path, now_s)
    assert first.startswith("resuming after iteration 4, loss ")
    assert f"another host led run {found.manifest.run_id}" in warning
    assert "3 m ago" in warning
    run_folder(tmp_path, found.manifest.run_id).with_name("iterations.csv").touch()
    assert told_of(found, tmp_path, now_s) == [first]
