"""The compute process of a member that only averages: decod's own, with two jobs exchanged.

`fill` puts the member's tensor in the place of what it has learnt. `propose` makes the average out
of its parts, as always, but takes no optimizer's step from it. `check` compares the average with
what it should be.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

import decod.worker.__main__ as program
from bench.averaging import seed_of
from bench.averaging_jobs import Check, Checked, Fill
from decod.protocol.core.job_codec import Request, runs
from decod.protocol.core.jobs import Propose, Proposed
from decod.worker.job_methods import JobRunner


class AveragingRunner(JobRunner):
    """A runner of jobs whose gradient is given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._average_P = torch.empty(0)

    @runs(Fill)
    def _fill(self, request: Request[Fill]) -> None:
        state = self._ready._built.state.committed
        state.sending = tensor_of(request.job.member, state.weights.numel())

    @override
    def _propose(self, request: Request[Propose]) -> Proposed:
        exchange = self._ready.exchange(ahead=True)
        parts = self._means(request.inputs, exchange)
        self._average_P = exchange.average(parts, request.job.iteration)
        return Proposed("")

    @runs(Check)
    def _check(self, request: Request[Check]) -> Checked:
        num_members, found_P = request.job.num_members, self._average_P
        expected_P = torch.zeros_like(found_P)
        for member in range(num_members):
            expected_P += tensor_of(member, found_P.numel())
        expected_P /= num_members
        return Checked(float((found_P - expected_P).norm() / expected_P.norm()))


def tensor_of(member: int, num_elements: int) -> Tensor:
    """Return a member's tensor."""
    generator = torch.Generator().manual_seed(seed_of(member, num_elements))
    return torch.randn(num_elements, generator=generator)


if __name__ == "__main__":
    vars(program)[JobRunner.__name__] = AveragingRunner
    sys.exit(program.main())
