"""The disk of a simulated host: what is on it outlives a crash."""

from collections.abc import Callable

from decod.protocol import effects as fx
from decod.protocol import events as ev
from decod.protocol.era import MARKS_MAX
from decod.protocol.voter import NO_PROMISE, Promise
from decod.sim.compute import StateBlob
from decod.sim.kernel import Kernel

_WRITE_S = 0.005
"""How long it takes until a few bytes are safe."""

_WRITE_BYTES_PER_S = 200e6


class Disk:
    """Keeps a node's last vote, and states of stages.

    Attributes:
        promise: That vote.
        states: By stage index and iteration; the newest of each stage.
        full_until_s: Nothing can be written before this instant.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.promise = NO_PROMISE
        self.states: dict[tuple[int, int], StateBlob] = {}
        self.full_until_s = 0.0
        self._kernel = kernel

    def keep(
        self,
        effect: fx.PersistVote,
        alive: Callable[[], bool],
        deliver: Callable[[ev.VotePersisted], None],
    ) -> None:
        """Write a vote, which takes a while; what is being written in a crash is lost.

        Where there is no room nothing is said, as by a daemon: its node abstains.
        """

        def written() -> None:
            if alive() and self._kernel.now_s >= self.full_until_s:
                self.promise = Promise(effect.term, effect.candidate)
                deliver(ev.VotePersisted(effect.term, effect.candidate))

        self._kernel.after(_WRITE_S, written)

    def write_state(
        self,
        blob: StateBlob,
        size_bytes: int,
        alive: Callable[[], bool],
        deliver: Callable[[ev.Event], None],
    ) -> None:
        """Write a state in place of one of the same iteration, or of the oldest of its stage."""

        def written() -> None:
            if not alive():
                return
            self.states[blob.stage_index, blob.iteration] = blob
            deliver(kept(blob))
            same = sorted(place for place in self.states if place[0] == blob.stage_index)
            for place in same[:-MARKS_MAX]:
                del self.states[place]
                deliver(ev.StateForgotten(*place))

        self._kernel.after(_WRITE_S + size_bytes / _WRITE_BYTES_PER_S, written)


def kept(blob: StateBlob) -> ev.StateKept:
    """Return what a machine is told of a state on its host's disk."""
    return ev.StateKept(blob.stage_index, blob.iteration, blob.parameter_hash)
