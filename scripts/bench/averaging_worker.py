"""The compute process of a member that only averages: decod's own, with two jobs exchanged.

`fill` puts the member's tensor in the place of what it has learnt. `propose` makes the average out
of its parts, as always, but takes no optimizer's step from it. `check` compares the average with
what it should be.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

import decod.worker.__main__ as program
from bench.averaging import seed_of
from decod.worker.job import Job, Result
from decod.worker.jobs import JobRunner


class AveragingRunner(JobRunner):
    """A runner of jobs whose gradient is given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._average_P = torch.empty(0)
        more: dict[str, Callable[[Job], Result]] = {"fill": self._fill, "check": self._check}
        self._kinds |= {**more, "propose": self._propose}

    def _fill(self, job: Job) -> Result:
        """Take the member's tensor as what it has learnt until the last outer step."""
        state = self._ready._built.state.committed
        state.sending = tensor_of(job.number("member"), state.weights.numel())
        return {}

    @override
    def _propose(self, job: Job) -> Result:
        exchange = self._ready.exchange(ahead=True)
        parts = self._means(job.inputs, exchange)
        self._average_P = exchange.average(parts, job.number("iteration", 1))
        return {"hash": "", "effective_rank": 0.0, "standing_out": []}

    def _check(self, job: Job) -> Result:
        """Return the average's error relative to the mean of all members' tensors."""
        num_members, found_P = job.number("num_members", 1), self._average_P
        expected_P = torch.zeros_like(found_P)
        for member in range(num_members):
            expected_P += tensor_of(member, found_P.numel())
        expected_P /= num_members
        return {"error": float((found_P - expected_P).norm() / expected_P.norm())}


def tensor_of(member: int, num_elements: int) -> Tensor:
    """Return a member's tensor."""
    generator = torch.Generator().manual_seed(seed_of(member, num_elements))
    return torch.randn(num_elements, generator=generator)


if __name__ == "__main__":
    vars(program)[JobRunner.__name__] = AveragingRunner
    sys.exit(program.main())
