"""A `decod` that is killed in the middle of a backward pass, with its compute process.

    python -m tests.support.dying 3 join JOINSTRING ...

It happens in the given iteration, or a later one. The pass has added its gradients to the sum, and
nobody has heard of it.
"""

import os
import signal
import sys
from typing import TYPE_CHECKING

from tests.support import faulty_compute

if TYPE_CHECKING:
    from torch import Tensor

    from decod.ids import MicrobatchId


def program(iteration: int) -> tuple[str, ...]:
    """Return the program of a node that dies in that iteration."""
    return (sys.executable, "-u", "-m", "tests.support.dying", str(iteration))


def _die(iteration: str) -> None:
    from decod.train.passes import Passes

    backward = Passes.backward

    def dying(passes: Passes, mb: "MicrobatchId", gradient: "Tensor") -> "Tensor":
        found = backward(passes, mb, gradient)
        if mb.iteration >= int(iteration):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Passes.backward = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    faulty_compute.run("tests.support.dying", 1, _die)
