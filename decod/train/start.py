"""A stage's first state: from the seed, a model folder, or a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.model.hf import require_same
from decod.model.hf_folder import fill_weights
from decod.model.stage import initial_pieces
from decod.model.weights import read_config
from decod.run.model_config import ModelConfig
from decod.train.checkpoint.entries import MASTER_PREFIX
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.store import find_tensors, read_checkpoint
from decod.train.reduction import require_finite
from decod.train.shared_state import SharedState
from decod.train.state_loading import StateForm, loaded_state


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that a run resumes from."""

    folder: Folder
    sha256: str
    """Hash of its manifest, on which the run's members agree."""


def initial_weights(
    model: ModelConfig, form: StateForm, *, seed: int, folder: Path | None
) -> Tensor:
    """Return a stage's first weights, flat in the order of its layout, (P,) wide.

    Args:
        model: The whole model.
        form: What is to come of them.
        seed: Seed of the weights. Not used with a folder.
        folder: A model folder that holds at least this stage. None: build weights from the seed.

    Raises:
        DataError: The folder cannot be read or holds another model.
        NonFiniteError: Its weights are not finite.
    """
    layout = form.layout
    weights_P = torch.empty(layout.num_elements, dtype=form.wide, device=form.device)
    targets = {name: weights_P[here] for name, here in layout.slices.items()}
    if folder is None:
        for name, target_N in targets.items():
            start = 0
            pieces = initial_pieces(model, seed=seed, name=name, shape=layout.shapes[name])
            for values_N in pieces:
                target_N[start : start + len(values_N)].copy_(values_N)
                start += len(values_N)
        return weights_P
    require_same(model, read_config(folder, dtype=model.dtype), folder / "config.json")
    fill_weights(folder, model, targets)
    require_finite(weights_P, f"the model in {folder}")
    return weights_P


def checkpoint_state(source: CheckpointSource, form: StateForm) -> tuple[SharedState, int]:
    """Return a stage's state from a checkpoint, and its iteration.

    The tensors may come from several stages' files, because the run that wrote them may have cut
    the model differently.

    Args:
        source: The checkpoint.
        form: What is to come of it.

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
    moments = tuple(form.prefixes)
    prefixes = ("", *moments, MASTER_PREFIX)
    names = {prefix + name for prefix in prefixes for name in form.layout.shapes}
    stored = {name: at for name, at in find_tensors(checkpoint).items() if name in names}
    entries = [tensor.entry for tensor in stored.values()]
    if not any(entry.name.startswith(moments) for entry in entries):
        raise CheckpointError(
            f"{source.folder} holds no moments of the optimizer for this stage",
            why="with others in their place training would take another way",
            fix="use another checkpoint, or export the model and start from it with --init",
            code="E-CKP-010",
        )
    state = loaded_state(entries, lambda entry: stored[entry.name].pieces(), form)
    return state, manifest.iteration
