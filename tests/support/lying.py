"""A `decod` whose relay lies: from some iteration on, its compute process sends false numbers.

    python -m tests.support.lying 20 flipped join JOINSTRING ...

The second word says how it lies: see `LIES`. It lies about its gradients: what it contributes to
averages, and what it sends to the stage before. Everything else about it is real, also its state:
it steps like the others.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

_FROM, _LIE = "DECOD_TEST_LIES_FROM", "DECOD_TEST_LIE"

Lie = Callable[[Any, Any], Any]
"""Returns a false tensor for a true one, and the one of the iteration before."""


def _noise(true: Any) -> Any:
    import torch

    return torch.randn_like(true) * true.std()


LIES: dict[str, Lie] = {
    "flipped": lambda true, _: -true,
    "scaled": lambda true, _: 10 * true,
    "random": lambda true, _: _noise(true),
    "stale": lambda true, before: before if before is not None else true,
    "zero": lambda true, _: 0 * true,
}


def _lie_from(iteration: int, lie: Lie) -> None:
    from decod.train.executor import StageExecutor
    from decod.train.passes import Passes

    gather, backward, before = StageExecutor.gather, Passes.backward, dict[object, Any]()

    def lies(executor: StageExecutor) -> bool:
        return executor._built.state.iteration + 1 >= iteration

    def false(key: object, true: Any) -> Any:
        told = lie(true, before.get(key))
        before[key] = true.clone()
        return told

    def lying_gather(executor: StageExecutor, *args: Any, **how: Any) -> Any:
        parts = gather(executor, *args, **how)
        return (
            [false(("part", k), part) for k, part in enumerate(parts)] if lies(executor) else parts
        )

    def lying_backward(passes: Passes, mb: Any, gradient: Any) -> Any:
        true = backward(passes, mb, gradient)
        lying = passes._state.iteration + 1 >= iteration
        return false(("pass", mb.index), true) if lying else true

    StageExecutor.gather = lying_gather  # type: ignore[method-assign]
    Passes.backward = lying_backward  # type: ignore[method-assign]


def _run_node() -> int:
    from decod.cli.main import main
    from decod.driver import compute

    os.environ[_FROM], os.environ[_LIE] = sys.argv.pop(1), sys.argv.pop(1)
    compute.ComputeProcess.start.__func__.__kwdefaults__["command"] = (  # type: ignore[attr-defined]
        sys.executable, "-m", "tests.support.lying",
    )  # fmt: skip
    return main()


def _run_worker() -> int:
    from decod.worker.__main__ import main

    _lie_from(int(os.environ[_FROM]), LIES[os.environ[_LIE]])
    return main()


if __name__ == "__main__":
    worker = "--socket-fd" in sys.argv
    code = _run_worker() if worker else _run_node()
    if worker:
        os._exit(code)
    sys.exit(code)
