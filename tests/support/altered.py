"""A `decod leader` whose disk alters a byte of each checkpoint from an iteration on.

    python -m tests.support.altered 10 leader RUN.TOML ...

Everything else about it is real. The byte is one of the leader's own stage.
"""

import sys
from pathlib import Path
from typing import Any

from decod.cli.main import main
from decod.train.checkpoint.folders import stage_file
from decod.train.checkpoint.store import CheckpointStore


def alter(path: Path) -> None:
    """Change a byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def _alter_from(iteration: int) -> None:
    write = CheckpointStore.write

    def altering(store: CheckpointStore, manifest: Any, *blobs: Any, **how: Any) -> Path:
        folder = write(store, manifest, *blobs, **how)
        if manifest.iteration >= iteration:
            alter(folder / stage_file(0))
        return folder

    CheckpointStore.write = altering  # type: ignore[method-assign]


if __name__ == "__main__":
    _alter_from(int(sys.argv.pop(1)))
    sys.exit(main())
