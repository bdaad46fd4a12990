"""Jobs of an averaging process.

    configure    shapes, wide, compression, num_threads, audited
    guide        inputs: the newest average that was used; none: there is none yet
    gather       iteration, num_parts, phase, spec, weight -> outputs: this host's parts
    reduce_part  part, num_parts, phase, spec, weights, lenient -> output: the mean
    average      iteration, spec, between, scale; inputs: means of all phases -> output: the average
    retract      the average in hand is given up
    used         num_parts, spec, missed: the average was used, so its leftovers are final

A contribution is a flat sum over samples, (P,) in the wide dtype. A weight of 0 contributes
nothing: such a host still reduces parts and reads the average.

Legend: P parameters, flat.
"""

import hashlib
import math

import torch
from torch import Tensor
from typing_extensions import override

from decod.train.compression.coding import CompressionError
from decod.train.compression.fragments import StagePlans
from decod.train.compression.plan import CompressionConfig, Method, Shape
from decod.train.exchange import (
    Exchange,
    ExchangeConfig,
    Exchanges,
    PlainExchange,
    Residuals,
)
from decod.train.layout import byte_view
from decod.train.reduction import require_finite, square_sum
from decod.worker.arena import Arena
from decod.worker.configure import parse_dataclass, set_num_threads
from decod.worker.exchange_runner import ExchangeRunner
from decod.worker.job import Job, Result, malformed

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
        self.wide, self.audited = _WIDE[wide], audited
        codec = None if compression.method is Method.NONE else compression
        plans = StagePlans(shapes, 1, codec, wide=wide)
        self.num_phases = plans.num_phases
        config = ExchangeConfig(wide=self.wide, wire_dtype=self.wide)
        self.exchanges = Exchanges(config, plans)
        here = slice(0, self.num_elements)
        self.between = PlainExchange(config, here, Residuals(config, self.num_elements))
        """Of what groups of hosts have come to: it travels as it is."""
        self.guide_P = torch.zeros(self.num_elements, dtype=self.wide)
        """The newest average that was used: low-rank methods start from it."""
        self.average_P: Tensor | None = None
        """The newest average, if it travels as factors."""


class AverageRunner(ExchangeRunner):
    """The runner of an averaging process's jobs.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._configured: _Configured | None = None
        self._kinds |= {
            "configure": self._configure,
            "guide": self._guide,
            "gather": self._gather,
            "reduce_part": self._reduce_part,
            "average": self._average,
            "used": self._used,
            "retract": lambda _: {},  # `gather` begins an average anew.
        }

    @property
    def _ready(self) -> _Configured:
        if self._configured is None:
            raise malformed("no configure came before")
        return self._configured

    @property
    @override
    def _num_phases(self) -> int:
        return self._ready.num_phases

    def _configure(self, job: Job) -> Result:
        set_num_threads(job.message)
        shapes, wide = job.message.get("shapes"), job.message.get("wide")
        if not isinstance(shapes, list) or not shapes or not all(map(_is_shape, shapes)):
            raise malformed(f"shapes are {str(shapes)[:100]}")
        if wide not in _WIDE:
            raise malformed(f"wide is {str(wide)[:100]}")
        try:
            compression = parse_dataclass(
                CompressionConfig, "compression", job.message.get("compression")
            )
        except CompressionError as error:
            raise malformed(f"compression: {error}") from error
        audited = job.flag("audited")
        self._configured = _Configured(
            tuple(map(tuple, shapes)), str(wide), compression, audited=audited
        )
        return {"torch": torch.__version__, "num_elements": self._configured.num_elements}

    def _flat(self, job: Job) -> Tensor:
        """Return the only input: one number for each parameter's element, (P,)."""
        job.expect(1, len(job.outputs))
        return self._arena.tensor(job.inputs[0], self._ready.wide, (self._ready.num_elements,))

    def _guide(self, job: Job) -> Result:
        ready = self._ready
        if job.inputs:
            ready.guide_P.copy_(self._flat(job))
        else:
            ready.guide_P.zero_()
        return {}

    def _exchange(self, job: Job) -> Exchange:
        if "between" in job.message and job.flag("between"):
            return self._ready.between
        return self._ready.exchanges.of(job.spec("spec"))

    def _gather(self, job: Job) -> Result:
        ready, exchange = self._ready, self._exchange(job)
        contributes = job.number("weight") > 0
        job.expect(None, job.number("num_parts", 1) if contributes else 0)
        if not job.number("phase"):
            sum_P = self._flat(job) if contributes else torch.zeros_like(ready.guide_P)
            require_finite(sum_P, "this host's contribution")
            exchange.begin(sum_P, ready.guide_P, job.number("iteration", 1))
            if contributes:
                self._write_parts(job, exchange, exchange.parts(0, job.number("num_parts"), ()))
        elif contributes:
            self._write_parts(job, exchange, self._later_parts(job, exchange))
        return {}

    def _reduce_part(self, job: Job) -> Result:
        mean, found = self._reduced(job, self._exchange(job), audited=self._ready.audited)
        is_plain = mean.dtype == self._ready.wide
        return {"square_sum": square_sum(mean) if is_plain else 0.0, **found}

    def _average(self, job: Job) -> Result:
        ready, exchange = self._ready, self._exchange(job)
        job.expect(None, 1)
        (output,) = self._tensors(job.outputs, ready.wide, [ready.num_elements])
        num_phases = 1 if exchange is ready.between else self._num_phases
        means = self._means(job.inputs, exchange, num_phases)
        average_P = exchange.average(means, job.number("iteration", 1))
        if "scale" in job.message and (scale := job.number("scale", 1)) > 1:
            average_P = average_P * scale
        self._write(output, average_P)
        if ready.num_phases > 1:
            ready.average_P = average_P
        digest = hashlib.sha256(byte_view(average_P)).hexdigest()
        return {"hash": digest}

    def _used(self, job: Job) -> Result:
        job.expect(0, 0)
        ready = self._ready
        self._exchange(job).used(job.numbers("missed"), job.number("num_parts", 1))
        if ready.average_P is not None:
            ready.guide_P, ready.average_P = ready.average_P, None
        return {}


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(side) is int and side > 0 for side in value)
