"""How a simulated host measures its links: by regular messages, and by probes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from decod.ids import NodeId
from decod.planner.cost import transfer_rate
from decod.protocol.core.effects import ProbeLink
from decod.protocol.core.events import Fault, LinkMeasured
from decod.sim.kernel import Kernel
from decod.sim.network import Endpoint, InFlight, Network

_TIMED_INTERVAL_S = 5.0
"""Of the control messages to one peer, one in this time is timed. A daemon times every small one;
here that would nearly double the events."""


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Decides which control messages of a host are timed."""

    kernel: Kernel
    measured: Callable[[LinkMeasured], None]
    _timed_s: dict[NodeId, float] = field(default_factory=dict)

    def timed(self, to: NodeId) -> Callable[[float], None] | None:
        """Return the callback for a message's duration, or None if the message is not timed."""
        now_s = self.kernel.now_s
        if now_s - self._timed_s.get(to, -_TIMED_INTERVAL_S) < _TIMED_INTERVAL_S:
            return None
        self._timed_s[to] = now_s
        return partial(self._end, to)

    def _end(self, to: NodeId, duration_s: float) -> None:
        self.measured(LinkMeasured(to, latency_s=duration_s / 2))


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe. It ends in one call of `ended`, unless the sender dies."""

    effect: ProbeLink
    network: Network
    sender: Endpoint
    receiver: Endpoint | None
    ended: Callable[[LinkMeasured], None]

    def start(self) -> None:
        """Time the empty exchange."""
        self.network.send_control(self._transfer(0, self._transfer_bytes))

    def _transfer_bytes(self, trip_s: float) -> None:
        def sent(duration_s: float) -> None:
            size_bytes = self.effect.size_bytes
            latency_s = trip_s / 2
            rate = transfer_rate(size_bytes, duration_s=duration_s, latency_s=latency_s)
            self.ended(LinkMeasured(self.effect.to, latency_s, rate))

        self.network.send_tensor(self._transfer(self.effect.size_bytes, sent))

    def _transfer(self, size_bytes: int, sent: Callable[[float], None]) -> InFlight:
        return InFlight(
            self.sender, self.receiver, size_bytes, delivered=_nothing, sent=sent, failed=self._fail
        )

    def _fail(self, _reason: str, _fault: Fault) -> None:
        self.ended(LinkMeasured(self.effect.to))


def _nothing() -> None:
    """Do nothing: nobody looks at the bytes of a probe."""
