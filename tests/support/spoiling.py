"""A `decod` whose compute process sends one tensor that no receiver can compute with.

    python -m tests.support.spoiling activation 5 join JOINSTRING ...

In the given iteration it replaces the first scale of an `activation` or a `gradient` by NaN, once.
Everything else about it is real. The run's activations are compressed to `int8`.
"""

import math
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_WHAT = "DECOD_TEST_SPOIL"


def _spoil(what: str) -> None:
    """Spoil the first tensor whose name begins so."""
    import torch

    from decod.train.activations import ActivationCodec

    send, spoiled = ActivationCodec.sent, list[str]()

    def spoiling(codec: ActivationCodec, value_BTD: "Tensor", name: str) -> "Tensor":
        sent = send(codec, value_BTD, name)
        if name.startswith(what) and not spoiled:
            spoiled.append(name)
            sent[:4].view(torch.float32)[0] = math.nan
        return sent

    ActivationCodec.sent = spoiling  # type: ignore[method-assign]


def _run_node() -> int:
    from decod.cli.main import main
    from decod.driver import compute

    kind, iteration = sys.argv.pop(1), int(sys.argv.pop(1))
    os.environ[_WHAT] = f"{kind} of microbatch {iteration}/"
    compute.ComputeProcess.start.__func__.__kwdefaults__["command"] = (  # type: ignore[attr-defined]
        sys.executable, "-m", "tests.support.spoiling",
    )  # fmt: skip
    return main()


def _run_worker() -> int:
    from decod.worker.__main__ import main

    _spoil(os.environ[_WHAT])
    return main()


if __name__ == "__main__":
    worker = "--socket-fd" in sys.argv
    code = _run_worker() if worker else _run_node()
    if worker:
        os._exit(code)
    sys.exit(code)
