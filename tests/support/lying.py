"""A `decod` whose relay lies: from some iteration on, its compute process sends false numbers.

    python -m tests.support.lying 20 flipped join JOINSTRING ...

The second word says how it lies: see `LIES`. It lies about its gradients: what it contributes to
averages, and what it sends to the stage before. With the word "mean", it contributes what is true,
and sends all members a false mean of what they have contributed. A word of `PASSES` says what of
its passes alone is false, and how: what it sends to the stage behind, or to the one before.
Everything else about it is real, also its state: it steps like the others.
"""

from collections.abc import Callable
from typing import Any

from tests.support import faulty_compute

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


MEAN = "mean"

PASSES: dict[str, tuple[str, Lie]] = {
    "activations": ("forward", LIES["flipped"]),
    "activations-stale": ("forward", LIES["stale"]),
    "activations-nan": ("forward", lambda true, _: true * float("nan")),
    "gradients": ("backward", LIES["flipped"]),
    "gradients-nan": ("backward", lambda true, _: true * float("nan")),
}


def _lie_from(begin: str, how_to: str) -> None:
    if how_to == MEAN:
        _average_falsely_from(int(begin))
    elif how_to in PASSES:
        _pass_falsely_from(int(begin), *PASSES[how_to])
    else:
        _compute_falsely_from(int(begin), LIES[how_to])


def _average_falsely_from(iteration: int) -> None:
    from decod.train.exchange import PlainExchange

    reduce, num_means = PlainExchange.reduce, 0

    def lying_reduce(exchange: Any, *args: Any) -> Any:
        nonlocal num_means
        num_means += 1  # It reduces one part in each iteration.
        true = reduce(exchange, *args)
        return -true if num_means >= iteration else true

    PlainExchange.reduce = lying_reduce  # type: ignore[method-assign]


def _pass_falsely_from(iteration: int, name: str, lie: Lie) -> None:
    from decod.train.passes import Passes

    run, before = getattr(Passes, name), dict[int, Any]()

    def lying_pass(passes: Passes, mb: Any, tensor: Any) -> Any:
        true = run(passes, mb, tensor)
        lies = passes._state.iteration + 1 >= iteration
        told = lie(true, before.get(mb.index)) if lies else true
        before[mb.index] = true.clone()
        return told

    setattr(Passes, name, lying_pass)


def _compute_falsely_from(iteration: int, lie: Lie) -> None:
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


if __name__ == "__main__":
    faulty_compute.run("tests.support.lying", 2, _lie_from)
