"""A `decod leader` that dies while it writes a checkpoint, so that only some files are there.

    python -m tests.support.doomed_writer ITERATION leader run.toml ...

Everything else about it is real.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from decod.cli.main import main
from decod.train.checkpoint.manifest import CheckpointManifest
from decod.train.checkpoint.store import CheckpointStore, StageBlob

_NUM_PIECES = 2
"""Number of pieces written before it dies."""


def doom(iteration: int) -> None:
    """Make the process kill itself in the first checkpoint from an iteration on."""
    write = CheckpointStore.write

    def written(
        store: CheckpointStore,
        manifest: CheckpointManifest,
        blobs: Sequence[StageBlob],
        **how: object,
    ) -> Path:
        asked: list[bool] = []

        def abandoned() -> bool:
            asked.append(True)
            if len(asked) > _NUM_PIECES and manifest.iteration >= iteration:
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        return write(store, manifest, blobs, abandoned=abandoned)

    CheckpointStore.write = written  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    doom(int(sys.argv[1]))
    del sys.argv[1]
    sys.exit(main())
