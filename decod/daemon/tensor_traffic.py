"""What a node's tensors have cost its links since somebody last looked."""

import asyncio
from dataclasses import dataclass, field

from decod.protocol.core.messages import Message
from decod.protocol.core.messages.averaging import ReducedPart, ReducePart
from decod.protocol.core.messages.microbatches import BackwardGradient, ForwardActivation
from decod.protocol.core.messages.servers import StageActivation, StageGradient

_PIPELINE = (ForwardActivation, BackwardGradient, StageActivation, StageGradient)
_AVERAGES = (ReducePart, ReducedPart)

_SPANS_MAX = 4096
"""Stretches of time that are kept apart."""


class BusyTime:
    """How long at least one of some activities was under way. Each is told of when it ends."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        """Begin and end of each stretch, in order, with gaps between."""

    def add(self, end_s: float, duration_s: float) -> None:
        """Count an activity that ends now, at `end_s`, on a clock that does not go back."""
        begin_s = end_s - duration_s
        while self._spans and self._spans[-1][1] >= begin_s:
            begin_s = min(begin_s, self._spans.pop()[0])
        self._spans.append((begin_s, end_s))
        if len(self._spans) > _SPANS_MAX:
            # An iteration that is repeated again and again. A gap more or less does not matter.
            self._spans[:2] = [(self._spans[0][0], self._spans[1][1])]

    def take(self, since_s: float) -> float:
        """Return the time from `since_s` on, and begin anew."""
        spans, self._spans = self._spans, []
        return sum(max(0.0, end_s - max(begin_s, since_s)) for begin_s, end_s in spans)


@dataclass(slots=True)
class _Kind:
    """Tensors for one purpose."""

    busy: BusyTime = field(default_factory=BusyTime)
    sent_bytes: int = 0
    received_bytes: int = 0

    def sent(self, duration_s: float, size_bytes: int) -> None:
        self.sent_bytes += size_bytes
        self.busy.add(asyncio.get_running_loop().time(), duration_s)

    def received(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class Transferred:
    """What has travelled for one purpose."""

    sending_s: float
    """How long at least one tensor was on its way from here."""
    sent_bytes: int
    received_bytes: int


class TensorTraffic:
    """Counts the tensors that a node sends and receives. Probes and states are left out."""

    def __init__(self) -> None:
        self._passes, self._averages = _Kind(), _Kind()

    def sent(self, message: Message, duration_s: float, size_bytes: int) -> None:
        """Count a tensor that has arrived at its receiver."""
        kind = self._kind(message)
        if kind is not None:
            kind.sent(duration_s, size_bytes)

    def received(self, message: Message, size_bytes: int) -> None:
        """Count a tensor that has arrived here."""
        kind = self._kind(message)
        if kind is not None:
            kind.received(size_bytes)

    def _kind(self, message: Message) -> _Kind | None:
        if isinstance(message, _PIPELINE):
            return self._passes
        return self._averages if isinstance(message, _AVERAGES) else None

    def take(self, since_s: float) -> tuple[Transferred, Transferred]:
        """Return what was counted for passes and for averages, and begin anew.

        Args:
            since_s: Time before this instant does not count, on the loop's clock.
        """
        passes, averages = self._passes, self._averages
        self._passes, self._averages = _Kind(), _Kind()
        passed, averaged = (
            Transferred(kind.busy.take(since_s), kind.sent_bytes, kind.received_bytes)
            for kind in (passes, averages)
        )
        return passed, averaged
