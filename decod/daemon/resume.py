"""`decod leader --resume`: finds the checkpoint from which a run goes on.

A checkpoint fits a run file if model, data, batch and seed are the same. Then its tensors are this
model's, and the next iteration reads the tokens that would have come next. The stages, the
optimizer and the timeouts may change. Changes of stages and optimizer are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decod.config.node_config import RESUME_LATEST
from decod.config.schema import Manifest
from decod.daemon.checkpointing import differences, settings_in, settings_of
from decod.daemon.host import Say
from decod.errors import CheckpointError, ConfigError
from decod.journal.iteration_file import FILE_NAME
from decod.texts import span
from decod.train.checkpoint.entries import check_tensors, state_tensors
from decod.train.checkpoint.initial_state import ChunkHashes
from decod.train.checkpoint.manifest import CheckpointManifest, Settings
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.shared import SharedStore, find_stored
from decod.train.checkpoint.store import (
    Checkpoint,
    find_checkpoints,
    find_problems,
    require_readable,
    run_folder,
)

_MUST_MATCH = (
    "model.",
    "adapter.kind",
    "adapter.rank",
    "adapter.alpha",
    "adapter.targets",
    "base",
    "batch.",
    "seed",
    "data_index_sha256",
    "data_vocab_size",
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint from which a run goes on."""

    folder: Folder
    manifest: CheckpointManifest
    chunks: ChunkHashes
    """The hashes of the chunks of its tensors, by name, as they were when it was checked."""


def find_resumed(
    state_dir: Path,
    manifest: Manifest,
    wanted: int,
    say: Say,
    store: SharedStore | None = None,
) -> Resumed:
    """Return the checkpoint to go on from. All hashes are checked.

    Args:
        state_dir: The leader's state folder.
        manifest: The manifest of the run file, for a new run.
        wanted: An iteration, or `RESUME_LATEST`.
        say: Takes lines about bad checkpoints and changed settings.
        store: The store that members share, if checkpoints may be there.

    Raises:
        CheckpointError: There is no checkpoint (E-CKP-011), the wanted one is bad (E-CKP-010), the
            newest is of another training job (E-CKP-013), or a folder or store that may hold it
            can't be read (E-CKP-017, E-CKP-020).
        ConfigError: The run has no iterations left (E-CFG-054).
    """
    settings, bad = settings_of(manifest), list[str]()
    everything = find_all(state_dir, store)
    if wanted == RESUME_LATEST:
        require_readable(state_dir)
    found = [each for each in everything if _is_of(each, settings["name"])]
    if wanted != RESUME_LATEST:
        found = [each for each in found if each.iteration == wanted]
    for checkpoint in found:
        if checkpoint.manifest is not None:
            _require_same_job(checkpoint, checkpoint.manifest, settings)
        chunks = dict[str, Sequence[str]]()
        problems = find_problems(checkpoint, chunks) or _foreign_tensors(checkpoint, manifest)
        if not problems and checkpoint.manifest is not None:
            _require_iterations_left(manifest, checkpoint.iteration)
            _say_changes(checkpoint.manifest, settings, say)
            return Resumed(checkpoint.folder, checkpoint.manifest, chunks)
        if wanted != RESUME_LATEST:
            raise CheckpointError(
                f"{checkpoint.folder} is bad: {'; '.join(problems)[:500]}",
                why="going on from it would train another model",
                fix="give another iteration, see `decod checkpoint list`, or --resume latest",
                code="E-CKP-010",
            )
        bad.append(f"{checkpoint.folder} is bad: {problems[0]}")
        say(f"checkpoint {checkpoint.folder} is bad, the one before is used: {problems[0]}")
    require_readable(state_dir)
    places = f"{state_dir / 'runs'}" + ("" if store is None else f" and {store}")
    raise _none_found(places, settings, wanted, bad, _others(everything, settings))


def told_of(resumed: Resumed, state_dir: Path, now_s: float) -> list[str]:
    """Return lines on the checkpoint from which a run goes on.

    Args:
        resumed: The checkpoint.
        state_dir: The leader's state folder.
        now_s: The time of day.
    """
    kept, folder = resumed.manifest, resumed.folder
    lines = [f"resuming after iteration {kept.iteration}, loss {kept.loss:.4f}: {folder}"]
    if not run_folder(state_dir, kept.run_id).with_name(FILE_NAME).exists():
        # A copy, or in a store: this host knows no member of that run to ask.
        ago = span(max(0.0, now_s - kept.created_s))
        lines.append(
            f"warning: another host led run {kept.run_id} when that was written, {ago} ago: make"
            " sure that it has ended, since this is a second run"
        )
    return lines


def has_checkpoint(state_dir: Path, name: str, store: SharedStore | None = None) -> bool:
    """Whether there is a checkpoint, whole or not, that may be of a run of this name.

    Raises:
        CheckpointError: The store can't be listed (E-CKP-020).
    """
    return any(_is_of(each, name) for each in find_all(state_dir, store))


def find_all(state_dir: Path, store: SharedStore | None) -> list[Checkpoint]:
    """Return the checkpoints on this host and in the store, the newest first."""
    stored = [] if store is None else find_stored(store)
    found = find_checkpoints(state_dir) + stored
    return sorted(found, key=lambda checkpoint: checkpoint.age_key, reverse=True)


def _is_of(checkpoint: Checkpoint, name: object) -> bool:
    """Whether a checkpoint may be of a run of this name. Without a manifest it may."""
    manifest = checkpoint.manifest
    return manifest is None or manifest.settings.get("name") == name


def _require_same_job(
    checkpoint: Checkpoint, manifest: CheckpointManifest, settings: Settings
) -> None:
    then, now = (
        {key: value for key, value in each.items() if key.startswith(_MUST_MATCH)}
        for each in (settings_in(manifest), settings)
    )
    if found := differences(then, now):
        raise CheckpointError(
            f"{found[0]} {checkpoint.folder}",
            why="model, adapter, data, batch and seed must be the same to go on from there",
            fix="use the run file that the checkpoint was made with, give another ITERATION of "
            "`decod checkpoint list`, or leave --resume out to begin anew",
            code="E-CKP-013",
        )


def _foreign_tensors(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    """Return how the tensors of a whole checkpoint differ from the run's model.

    All stages together hold the same tensors, however the model was cut.
    """
    run, expected = manifest.run, dict[str, tuple[str, tuple[int, ...]]]()
    for stage in range(run.stages.num_relay_stages + 1):
        expected |= state_tensors(run, stage)
    assert checkpoint.manifest is not None
    entries = [entry for stage in checkpoint.manifest.stages for entry in stage]
    try:
        check_tensors(entries, expected)
    except CheckpointError as error:
        return [error.what]
    return []


def _require_iterations_left(manifest: Manifest, iteration: int) -> None:
    total = manifest.run.num_iterations
    if 0 < total <= iteration:
        raise ConfigError(
            f"num_iterations is {total}, and the checkpoint is of iteration {iteration}",
            why="the run has nothing left to do",
            fix="raise num_iterations in the run file, or set it to 0 to go on until stopped",
            code="E-CFG-054",
        )


def _say_changes(checkpoint: CheckpointManifest, settings: Settings, say: Say) -> None:
    for text in differences(settings_in(checkpoint), settings):
        if not text.startswith("protocol."):
            say(f"changed since the checkpoint: {text}")
    if checkpoint.num_deferred:
        say(
            f"{checkpoint.num_deferred} microbatches had been put off when the checkpoint was "
            "written; they are left out"
        )


def _others(checkpoints: Sequence[Checkpoint], settings: Settings) -> list[str]:
    """Return the names of the runs with checkpoints here, the newest first.

    Empty if one of them has the name of this run.
    """
    manifests = [each.manifest for each in checkpoints if each.manifest is not None]
    names = [str(manifest.settings.get("name")) for manifest in manifests]
    return [] if settings["name"] in names else list(dict.fromkeys(names))


def _none_found(
    places: str, settings: Settings, wanted: int, bad: Sequence[str], others: Sequence[str]
) -> CheckpointError:
    which = "whole checkpoint" if wanted == RESUME_LATEST else f"checkpoint of iteration {wanted}"
    why = "there is nothing to go on from"
    fix = "give the --state-dir of the leader that wrote it, or leave --resume out to begin anew"
    if bad:
        why, fix = bad[0], f"mend or replace it, {fix}"
    elif others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        why = f"the checkpoints there are of runs of another name: {listed}"
        fix = f'set `name = "{others[0]}"` in the run file to go on from those, {fix}'
    return CheckpointError(
        f"no {which} of run {settings['name']} in {places}",
        why=why,
        fix=f"see `decod checkpoint list`, {fix}",
        code="E-CKP-011",
    )
