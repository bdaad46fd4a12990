"""The first states of all stages, which the leader gives to the members of a run that goes on.

They are read from the checkpoint or the model folder that the run started from, chunk by chunk. The
leader's device does not take part.
"""

import asyncio
from functools import partial

from decod.daemon.run_facts import RunPart
from decod.errors import CheckpointError, DecodError
from decod.net.donor import StateBlob
from decod.tasks import in_thread
from decod.texts import clip
from decod.train.checkpoint.entries import moments_of, state_tensors, weight_tensors
from decod.train.checkpoint.initial_state import InitialState, from_checkpoint, from_folder
from decod.train.checkpoint.store import read_checkpoint

_REASON_MAX = 200


class InitialStates:
    """The first states of a run that starts from weights.

    Args:
        part: The leader's part in the run, with a checkpoint or the folder of a model.
    """

    def __init__(self, part: RunPart) -> None:
        run = part.run
        self.iteration = part.manifest.start_iteration
        self._part, self._num_stages = part, run.stages.num_relay_stages + 1
        self._states: dict[int, asyncio.Future[InitialState]] = {}

    async def find(self, stage_index: int) -> StateBlob | str:
        """Return the first state of a stage, or why there is none."""
        if not 0 <= stage_index < self._num_stages:
            return f"there is no stage {stage_index}"
        # Hashing it takes long. Members that ask meanwhile, and again, share one result.
        if stage_index not in self._states:
            self._states[stage_index] = in_thread(partial(self._read, stage_index))
        try:
            state = await asyncio.shield(self._states[stage_index])
        except DecodError as error:
            self._states.pop(stage_index, None)
            return clip(str(error), _REASON_MAX)

        async def read(offset: int, num_bytes: int) -> bytes:  # noqa: ARG001 - a chunk's own.
            return await in_thread(lambda: state.read(offset))

        return StateBlob(manifest=state.description.text, read=read, release=_nothing)

    def _read(self, stage_index: int) -> InitialState:
        part, run = self._part, self._part.run
        if part.checkpoint_dir is None:
            assert part.init_dir is not None
            weights = weight_tensors(run.model, run.stages, stage_index)
            return from_folder(part.init_dir, run.model, weights)
        checkpoint = read_checkpoint(part.checkpoint_dir)
        manifest = checkpoint.manifest
        if manifest is None or manifest.sha256 != part.manifest.initial_weights:
            raise CheckpointError(
                f"{checkpoint.folder} is not the checkpoint that this run started from",
                why=checkpoint.problem or "its manifest has another hash",
                fix="put it back, or start the run again with --resume",
                code="E-CKP-010",
            )
        tensors = state_tensors(run.model, run.stages, stage_index, moments_of(run))
        return from_checkpoint(checkpoint, tensors, part.checkpoint_chunks)


def _nothing() -> None:
    """Do nothing: the files are opened anew by each reader, and need no release."""
