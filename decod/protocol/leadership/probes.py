"""The leader's questions to nodes that somebody doubts: who does not answer in time is gone.

A node that does not answer at once is also asked by way of other members: the leader's own link to
it may be what is wrong.

Source: SWIM (Das, Gupta, Motivala, DSN 2002), section 3.1: indirect probes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import Ping

_TRIES_ALONE = 2
"""Pings that may fail, at once, before a node counts as gone, where nobody else can ask it."""

_TRIES = 3
"""The same where others can: the leader's own and those of two others."""

_TRIES_LAST = 6
"""The same for the last one of a stage."""

_ASKED = 3
"""How often a node that does not answer is asked in all."""


@dataclass(slots=True)
class _Probe:
    nonce: int
    deadline_s: float
    again_s: float
    """When it is asked again: question or answer may have been lost on the way."""
    reason: str
    tries: int = _TRIES_ALONE
    """Of which so many may fail."""
    num_asked: int = 1
    """Pings that were sent."""
    num_failed: int = 0
    """Those of them that did not reach it."""


@dataclass(slots=True)
class Probes:
    """At most one open question to each suspect."""

    timeout_s: float
    around: Callable[[NodeId, Ping], list[Effect]] = lambda *_: []
    """Asks by way of others."""
    _open: dict[NodeId, _Probe] = field(default_factory=dict)
    _nonces: Iterable[int] = field(default_factory=lambda: count(1))

    def renumbered(self, term: int) -> "Probes":
        """Return one without open questions, whose own are none of an earlier term's."""
        return Probes(self.timeout_s, self.around, _nonces=count(term << 32))

    @property
    def deadline_s(self) -> float | None:
        if not self._open:
            return None
        return min(min(p.again_s, p.deadline_s) for p in self._open.values())

    def __contains__(self, node: NodeId) -> bool:
        return node in self._open

    def ask(self, now_s: float, node: NodeId, reason: str, slack: float = 1.0) -> list[Effect]:
        """Ask a suspect whether it lives, unless it has been asked.

        Args:
            now_s: The time.
            node: The suspect.
            reason: Why it is doubted.
            slack: How many times as long as usual it may take.
        """
        if node in self._open:
            return []
        nonce = next(iter(self._nonces))
        again_s = now_s + self.timeout_s / _ASKED
        self._open[node] = _Probe(nonce, now_s + slack * self.timeout_s, again_s, reason)
        return [Send(node, Ping(nonce))]

    def ask_all(self, now_s: float, nodes: Iterable[NodeId], reason: str) -> list[Effect]:
        """Ask several."""
        return [effect for node in sorted(nodes) for effect in self.ask(now_s, node, reason)]

    def answered(self, node: NodeId, nonce: int) -> None:
        probe = self._open.get(node)
        if probe is not None and probe.nonce == nonce:
            del self._open[node]

    def undelivered(self, node: NodeId, *, last: bool) -> list[Effect] | None:
        """A ping did not reach a node: ask again; None if that has been tried often enough.

        One lost packet must not cost a member, and several not the `last` one of a stage.
        """
        probe = self._open[node]
        probe.num_failed += 1
        around = self._around(node, probe) if probe.num_failed == 1 else []
        if probe.num_failed >= (_TRIES_LAST if last else probe.tries):
            return None
        if probe.num_asked > probe.num_failed:
            return around
        probe.num_asked += 1
        return [Send(node, Ping(probe.nonce))]

    def _around(self, node: NodeId, probe: _Probe) -> list[Effect]:
        """Have others ask a node."""
        effects = self.around(node, Ping(probe.nonce))
        probe.num_asked += len(effects)
        probe.tries = _TRIES if effects else probe.tries
        return effects

    def overdue(self, now_s: float) -> list[Effect]:
        """Ask again who has not answered yet, and has time left."""
        due = [(n, p) for n, p in self._open.items() if p.again_s <= now_s < p.deadline_s]
        effects: list[Effect] = []
        for node, probe in due:
            probe.again_s = now_s + self.timeout_s / _ASKED
            probe.num_asked += 1
            effects += [Send(node, Ping(probe.nonce)), *self._around(node, probe)]
        return effects

    def silent(self, now_s: float) -> dict[NodeId, str]:
        """Return who has not answered in time, and why it was doubted."""
        return {n: p.reason for n, p in self._open.items() if p.deadline_s <= now_s}

    def forget(self, node: NodeId) -> None:
        self._open.pop(node, None)
