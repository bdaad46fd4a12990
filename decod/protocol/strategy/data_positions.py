"""Who reads which share of the data, and what became of every position (invariant I5).

A share is what one data node index stands for in every batch: see `decod.data.order`. A data node
reads the share of its own index; those that no data node of the view has are dealt out among all.
So every position is handed out once, in the iteration that it belongs to, whoever is there; and a
batch has the same size with one data node as with all of them.
"""

from decod.ids import NodeId
from decod.protocol.core.messages import BeginAggregation
from decod.protocol.core.view import View

_REMEMBERED_MAX = 1024
"""Iterations that a run may go back without that the count begins anew."""


def shares_of(view: View, node_id: NodeId, *, num_shares: int) -> tuple[int, ...]:
    """Return the shares that a data node of `view` reads: its own first, then others'.

    One without capacity is about to leave, and reads none.
    """
    served = sorted((m.data_node_index, m.node_id) for m in view.workers[0])
    own = next((index for index, node in served if node == node_id), None)
    if own is None:
        return ()
    taken = {index for index, _ in served}
    orphaned = [index for index in range(num_shares) if index not in taken]
    dealt = [
        index for turn, index in enumerate(orphaned) if served[turn % len(served)] == (own, node_id)
    ]
    return (own, *dealt)


class Positions:
    """Counts the microbatches that were handed out and never will be trained on.

    Those are the ones that were put off too often, or were held by a data node when it was lost.
    What is put off is told with each batch; what is missing in a batch, and has not been put off,
    is lost. A node that was not there from the first iteration on counts from the first commit that
    it sees.

    Args:
        batch: Microbatches of an iteration, all shares together.

    Attributes:
        num_skipped: Microbatches, so far.
        num_deferred: Put off at present; they are trained on later.
        num_reread: Trained on again, so far, because relays that had learnt from them were lost.
        whole: Whether the count goes back to the run's first iteration.
    """

    def __init__(self, *, batch: int) -> None:
        self.num_skipped = self.num_deferred = self.num_reread = 0
        self.whole = False
        self._batch = batch
        self._counting = False
        self._then: dict[int, tuple[int, int, int]] = {}
        """All counts after each of the last iterations."""

    def begin(self) -> None:
        """Nothing has been committed yet: from here on all is counted."""
        self.num_skipped = self.num_deferred = self.num_reread = 0
        self.whole = self._counting = True

    def committed(self, begun: BeginAggregation) -> None:
        """An iteration is final."""
        new = begun.num_committed - begun.num_reread
        missing = self._batch - new + self.num_deferred - begun.num_deferred
        self.num_reread += begun.num_reread
        if self._counting:
            self.num_skipped += missing
        self._counting, self.num_deferred = True, begun.num_deferred
        counts = self.num_skipped, self.num_deferred, self.num_reread
        self._then[begun.averaging.iteration.number] = counts
        if len(self._then) > _REMEMBERED_MAX:
            del self._then[min(self._then)]

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier iteration: what came after it is trained on again."""
        known = iteration in self._then
        now = self.num_skipped, 0, self.num_reread
        self.num_skipped, self.num_deferred, self.num_reread = self._then.get(iteration, now)
        self.whole, self._counting = self.whole and known, known
        self._then = {i: counts for i, counts in self._then.items() if i <= iteration}
