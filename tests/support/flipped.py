"""A `decod` in whose compute process one bit of the parameters flips after a given iteration.

    python -m tests.support.flipped 5 join JOINSTRING ...

Everything else about it is real. The bit is a low one of some weight: small enough to keep the
model finite, large enough to change every hash.
"""

import os
import sys
from typing import Any

_ITERATION = "DECOD_TEST_FLIP_AFTER"


def _flip_after(iteration: int) -> None:
    """Change the committed weights once, without any notice."""
    import torch

    from decod.train.executor import StageExecutor

    commit, flipped = StageExecutor.commit, list[int]()

    def flipping(executor: StageExecutor, committed: int) -> None:
        commit(executor, committed)
        if committed == iteration and not flipped:
            flipped.append(committed)
            weights: Any = executor._built.state.committed.weights
            bits = weights.view(torch.int64 if weights.element_size() == 8 else torch.int32)
            bits[len(bits) // 2] ^= 1 << 10

    StageExecutor.commit = flipping  # type: ignore[method-assign]


def _run_node() -> int:
    from decod.cli.main import main
    from decod.driver import compute

    os.environ[_ITERATION] = sys.argv.pop(1)
    compute.ComputeProcess.start.__func__.__kwdefaults__["command"] = (  # type: ignore[attr-defined]
        sys.executable, "-m", "tests.support.flipped",
    )  # fmt: skip
    return main()


def _run_worker() -> int:
    from decod.worker.__main__ import main

    _flip_after(int(os.environ[_ITERATION]))
    return main()


if __name__ == "__main__":
    worker = "--socket-fd" in sys.argv
    code = _run_worker() if worker else _run_node()
    if worker:
        os._exit(code)
    sys.exit(code)
