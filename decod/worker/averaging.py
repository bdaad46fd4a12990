"""The averaging process: codes contributions, adds up parts and decodes averages, on the CPU.

The loop's device stays free for training meanwhile. The node process starts it with an inherited
socket and memory file. Nobody types this command. Its settings are shapes, wide, compression,
num_threads, audited.

`Gather`'s first input is this host's sum. `Guide`'s input is the newest average that was used.

A contribution is a flat sum over samples, (P,) in the wide dtype. A weight of 0 contributes
nothing: such a host still reduces parts and reads the average.

Legend: P parameters, flat.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from decod.compression.plan import CompressionConfig, CompressionError, Method, Shape, StagePlans
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.job_codec import Request, runs
from decod.protocol.core.jobs import Configure, Configured, Guide
from decod.train.exchange import (
    Exchange,
    ExchangeConfig,
    Exchanges,
    PlainExchange,
    Residuals,
)
from decod.train.layout import byte_view
from decod.train.reduction import require_finite, square_sum
from decod.worker.configure import parse_dataclass, set_num_threads
from decod.worker.runner import Runner, end_at_once, malformed, serve_inherited

_WIDE = {"float32": torch.float32, "float64": torch.float64}


class _Configured:
    """What all averages of a run have in common.

    Args:
        shapes: Of the parameters, in the order of the flat buffers.
        wide: Name of the dtype of contributions and averages.
        compression: How they travel.
        audited: Whether contributions that stand out are named.
    """

    def __init__(
        self, shapes: tuple[Shape, ...], wide: str, compression: CompressionConfig, *, audited: bool
    ) -> None:
        self.num_elements = sum(map(math.prod, shapes))
        self.wide = _WIDE[wide]
        self.audited = audited
        codec = None if compression.method is Method.NONE else compression
        plans = StagePlans(shapes, 1, codec, wide=wide)
        self.num_phases = plans.num_phases
        config = ExchangeConfig(wide=self.wide, wire_dtype=self.wide)
        self.exchanges = Exchanges(config, plans)
        here = slice(0, self.num_elements)
        self.between = PlainExchange(config, here, Residuals(config, self.num_elements))
        """Averages of what groups of hosts have come to, which travel as they are."""
        self.guide_P = torch.zeros(self.num_elements, dtype=self.wide)
        """The newest average that was used: low-rank methods start from it."""
        self.average_P: Tensor | None = None
        """The newest average, if it travels as factors."""


class AverageRunner(Runner[_Configured]):
    """The runner of an averaging process's jobs."""

    @property
    @override
    def _num_phases(self) -> int:
        return self._ready.num_phases

    @runs(Configure)
    def _configure(self, request: Request[Configure]) -> Configured:
        settings = request.job.settings
        set_num_threads(settings)
        shapes = settings.get("shapes")
        wide = settings.get("wide")
        if not isinstance(shapes, list) or not shapes or not all(map(_is_shape, shapes)):
            raise malformed(f"shapes are {str(shapes)[:100]}")
        if wide not in _WIDE:
            raise malformed(f"wide is {str(wide)[:100]}")
        try:
            compression = parse_dataclass(
                CompressionConfig, "compression", settings.get("compression")
            )
        except CompressionError as error:
            raise malformed(f"compression: {error}") from error
        audited = settings.get("audited")
        if type(audited) is not bool:
            raise malformed(f"audited is {str(audited)[:100]}")
        self._configured = _Configured(
            tuple(map(tuple, shapes)), str(wide), compression, audited=audited
        )
        return Configured({"torch": torch.__version__})

    def _flat(self, request: Request[jobs.BaseJob]) -> Tensor:
        """Return the only input: one number for each parameter's element, (P,)."""
        request.expect(1, len(request.outputs))
        return self._arena.tensor(request.inputs[0], self._ready.wide, (self._ready.num_elements,))

    @runs(Guide)
    def _guide(self, request: Request[Guide]) -> None:
        ready = self._ready
        if request.inputs:
            ready.guide_P.copy_(self._flat(request))
        else:
            ready.guide_P.zero_()

    def _exchange(self, spec: AverageSpec, *, between: bool) -> Exchange:
        return self._ready.between if between else self._ready.exchanges.of(spec)

    @runs(jobs.Gather)
    def _gather(self, request: Request[jobs.Gather]) -> None:
        ready = self._ready
        job = request.job
        exchange = self._exchange(job.spec, between=job.kind is jobs.AverageKind.BETWEEN)
        request.expect(None, job.num_parts)
        if not job.phase:
            sum_P = self._flat(request) if job.num_parts else torch.zeros_like(ready.guide_P)
            require_finite(sum_P, "this host's contribution")
            exchange.begin(sum_P, ready.guide_P, job.iteration)
            if job.num_parts:
                self._write_parts(request, exchange, exchange.parts(0, job.num_parts, ()))
        elif job.num_parts:
            self._write_parts(request, exchange, self._later_parts(request, exchange))

    @runs(jobs.Reduce)
    def _reduce(self, request: Request[jobs.Reduce]) -> jobs.Squared:
        ready = self._ready
        job = request.job
        exchange = self._exchange(job.spec, between=job.kind is jobs.AverageKind.BETWEEN)

        def square(mean: Tensor) -> float:
            return square_sum(mean) if mean.dtype == ready.wide else 0.0

        return self._reduced(request, exchange, square, audited=ready.audited)

    @runs(jobs.Decode)
    def _decode(self, request: Request[jobs.Decode]) -> jobs.Proposed:
        ready = self._ready
        job = request.job
        exchange = self._exchange(job.spec, between=job.between)
        request.expect(None, 1)
        (output,) = self._tensors(request.outputs, ready.wide, [ready.num_elements])
        num_phases = 1 if exchange is ready.between else self._num_phases
        means = self._means(request.inputs, exchange, num_phases)
        average_P = exchange.average(means, job.iteration)
        if job.scale > 1:
            average_P = average_P * job.scale
        self._write(output, average_P)
        if ready.num_phases > 1:
            ready.average_P = average_P
        return jobs.Proposed(hashlib.sha256(byte_view(average_P)).hexdigest())

    @runs(jobs.Use)
    def _use(self, request: Request[jobs.Use]) -> None:
        request.expect(0, 0)
        ready = self._ready
        job = request.job
        self._exchange(job.spec, between=False).used(job.missed, job.num_parts)
        if ready.average_P is not None:
            ready.guide_P = ready.average_P
            ready.average_P = None

    @runs(jobs.Retract)
    def _retract(self, _: Request[jobs.Retract]) -> None:
        """Do nothing: `Gather` begins an average anew."""


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(side) is int and side > 0 for side in value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the averaging process until its socket closes."""
    return serve_inherited("python -m decod.worker.averaging", AverageRunner, arguments)


if __name__ == "__main__":
    end_at_once(main())
