"""A `decod` in whose compute process one bit of the parameters flips after a given iteration.

    python -m tests.support.flipped 5 join JOINSTRING ...

Everything else about it is real. The bit is a low one of some weight: small enough to keep the
model finite, large enough to change every hash.
"""

from typing import Any

from tests.support import faulty_compute


def _flip_after(iteration: str) -> None:
    """Change the committed weights once, without any notice."""
    import torch

    from decod.train.executor import StageExecutor

    commit, flipped = StageExecutor.commit, list[int]()

    def flipping(executor: StageExecutor, committed: int) -> None:
        commit(executor, committed)
        if committed == int(iteration) and not flipped:
            flipped.append(committed)
            weights: Any = executor._built.state.committed.weights
            bits = weights.view(torch.int64 if weights.element_size() == 8 else torch.int32)
            bits[len(bits) // 2] ^= 1 << 10

    StageExecutor.commit = flipping  # type: ignore[method-assign]


if __name__ == "__main__":
    faulty_compute.run("tests.support.flipped", 1, _flip_after)
