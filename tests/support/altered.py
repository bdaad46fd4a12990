"""A `decod` whose disk alters a byte of each checkpoint and kept state, from an iteration on.

    python -m tests.support.altered 10 leader RUN.TOML ...

Everything else about it is real. In a checkpoint, the byte belongs to the leader's own stage.
"""

import sys
from pathlib import Path
from typing import Any

from decod.cli.main import main
from decod.train.checkpoint.iteration_folders import stage_file
from decod.train.checkpoint.stage_states import KeptState, StateStore
from decod.train.checkpoint.store import CheckpointStore
from tests.support.checkpoints import flip_a_byte


def _alter_from(iteration: int) -> None:
    write, keep = CheckpointStore.write, StateStore.write

    def altering(store: CheckpointStore, manifest: Any, *blobs: Any, **how: Any) -> Path:
        folder = write(store, manifest, *blobs, **how)
        if manifest.iteration >= iteration:
            flip_a_byte(folder / stage_file(0))
        return folder

    def keeping(store: StateStore, stage_index: int, of: int, *what: Any, **how: Any) -> KeptState:
        state = keep(store, stage_index, of, *what, **how)
        if of >= iteration:
            flip_a_byte(state.path)
        return state

    CheckpointStore.write = altering  # type: ignore[method-assign]
    StateStore.write = keeping  # type: ignore[method-assign]


if __name__ == "__main__":
    _alter_from(int(sys.argv.pop(1)))
    sys.exit(main())
