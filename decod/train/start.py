"""A stage's first state: from the seed, a model folder, or a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.model.config import ModelConfig, require_same
from decod.model.folder import read_weights
from decod.model.header import read_config
from decod.model.initial import initial_weight
from decod.train.checkpoint.entries import MASTER_PREFIX, TensorEntry
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.store import find_tensors, read_checkpoint
from decod.train.layout import Layout, byte_view
from decod.train.reduction import require_finite
from decod.train.shared_state import SharedState
from decod.train.snapshot import filled_state


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that a run resumes from."""

    folder: Folder
    sha256: str
    """Hash of its manifest, on which the run's members agree."""


def initial_weights(
    model: ModelConfig, layout: Layout, *, seed: int, dtype: torch.dtype, folder: Path | None
) -> Tensor:
    """Return a stage's first weights, flat in the order of its layout, (P,) `dtype` on CPU.

    Args:
        model: The whole model.
        layout: The stage's parameters.
        seed: Seed of the weights. Not used with a folder.
        dtype: float32 or float64.
        folder: A model folder that holds at least this stage. None: build weights from the seed.

    Raises:
        DataError: The folder cannot be read or holds another model.
        NonFiniteError: Its weights are not finite.
    """
    weights_P = torch.empty(layout.num_elements, dtype=dtype)
    targets = dict(layout.views(weights_P))
    if folder is None:
        for name, target in targets.items():
            target.copy_(initial_weight(model, seed=seed, name=name, shape=layout.shapes[name]))
        return weights_P
    require_same(model, read_config(folder, dtype=model.dtype), folder / "config.json")
    for name, tensor in read_weights(folder, model, targets):
        targets[name].copy_(tensor)
    require_finite(weights_P, f"the model in {folder}")
    return weights_P


def checkpoint_state(
    source: CheckpointSource, layout: Layout, dtype: torch.dtype, moments: Sequence[str]
) -> tuple[SharedState, int]:
    """Return a stage's state from a checkpoint, on CPU, and its iteration.

    The tensors may come from several stages' files, because the run that wrote them may have cut
    the model differently.

    Args:
        source: The checkpoint.
        layout: The stage's parameters.
        dtype: The model's dtype.
        moments: Prefixes of the optimizer's moments.

    Raises:
        CheckpointError: It is not the agreed checkpoint, was altered, or lacks a tensor.
    """
    checkpoint = read_checkpoint(source.folder)
    manifest = checkpoint.manifest
    if manifest is None or manifest.sha256 != source.sha256:
        raise CheckpointError(
            f"{source.folder} is not the checkpoint that this run started from",
            why=checkpoint.problem or "its manifest has another hash",
            fix="put it back, or start the run again with --resume",
            code="E-CKP-010",
        )
    prefixes = ("", *moments, MASTER_PREFIX)
    names = {prefix + name for prefix in prefixes for name in layout.shapes}
    stored = {name: at for name, at in find_tensors(checkpoint).items() if name in names}
    entries = [tensor.entry for tensor in stored.values()]
    if not any(entry.name.startswith(tuple(moments)) for entry in entries):
        raise CheckpointError(
            f"{source.folder} holds no moments of the optimizer for this stage",
            why="with others in their place training would take another way",
            fix="use another checkpoint, or export the model and start from it with --init",
            code="E-CKP-010",
        )

    def read(target: Tensor, entry: TensorEntry) -> str | None:
        found = stored[entry.name].read_into(byte_view(target))
        return None if found == entry.sha256 else f"{entry.name} was altered"

    return filled_state(entries, read, layout, dtype, moments), manifest.iteration
