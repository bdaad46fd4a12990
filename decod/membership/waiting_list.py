"""Newcomers who wait until the organiser lets them in, if the run file says that they have to.

Each data node's host keeps such a list, and uses it while it leads. It lasts as long as the daemon.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from decod.ids import NodeId

WAITING_MAX = 100
"""While so many wait, further newcomers are not listed. They ask again."""

WAITING_PER_NETWORK_MAX = 4
"""Identities are free to make, so one network does not fill the list."""

ID_CHARACTERS = 12
"""So much of an id names a newcomer. Who asks has chosen its id, so that names and shorter
beginnings are easily made to fit."""

GONE_S = 60.0
"""Whoever has not asked for so long has given up."""

_DECIDED_MAX = 1000


class Decision(Enum):
    """The answer to a newcomer who asks."""

    ENTERS = "enters"
    """The organiser has let it in, or nobody has to wait."""
    WAITS = "waits"
    LISTED = "listed"
    """It waits, and the organiser sees it for the first time."""
    SENT_AWAY = "sent away"


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
        clock: Returns monotonic seconds.
        network_of: Returns the network of an IP address, or None if it counts by itself.
    """

    def __init__(self, clock: Callable[[], float], network_of: Callable[[str], str | None]) -> None:
        self._clock, self._network_of = clock, network_of
        self._is_open = False
        self._waiting: dict[NodeId, WaitingNewcomer] = {}
        self._decided: OrderedDict[NodeId, bool] = OrderedDict()

    def open(self) -> None:
        """Have newcomers wait from now on."""
        self._is_open = True

    def decision(self, node: NodeId, address: str, token: str) -> Decision:
        """Return what becomes of a newcomer.

        Args:
            node: The newcomer.
            address: IP address from which it asks.
            token: The id of its token.
        """
        if not self._is_open:
            return Decision.ENTERS
        if (decided := self._decided.get(node)) is not None:
            return Decision.ENTERS if decided else Decision.SENT_AWAY
        now_s = self._clock()
        waiting = {each.node_id: each for each in self.all()}
        known = waiting.get(node)
        if known is None and not self._has_room(waiting, address):
            return Decision.WAITS
        since_s = now_s if known is None else known.since_s
        waiting[node] = WaitingNewcomer(node, address, token, since_s, now_s)
        self._waiting = waiting
        return Decision.LISTED if known is None else Decision.WAITS

    def _has_room(self, waiting: dict[NodeId, WaitingNewcomer], address: str) -> bool:
        networks = Counter(self._network(each.address) for each in waiting.values())
        own = self._network(address)
        return len(waiting) < WAITING_MAX and networks[own] < WAITING_PER_NETWORK_MAX

    def _network(self, address: str) -> str:
        return (self._network_of(address) if address else None) or address

    def find(self, beginning: str, *, may_enter: bool) -> list[NodeId]:
        """Return those who can be let in or sent away, whose id begins so.

        Who has been sent away can be let in yet. Who has been let in may be a member by now.
        """
        known = [each.node_id for each in self.all()]
        known += [node for node, entered in self._decided.items() if may_enter and not entered]
        return [node for node in known if node.startswith(beginning)]

    def age_s(self, newcomer: WaitingNewcomer) -> float:
        """Return for how long a newcomer has waited."""
        return self._clock() - newcomer.since_s

    def all(self) -> list[WaitingNewcomer]:
        """Return who waits, the longest first."""
        after_s = self._clock() - GONE_S
        found = [each for each in self._waiting.values() if each.asked_s >= after_s]
        return sorted(found, key=lambda each: each.since_s)

    def decide(self, node: NodeId, *, may_enter: bool) -> None:
        """Let a newcomer in, or send it away, when it asks again."""
        self._waiting.pop(node, None)
        self._decided[node] = may_enter
        if len(self._decided) > _DECIDED_MAX:
            self._decided.popitem(last=False)
