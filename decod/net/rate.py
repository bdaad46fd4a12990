"""A limit on how often each source may do something."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

_SOURCES_MAX = 4096


class RateLimiter:
    """A token bucket for each source. Forgets the sources that were silent longest.

    Args:
        clock: Returns monotonic seconds.
        rate_per_s: Tokens that come back each second.
        burst: Tokens in a full bucket.
    """

    def __init__(self, clock: Callable[[], float], *, rate_per_s: float, burst: float) -> None:
        self._clock = clock
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def allow(self, source: Hashable, cost: float = 1.0) -> bool:
        """Take `cost` tokens from the bucket of `source`; return False if it has fewer."""
        now_s = self._clock()
        tokens, then_s = self._buckets.pop(source, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - then_s) * self._rate_per_s)
        allowed = tokens >= cost
        self._buckets[source] = (tokens - cost if allowed else tokens, now_s)
        if len(self._buckets) > _SOURCES_MAX:
            self._buckets.popitem(last=False)
        return allowed
