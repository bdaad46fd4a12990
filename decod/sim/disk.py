"""The disk of a simulated host: what is on it outlives a crash."""

from collections.abc import Callable

from decod.protocol import effects as fx
from decod.protocol.election import NO_PROMISE, Promise
from decod.protocol.events import VotePersisted
from decod.sim.kernel import Kernel

_WRITE_S = 0.005
"""How long it takes until a few bytes are safe."""


class Disk:
    """Keeps a node's last vote.

    Attributes:
        promise: That vote.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.promise = NO_PROMISE
        self._kernel = kernel

    def keep(
        self,
        effect: fx.PersistVote,
        alive: Callable[[], bool],
        deliver: Callable[[VotePersisted], None],
    ) -> None:
        """Write a vote, which takes a while; what is being written in a crash is lost."""

        def written() -> None:
            if alive():
                self.promise = Promise(effect.term, effect.candidate)
                deliver(VotePersisted(effect.term, effect.candidate))

        self._kernel.after(_WRITE_S, written)
