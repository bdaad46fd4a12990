"""A `decod` whose device has no memory for some passes.

    python -m tests.support.starved forward 5 2 join JOINSTRING ...

From iteration 5 on, its first two `forward` or `backward` passes end as if the device were full.
Everything else about it is real.
"""

from collections.abc import Callable
from typing import Any

from tests.support import faulty_compute


def _starve(kind: str, iteration: str, times: str) -> None:
    """Have the device refuse memory in some passes of that kind."""
    import torch

    from decod.train.passes import Passes

    starved = list[object]()
    run: Callable[..., Any] = getattr(Passes, kind)

    def short(passes: Passes, mb: Any, *tensors: Any) -> Any:
        if mb.iteration >= int(iteration) and len(starved) < int(times):
            starved.append(mb)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return run(passes, mb, *tensors)

    setattr(Passes, kind, short)


if __name__ == "__main__":
    faulty_compute.run("tests.support.starved", 3, _starve)
