"""The disk of a simulated host, whose content outlives a crash."""

from collections.abc import Callable
from functools import partial

from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core.bans import NO_BANS
from decod.protocol.core.context import NO_PROMISE, Promise
from decod.protocol.core.era import MARKS_MAX
from decod.sim.blobs import SimulatedState
from decod.sim.kernel import Kernel

_WRITE_S = 0.005
"""Time until a small write is safe."""

_WRITE_BYTES_PER_S = 200e6

_SEARCH_S = 0.5
"""Delay before a restarted host begins to read the states that it kept."""


class Disk:
    """Keeps a node's last vote, and states of stages.

    Attributes:
        promise: The last vote.
        bans: The latest list of bans.
        states: The newest states of each stage, by stage index and iteration.
        full_until_s: The disk is full before this instant.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.promise = NO_PROMISE
        self.bans = NO_BANS
        self.states: dict[tuple[int, int], SimulatedState] = {}
        self.full_until_s = 0.0
        self._altered: set[tuple[int, int]] = set()
        self._kernel = kernel

    def keep(
        self,
        effect: fx.PersistVote,
        alive: Callable[[], bool],
        deliver: Callable[[ev.VotePersisted], None],
    ) -> None:
        """Write a vote, which takes a while. A crash before the end loses the vote.

        If the disk is full, nothing is reported, as in a daemon: the node abstains.
        """

        def written() -> None:
            if alive() and self._kernel.now_s >= self.full_until_s:
                self.promise = Promise(effect.term, effect.candidate)
                deliver(ev.VotePersisted(effect.term, effect.candidate))

        self._kernel.after(_WRITE_S, written)

    def write_state(
        self,
        blob: SimulatedState,
        size_bytes: int,
        alive: Callable[[], bool],
        deliver: Callable[[ev.Event], None],
        failed: Callable[[], None],
    ) -> None:
        """Write a state. It replaces one of the same iteration, or the oldest of its stage.

        If the disk is full, call `failed` and keep the old states.
        """

        def written() -> None:
            if not alive():
                return
            if self._kernel.now_s < self.full_until_s:
                failed()
                return
            self.states[blob.stage_index, blob.iteration] = blob
            self._altered.discard((blob.stage_index, blob.iteration))
            deliver(kept(blob))
            same = sorted(place for place in self.states if place[0] == blob.stage_index)
            for place in same[:-MARKS_MAX]:
                del self.states[place]
                self._altered.discard(place)
                deliver(ev.StateForgotten(*place))

        self._kernel.after(_WRITE_S + size_bytes / _WRITE_BYTES_PER_S, written)

    def read(self, size_bytes: int, done: Callable[[], None]) -> None:
        """Read a state, which takes a while."""
        self._kernel.after(size_bytes / _WRITE_BYTES_PER_S, done)

    def spoil(self) -> list[tuple[int, int]]:
        """Alter the newest intact state of each stage, and return their places."""
        newest = {place[0]: place for place in sorted(self.states) if place not in self._altered}
        self._altered.update(newest.values())
        return list(newest.values())

    def discard_altered(self, place: tuple[int, int]) -> bool:
        """Discard a state if it was altered, which every reader notices. Return whether it was."""
        if place not in self._altered:
            return False
        self._altered.discard(place)
        del self.states[place]
        return True

    def search(
        self,
        num_bytes: Callable[[SimulatedState], int],
        alive: Callable[[], bool],
        deliver: Callable[[ev.Event], None],
    ) -> None:
        """Report the states of an earlier life, the newest first. Each is read in full."""
        after_s = _SEARCH_S
        for blob in sorted(self.states.values(), key=lambda b: -b.iteration):
            after_s += num_bytes(blob) / _WRITE_BYTES_PER_S
            self._kernel.after(after_s, partial(self._found, blob, alive, deliver))

    def _found(
        self, blob: SimulatedState, alive: Callable[[], bool], deliver: Callable[[ev.Event], None]
    ) -> None:
        # The state may have been replaced meanwhile.
        place = (blob.stage_index, blob.iteration)
        if not alive() or self.states.get(place) is not blob:
            return
        if not self.discard_altered(place):
            deliver(kept(blob))


def kept(blob: SimulatedState) -> ev.StateKept:
    """Return the event that tells a machine of a state on its host's disk."""
    return ev.StateKept(blob.stage_index, blob.iteration, blob.parameter_hash)
