"""Messages of a later round or view than a node's own: kept until it gets there."""

from collections import deque

from decod.protocol.core.effects import Effect, FreeTensor
from decod.protocol.core.events import Received

_KEPT_MAX = 4096
"""Beyond that the oldest are dropped, as if lost on the way."""


class Stash:
    """Early messages. Their tensors stay with the driver until they are taken up."""

    def __init__(self) -> None:
        self._early: deque[Received] = deque()

    def keep(self, received: Received) -> list[Effect]:
        self._early.append(received)
        return [] if len(self._early) <= _KEPT_MAX else released(self._early.popleft())

    def take_all(self) -> deque[Received]:
        """Return all, in the order in which they came; who is still too early is kept again."""
        early, self._early = self._early, deque()
        return early


def released(received: Received) -> list[Effect]:
    """Give the tensor of a message back that is not taken."""
    return [FreeTensor(received.tensor.id)] if received.tensor is not None else []
