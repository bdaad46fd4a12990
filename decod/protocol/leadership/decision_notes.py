"""What the leader notes of its decisions."""

from decod.ids import Iteration
from decod.protocol.core.effects import Note, noted
from decod.protocol.core.messages import BeginAggregation


def note_of_opening(aborted: Iteration, next_iteration: Iteration, reason: str) -> Note:
    """Return the note that another attempt at an iteration begins."""
    # Attempt 0 was never trained: it stands for the time before the first members.
    if aborted.attempt == 0:
        return noted("run.opened", iteration=str(next_iteration), reason=reason)
    return noted("iteration.aborted", iteration=str(aborted), reason=reason)


def note_of_commit(
    iteration: Iteration, loss: float, duration_s: float, begun: BeginAggregation
) -> Note:
    """Return the note that an iteration is final."""
    return noted(
        "iteration.committed",
        iteration=str(iteration),
        loss=loss,
        num_tokens=begun.num_tokens,
        num_microbatches=begun.num_committed,
        duration_s=round(duration_s, 6),
        num_deferred=begun.num_deferred,
        **({"num_reread": begun.num_reread} if begun.num_reread else {}),
    )
