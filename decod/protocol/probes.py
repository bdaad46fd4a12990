"""The leader's questions to nodes that somebody doubts: who does not answer in time is gone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from decod.ids import NodeId
from decod.protocol.effects import Effect, Send
from decod.protocol.messages import Ping


@dataclass(slots=True)
class _Probe:
    nonce: int
    deadline_s: float
    reason: str
    failed: bool = False
    """The first ping did not reach it."""


@dataclass(slots=True)
class Probes:
    """At most one open question to each suspect."""

    timeout_s: float
    _open: dict[NodeId, _Probe] = field(default_factory=dict)
    _nonces: Iterable[int] = field(default_factory=lambda: count(1))

    @property
    def deadline_s(self) -> float | None:
        return min((probe.deadline_s for probe in self._open.values()), default=None)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._open

    def ask(self, now_s: float, node: NodeId, reason: str) -> list[Effect]:
        """Ask a suspect whether it lives, unless it has been asked."""
        if node in self._open:
            return []
        nonce = next(iter(self._nonces))
        self._open[node] = _Probe(nonce, now_s + self.timeout_s, reason)
        return [Send(node, Ping(nonce))]

    def answered(self, node: NodeId, nonce: int) -> None:
        probe = self._open.get(node)
        if probe is not None and probe.nonce == nonce:
            del self._open[node]

    def undelivered(self, node: NodeId) -> list[Effect] | None:
        """A ping did not reach a node: ask again, once; None if that was the second time."""
        probe = self._open[node]
        if probe.failed:
            return None
        # One lost packet must not cost a member, least of all its stage's last.
        probe.failed = True
        return [Send(node, Ping(probe.nonce))]

    def silent(self, now_s: float) -> dict[NodeId, str]:
        """Return who has not answered in time, and why it was doubted."""
        return {n: p.reason for n, p in self._open.items() if p.deadline_s <= now_s}

    def forget(self, node: NodeId) -> None:
        self._open.pop(node, None)
