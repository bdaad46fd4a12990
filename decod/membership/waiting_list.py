"""Newcomers who wait until the organiser lets them in, if the run file says that they have to.

Only the leader keeps such a list. It does not outlive its daemon: whoever waits asks again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from decod.ids import NodeId

WAITING_MAX = 100
"""Further newcomers take the place of who has waited longest without asking again."""

GONE_S = 60.0
"""Whoever has not asked for so long has given up."""


@dataclass(frozen=True, slots=True)
class WaitingNewcomer:
    """A host that asks to be let in."""

    node_id: NodeId
    address: str
    """IP address from which it asks."""
    token: str
    """The id of the token that it has used."""
    since_s: float
    asked_s: float
    """When it has asked last. Both in seconds of the Unix epoch."""


class WaitingList:
    """The hosts that wait. Until it is opened, nobody has to.

    Args:
        clock: Returns seconds of the Unix epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_open = False
        self._waiting: OrderedDict[NodeId, WaitingNewcomer] = OrderedDict()
        self._decided: OrderedDict[NodeId, bool] = OrderedDict()

    def open(self) -> None:
        """Have newcomers wait from now on."""
        self._is_open = True

    def decision(self, node: NodeId, address: str, token: str) -> bool | None:
        """Return whether a newcomer may come in; None if it has to wait."""
        if not self._is_open:
            return True
        if (decided := self._decided.get(node)) is not None:
            return decided
        now_s = self._clock()
        known = self._waiting.pop(node, WaitingNewcomer(node, address, token, now_s, now_s))
        self._waiting[node] = replace(known, address=address, token=token, asked_s=now_s)
        if len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
        return None

    def is_new(self, node: NodeId) -> bool:
        """Whether a newcomer has asked once so far."""
        known = self._waiting.get(node)
        return known is not None and known.since_s == known.asked_s

    def all(self) -> list[WaitingNewcomer]:
        """Return who waits, the longest first."""
        after_s = self._clock() - GONE_S
        found = [each for each in self._waiting.values() if each.asked_s >= after_s]
        return sorted(found, key=lambda each: each.since_s)

    def decide(self, node: NodeId, *, may_enter: bool) -> None:
        """Let a newcomer in, or send it away, when it asks again."""
        self._waiting.pop(node, None)
        self._decided[node] = may_enter
        if len(self._decided) > WAITING_MAX:
            self._decided.popitem(last=False)
