"""What a node's tensors have cost its links since somebody last looked."""

import asyncio
from dataclasses import dataclass, field

from decod.protocol.core.durations import BusyTime
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.averaging_messages import ReducedPart, ReducePart
from decod.protocol.core.messages.microbatch_messages import BackwardGradient, ForwardActivation
from decod.protocol.core.messages.server_messages import StageActivation, StageGradient

_PIPELINE = (ForwardActivation, BackwardGradient, StageActivation, StageGradient)
_AVERAGES = (ReducePart, ReducedPart)


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
