"""What the leader has decided, and what that opens."""

from dataclasses import dataclass

from decod.ids import Round
from decod.protocol.core.era import Hashes
from decod.protocol.core.messages.scopes import OfBatch, OfRun
from decod.protocol.core.view import Opening, View


@dataclass(frozen=True, slots=True)
class Commit(OfRun):
    """Goes down the tree of the *new* view: the step is final. Decided once, by the leader."""

    round: Round
    opening: Opening
    loss: float
    """Mean over the iteration's committed microbatches. 0 for the opening of the run."""
    num_tokens: int
    """Trained on in the iteration."""
    view_version: int = 0
    """Of the view whose members have voted. Who voted in another one has reduced otherwise."""
    view_term: int = 0
    """Of that view: two leaders may count rounds and views alike."""
    hashes: Hashes = ()
    """Of all stages' parameters after the step, as in `Ready`: who enters compares its own."""


@dataclass(frozen=True, slots=True)
class Abort(OfRun):
    """Goes down the tree of the *new* view: the round never happened; the opening repeats it."""

    round: Round
    opening: Opening
    reason: str
    hashes: Hashes = ()
    """Of what is committed, as in `Commit`."""


@dataclass(frozen=True, slots=True)
class Mend(OfBatch):
    """Goes down the tree of the *new* view: the round goes on without relays that were lost.

    What they carried is done again by others of their stage, from what their neighbours kept.
    """

    round: Round
    view: View
    reason: str
