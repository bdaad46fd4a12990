"""Who has learnt from a data node's microbatches, until others have that too.

Where members step by themselves, what a relay has learnt since the last average is lost with it.
With `sync.reread`, the data nodes then have its microbatches trained on again. Each data node
remembers one relay of each stage for each of its microbatches:

    trained on --an average--> forgotten                                (it is used at once)
    trained on --an average--> sending --the next average--> forgotten  (it travels until then)
         `------- the relay is lost -------> lacking --trained on again--> trained on

A relay is lost when the view lacks it, or has it as a later life. What it had put into an average
that travels is lost too, because the others average again without it. A microbatch that is trained
on again passes through all stages, but only the relays of stages that lacked it are remembered: the
others have had it before.
"""

from collections.abc import Mapping
from itertools import islice

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.strategy.deferrals import WAITING_MAX
from decod.protocol.strategy.microbatch import HeldMicrobatch

_Life = tuple[NodeId, int]
"""A member, and the iteration with which it was admitted."""

_Lives = dict[MicrobatchId, dict[int, _Life]]
"""Of each microbatch, by its place on the path."""


class Learners:
    """The relays that have learnt from one data node's microbatches.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: _Lives = {}
        """Since the last average, oldest first. At most `WAITING_MAX`: the oldest are forgotten."""
        self._sending: _Lives = {}
        """In the average that travels."""
        self._lacking: dict[MicrobatchId, set[int]] = {}
        """Places on the path whose relays have learnt in vain."""
        self._lost = set[MicrobatchId]()
        """Of those: microbatches that have not been taken yet."""
        self._seen = (0, 0)
        """Term and version of the view that was looked at last."""

    def committed(self, done: Mapping[MicrobatchId, HeldMicrobatch], *, averaged: bool) -> None:
        """An iteration of the context's view is final.

        Args:
            done: This data node's share of it.
            averaged: It has ended with an average.
        """
        context = self._context
        if not context.sync.rereads:
            return
        self._look()  # Who was lost in this iteration is not in its average.
        members = context.view.by_id
        for microbatch, held in done.items():
            lacking = self._lacking.pop(microbatch, None)
            lives = {
                place: (relay, members[relay].since_iteration)
                for place, relay in enumerate(held.path)
                if lacking is None or place in lacking
            }
            self._since.setdefault(microbatch, {}).update(lives)
        self._lost.difference_update(done)
        if averaged:
            self._sending = self._since if context.sync.overlaps else {}
            self._since = {}
        for microbatch in [*islice(self._since, max(0, len(self._since) - WAITING_MAX))]:
            del self._since[microbatch]

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
        for known in (self._sending, self._since):
            for microbatch, lives in known.items():
                if gone := [place for place, life in lives.items() if life not in members]:
                    self._lost.add(microbatch)
                    self._lacking.setdefault(microbatch, set()).update(gone)
                    for place in gone:
                        del lives[place]

    def clear(self) -> None:
        """The run goes back: what was learnt is repeated."""
        self._since, self._sending, self._lacking = {}, {}, {}
        self._lost.clear()
