"""Who has learnt from a data node's microbatches, until others have that too.

Where members step by themselves, what a relay has learnt since the last average is lost with it.
With `sync.reread`, the data nodes then have its microbatches trained on again. Each data node
remembers one relay of each stage for each of its microbatches:

    trained on --an average--> forgotten                                (it is used at once)
    trained on --an average--> sending --the next average--> forgotten  (it travels until then)
         `------- the relay is lost -------> lacking --trained on again--> trained on

Where fragments are averaged in turn, it takes an average of each. A relay is lost when the view
lacks it, or has it as a later life. What it had put into an average that travels is lost too,
because the others average again without it, unless all of its stage have that average. A microbatch
that is trained on again passes through all stages, but only the relays of stages that lacked it are
remembered: the others have had it before. In a stage that has it from a lost relay alone, its new
relay is remembered too: should the average be dropped, the stage has it all the same.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.strategy.deferrals import WAITING_MAX
from decod.protocol.strategy.microbatch import HeldMicrobatch

_Life = tuple[NodeId, int]
"""A member, and the iteration with which it was admitted."""


@dataclass(slots=True)
class _Phase:
    """The iterations between two averages."""

    missing: set[int]
    """Fragments that have not been averaged since."""
    lives: dict[MicrobatchId, dict[int, _Life]] = field(default_factory=dict)
    """Who has learnt from each microbatch, by its place on the path."""


class Learners:
    """The relays that have learnt from one data node's microbatches.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._phases: deque[_Phase] = deque()
        """Oldest first. They hold `WAITING_MAX` microbatches at most: the oldest are forgotten."""
        self._lacking: dict[MicrobatchId, set[int]] = {}
        """Places on the path whose relays have learnt in vain."""
        self._lost = set[MicrobatchId]()
        """Of those: microbatches that have not been taken yet."""
        self._seen = (0, 0)
        """Term and version of the view that was looked at last."""
        self._begin()

    def _begin(self) -> None:
        fragments = range(1, self._context.run.sync.fragments + 1)
        self._phases.append(_Phase({*fragments}))

    def committed(self, done: Mapping[MicrobatchId, HeldMicrobatch], averaged: int | None) -> None:
        """An iteration of the context's view is final.

        Args:
            done: This data node's share of it.
            averaged: The fragment with whose average it has ended. 0: all. None: without one.
        """
        context = self._context
        if not context.run.sync.reread:
            return
        self._look()  # Who was lost in this iteration is not in its average.
        members, lives = context.view.by_id, self._phases[-1].lives
        for microbatch, held in done.items():
            lacking = self._lacking.pop(microbatch, None)
            if lacking is not None:
                lacking |= self._replaced(microbatch)
            lives.setdefault(microbatch, {}).update(
                (place, (relay, members[relay].since_iteration))
                for place, relay in enumerate(held.path)
                if lacking is None or place in lacking
            )
        self._lost.difference_update(done)
        if averaged is not None:
            self._averaged(averaged)
        num_more = sum(len(phase.lives) for phase in self._phases) - WAITING_MAX
        for phase in self._phases:
            while num_more > 0 and phase.lives:
                del phase.lives[next(iter(phase.lives))]
                num_more -= 1

    def _averaged(self, fragment: int) -> None:
        """Forget what all members have now: what was sent, or what is averaged at once."""
        overlaps = self._context.run.sync.overlap
        kept = [phase for phase in self._phases if phase.missing or not overlaps]
        for phase in kept:
            phase.missing -= phase.missing if not fragment else {fragment}
        self._phases = deque(phase for phase in kept if phase.missing or overlaps)
        self._begin()

    def _replaced(self, microbatch: MicrobatchId) -> set[int]:
        """Forget lost relays that had learnt from a microbatch. Return their places."""
        members, found = self._context.view.by_id, set[int]()
        for lives in (phase.lives.get(microbatch, {}) for phase in self._phases):
            for place, (relay, since) in [*lives.items()]:
                if relay not in members or members[relay].since_iteration != since:
                    del lives[place]
                    found.add(place)
        return found

    def take_lost(self) -> set[MicrobatchId]:
        """Return microbatches that are to be trained on again, each once."""
        self._look()
        lost, self._lost = self._lost, set()
        return lost

    def _look(self) -> None:
        """Look for lost relays, if the context's view is a new one."""
        view, before = self._context.view, self._seen
        self._seen = (view.term, view.version)
        if before == self._seen:
            return
        members = {(m.node_id, m.since_iteration) for m in view.members}
        for phase in self._phases:
            # Places on the path are stages counted from the first of the relays.
            kept = set() if phase.missing else {stage - 1 for stage in self._context.travelled}
            for microbatch, lives in phase.lives.items():
                lost = (place for place, life in lives.items() if life not in members)
                if gone := [place for place in lost if place not in kept]:
                    self._lost.add(microbatch)
                    self._lacking.setdefault(microbatch, set()).update(gone)
                    for place in gone:
                        del lives[place]

    def clear(self) -> None:
        """The run goes back: what was learnt is repeated."""
        self._phases.clear()
        self._lacking.clear()
        self._lost.clear()
        self._begin()
