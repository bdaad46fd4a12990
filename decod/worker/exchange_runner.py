"""What all processes that take part in averages have in common: parts and means in the arena."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decod.protocol.core.jobs import Gather, Reduce, Squared
from decod.train.copies import Departure
from decod.train.exchange import Exchange, Place, reduce_leniently
from decod.train.standing_out import standing_out
from decod.worker.arena_view import Region
from decod.worker.job import Request, malformed
from decod.worker.runner import Runner


class ExchangeRunner(Runner):
    """A runner of jobs that takes part in averages."""

    @property
    def _num_phases(self) -> int:
        """Phases of each average."""
        raise NotImplementedError

    def _write(self, output: Tensor, value: Tensor) -> None:
        """Copy a result into the arena. From a device it is there when the job is answered."""
        if value.is_cuda:
            self._departures.append(Departure(output, value))
            return
        with self._watch.measure("copy"):
            output.copy_(value)

    def _tensors(
        self, regions: Sequence[Region], dtype: torch.dtype, sizes: Sequence[int]
    ) -> list[Tensor]:
        """Return the flat tensors in some regions."""
        pairs = zip(regions, sizes, strict=bool(regions))
        return [self._arena.tensor(region, dtype, (size,)) for region, size in pairs]

    def _write_parts(
        self, request: Request[Gather], exchange: Exchange, parts: Sequence[Tensor]
    ) -> None:
        """Copy this member's parts of a phase into the outputs of a job."""
        sizes = exchange.part_sizes(request.job.phase, request.job.num_parts or 1)
        for output, part in zip(self._tensors(request.outputs, *sizes), parts, strict=True):
            self._write(output, part)

    def _later_parts(self, request: Request[Gather], exchange: Exchange) -> list[Tensor]:
        """Return this member's parts of a phase after the first: the inputs are the means."""
        num_parts, phase = request.job.num_parts, request.job.phase
        before = exchange.mean_sizes(phase - 1, num_parts)
        return exchange.parts(phase, num_parts, self._tensors(request.inputs, *before))

    def _reduced(
        self,
        request: Request[Reduce],
        exchange: Exchange,
        square_sum: Callable[[Tensor], float],
        *,
        audited: bool,
    ) -> Squared:
        """Write the mean of one part. Return its square sum, and what is wrong with contributions
        to it."""
        request.expect(None, 1)
        job, regions = request.job, request.inputs
        num_parts, part, phase, weights = job.num_parts, job.part, job.phase, job.weights
        if part >= num_parts:
            raise malformed(f"part is {part} of {num_parts}")
        if len(weights) != len(regions):
            raise malformed(f"{len(weights)} weights of {len(regions)} inputs")
        dtype, sizes = exchange.mean_sizes(phase, num_parts)
        (output,) = self._tensors(request.outputs, dtype, [sizes[part]])
        dtype, sizes = exchange.part_sizes(phase, num_parts)
        place, refused, odd = Place(part, num_parts, phase), dict[int, str](), list[int]()
        if job.lenient:
            size = sizes[part]
            right = [region.num_bytes == size * dtype.itemsize for region in regions]
            chosen = [
                self._arena.tensor(region, dtype, (size,)) if fits else None
                for region, fits in zip(regions, right, strict=True)
            ]
            mean, refused = reduce_leniently(exchange, chosen, place, weights)
        else:
            inputs = self._tensors(regions, dtype, [sizes[part]] * len(regions))
            mean = exchange.reduce(inputs, place, weights)
            odd = standing_out(inputs, weights) if audited else []
        self._write(output, mean)
        reason = next(iter(refused.values()), "")
        return Squared(square_sum(mean), tuple(refused), reason, tuple(odd))

    def _means(
        self, regions: Sequence[Region], exchange: Exchange, num_phases: int | None = None
    ) -> list[Tensor]:
        """Return the means of all phases of an average."""
        num_phases = num_phases or self._num_phases
        num_parts, found = len(regions) // num_phases, list[Tensor]()
        for phase in range(num_phases if num_parts else 0):
            of_phase = regions[phase * num_parts : (phase + 1) * num_parts]
            found += self._tensors(of_phase, *exchange.mean_sizes(phase, num_parts))
        return found
