"""Exports of the model of a running run, in the format of Hugging Face.

Each stage's weights go to their place in `model.safetensors` as they arrive. The leader's memory
holds the weights of its own stage, and a few chunks of the others. No torch is involved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decod.daemon.run_snapshot import SnapshotSources, StageSnapshot, require_begun, run_snapshot
from decod.model.weights import DTYPE_NAMES, is_finite
from decod.model.writing import ModelWriter, unwritable
from decod.run.run_config import RunConfig
from decod.tasks import in_thread, to_its_end
from decod.texts import why_of
from decod.train.checkpoint.description import CHUNK_SIZE_BYTES, Description
from decod.train.checkpoint.entries import (
    TensorEntry,
    check_tensors,
    refused_state,
    weight_tensors,
)
from decod.train.checkpoint.iteration_folders import StateInFile, slices


async def export_model(sources: SnapshotSources, run: RunConfig, folder: Path) -> int:
    """Write `config.json` and `model.safetensors` of the last commit; return its iteration.

    Args:
        sources: The leader's sources of states.
        run: The run.
        folder: The folder to write to. It is created if missing.

    Raises:
        NetworkError: A stage has no member, or no member of it answers.
        CheckpointError: The weights of the leader's own stage are not finite.
        DataError: The folder can't be written (E-DAT-014).
    """
    require_begun(sources)
    writer = await in_thread(lambda: ModelWriter(folder, run.model))
    destination = _ModelFile(writer, run)
    try:
        async with run_snapshot(sources, destination, with_optimizer=False) as states:
            own = states.stages[0]
            with _refusals_told(folder):
                await to_its_end(lambda: destination.copy(0, own))
        await to_its_end(writer.finish)
    finally:
        await to_its_end(writer.close)
    return states.iteration


class _ModelFile:
    """Leads the weights of all stages to their places in one file. See `Destination`."""

    def __init__(self, writer: ModelWriter, run: RunConfig) -> None:
        self._writer, self._run = writer, run

    def place(self, stage_index: int, description: Description) -> StateInFile:
        run, entries = self._run, description.entries
        check_tensors(entries, weight_tensors(run.model, run.stages, stage_index))
        starts = [self._writer.starts[entry.name] for entry in entries]
        return StateInFile(self._writer.file, entries, starts, _require_finite)

    def copy(self, stage_index: int, stage: StageSnapshot) -> None:
        """Write the weights of a stage from memory."""
        target = self.place(stage_index, stage.description)
        assert stage.data is not None, "no member writes an export's parts"
        for entry in stage.description.entries:
            for place in slices(entry, CHUNK_SIZE_BYTES):
                target[place] = stage.data[place]


def _require_finite(entry: TensorEntry, piece: memoryview) -> None:
    if not is_finite(piece, DTYPE_NAMES[entry.dtype]):
        raise refused_state([f"{entry.name[:100]} is not finite"])


@contextmanager
def _refusals_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(folder, why_of(error)) from error
