"""Counters and a log of peers' faults, bounded so that peers can't fill memory or the log."""

import logging
from collections import Counter, deque
from collections.abc import Callable

PEERS_MAX = 1024
LINES_PER_MINUTE_MAX = 20


class Counters:
    """Numbers of events by name and peer.

    Bounded: from 1024 pairs of name and peer on, further peers are counted together as "other".
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, peer: str, num: int = 1) -> None:
        """Count one event `name`, or several, that `peer` (an IP address or node id) caused."""
        if len(self._counts) >= PEERS_MAX and (name, peer) not in self._counts:
            peer = "other"
        self._counts[name, peer] += num

    def total(self, name: str) -> int:
        """Return how often `name` happened, over all peers."""
        return sum(count for (key, _), count in self._counts.items() if key == name)

    def totals(self) -> dict[str, int]:
        """Return how often each event happened."""
        totals: Counter[str] = Counter()
        for (name, _), num in self._counts.items():
            totals[name] += num
        return dict(sorted(totals.items()))

    def by_peer(self, name: str) -> dict[str, int]:
        """Return how often each peer caused `name`."""
        return {peer: count for (key, peer), count in self._counts.items() if key == name}


class PeerLog:
    """A log of peers' faults: at most 20 lines a minute for each peer.

    Args:
        logger: Receives the lines, as warnings.
        clock: Returns monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._instants_s: dict[str, deque[float]] = {}

    def warn(self, peer: str, event: str, reason: str, node: str = "") -> None:
        """Write one line, unless `peer` has used up its lines of the last minute.

        Args:
            peer: Whose lines are counted: an IP address.
            event: The counter.
            reason: What was wrong.
            node: The node's id, if it has proven one. The terminal shows its name.
        """
        address = peer.partition(":")[2] or peer
        now_s = self._clock()
        if len(self._instants_s) >= PEERS_MAX and peer not in self._instants_s:
            peer = "other"
        instants_s = self._instants_s.setdefault(peer, deque())
        while instants_s and instants_s[0] <= now_s - 60:
            instants_s.popleft()
        if len(instants_s) < LINES_PER_MINUTE_MAX:
            instants_s.append(now_s)
            fields = {"fault": event, "peer": node or "a node without a certificate"}
            fields |= {"address": address, "reason": reason}
            extra = {"event": "peer.faulty", "fields": fields}
            self._logger.warning("%s %s: %s", event, peer, reason, extra=extra)
