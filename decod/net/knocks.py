"""How often somebody connects who does not prove to be of this run.

gRPC ends such a connection itself, during the handshake, and tells nobody. But it asks for this
node's certificate at the beginning of each handshake. A connection that has begun and over which no
call comes in time was refused, or had nothing to say.
"""

from collections import deque
from collections.abc import Callable

_PENDING_MAX = 10_000
_PEERS_MAX = 16_384
_PEER_KEPT_S = 60.0
"""After a silence that long, the far end's port may belong to another connection."""


class Knocks:
    """Connections over which no call has come.

    Args:
        clock: Returns monotonic seconds. It is also asked from other threads.
        patience_s: The time that a connection has from its beginning to its first call.
        refuse: Called with a number of connections that were refused.
    """

    def __init__(
        self, clock: Callable[[], float], patience_s: float, refuse: Callable[[int], None]
    ) -> None:
        self._clock, self._patience_s, self._refuse = clock, patience_s, refuse
        self._begun_s: deque[float] = deque()
        """When connections began over which no call has come yet, the oldest first."""
        self._heard_s: dict[str, float] = {}
        """When something last came from each far end, the latest at the end."""

    def begin(self) -> None:
        """A handshake begins. May be called from any thread."""
        self._begun_s.append(self._clock())

    def hear(self, peer: str) -> None:
        """A call comes over a connection.

        Args:
            peer: Its far end, as gRPC calls it.
        """
        now_s = self._clock()
        last_s = self._heard_s.pop(peer, None)
        self._heard_s[peer] = now_s
        if len(self._heard_s) > _PEERS_MAX:
            del self._heard_s[next(iter(self._heard_s))]
        is_new = last_s is None or now_s - last_s > _PEER_KEPT_S
        if is_new and self._begun_s:
            # Which one it was does not matter: it is their number that counts.
            self._begun_s.popleft()

    def settle(self) -> None:
        """Count connections whose time is over."""
        until_s, num = self._clock() - self._patience_s, 0
        while self._begun_s and (self._begun_s[0] <= until_s or len(self._begun_s) > _PENDING_MAX):
            self._begun_s.popleft()
            num += 1
        if num:
            self._refuse(num)
