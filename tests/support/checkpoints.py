"""Small checkpoints for tests, made of random bytes that look like a state."""

import hashlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerName
from decod.train.checkpoint.description import Description
from decod.train.checkpoint.entries import (
    DTYPE_BYTES,
    StateBytes,
    TensorEntry,
    moment_prefixes,
    state_tensors,
)
from decod.train.checkpoint.iteration_folders import StageBlob
from decod.train.checkpoint.manifest import CheckpointManifest, Settings
from decod.train.checkpoint.store import CheckpointStore, run_folder

MOMENTS = moment_prefixes(OptimizerName.ADAMW)


MODEL = ModelConfig(vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2)
STAGES = StagesConfig(num_relay_stages=1)
RUN_ID = "r" * 26


def random_blob(
    stage_index: int, *, seed: int = 0, model: ModelConfig = MODEL, stages: StagesConfig = STAGES
) -> StageBlob:
    """Return a blob as a member of a stage could send it: tensors with gaps between them."""
    generator = random.Random(f"{seed} {stage_index}")
    run = RunConfig(model=model, stages=stages)
    data, entries = bytearray(), []
    for name, (dtype, shape) in state_tensors(run, stage_index).items():
        content = generator.randbytes(math.prod(shape) * DTYPE_BYTES[dtype])
        digest = hashlib.sha256(content).hexdigest()
        entries.append(TensorEntry(name, dtype, shape, len(data), len(content), digest))
        data += content + bytes(-len(content) % 64)
    return StageBlob(tuple(entries), memoryview(data))


def random_blobs(
    seed: int = 0, model: ModelConfig = MODEL, stages: StagesConfig = STAGES
) -> list[StageBlob]:
    indices = range(stages.num_relay_stages + 1)
    return [random_blob(index, seed=seed, model=model, stages=stages) for index in indices]


def make_manifest(iteration: int, **changes: Any) -> CheckpointManifest:
    """Return a manifest without stages, as a store takes it."""
    settings: Settings = {"name": "test", "seed": 7}
    values: dict[str, Any] = {
        "iteration": iteration,
        "run_id": RUN_ID,
        "created_s": 1_700_000_000 + iteration,
        "loss": 2.5,
        "num_deferred": 0,
        "settings": settings,
        "stages": (),
    }
    return CheckpointManifest(**values | changes)


def flip_a_byte(path: Path) -> None:
    """Alter a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_checkpoint(
    state_dir: Path, iteration: int, blobs: Sequence[StageBlob] | None = None, **changes: Any
) -> Path:
    """Write a checkpoint, of random tensors if none are given. Return its folder."""
    manifest = make_manifest(iteration, **changes)
    store = CheckpointStore(run_folder(state_dir, manifest.run_id))
    return store.write(manifest, blobs or random_blobs(seed=iteration))


def arrive(data: memoryview, description: Description, buffer: StateBytes) -> None:
    """Put a state into the memory or file that is meant for it, chunk by chunk."""
    for chunk in description.chunks:
        place = slice(chunk.offset, chunk.offset + chunk.num_bytes)
        buffer[place] = data[place]
