"""What two halves of a run may not do: commit an iteration twice (I3), or ignore a new leader (I4).

A part of the checker in `decod.sim.invariants`, which raises what is found here. It does not take
other parameters to be a fork: two halves of a run that repeat each other's iterations may well come
to the same ones, until a batch differs.
"""

from decod.ids import Round
from decod.protocol.events import Event, Received
from decod.protocol.messages import Abort, Commit
from decod.sim.core import Place
from decod.sim.host import Host


class Commits:
    """Remembers in which round each iteration was committed."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], tuple[Round, int, int]] = {}
        """By era and iteration: the round, and the term and version of the view that voted."""

    def decided(self, message: Commit) -> str:
        """Take in a commit that somebody tells of. Returns what is wrong, or nothing."""
        round_ = message.round
        told = (round_, message.view_term, message.view_version)
        first = self._rounds.setdefault((round_.era, round_.iteration), told)
        if first == told:
            return ""
        was, now = (f"{r} by view {version} of term {term}" for r, term, version in (first, told))
        return f"iteration {round_.iteration} is committed twice: in round {was}, and {now}"


def missed(host: Host, place: Place, event: Event | None) -> str:
    """Return what is wrong if a node has been told of a leader's opening and does not follow.

    Args:
        host: The node's.
        place: Where it is, after the event.
        event: What it has just taken in.
    """
    if not isinstance(event, Received) or not isinstance(event.message, (Commit, Abort)):
        return ""
    opening = event.message.opening
    term = opening.view.term
    if not place.in_view or host.node_id not in opening.view or term <= place.term:
        return ""
    return f"it stays in term {place.term} though it is told of round {opening.round} of {term}"
