"""A newcomer's first moments as a member: with what was committed, or on the way to it.

    (in the view) --it has followed its stage--> HERE
                  --the last averages are on their way--> WAITING --they have come--> HERE
                  --it has nothing, or WAITING is disturbed--> fetches what stands still

Whatever interrupts the iteration of its entry (a loss, another opening) or comes too late makes it
fetch the state: that is always right, since nothing can be committed without its vote.
"""

from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages import Open
from decod.protocol.core.view import Opening
from decod.protocol.state.replay import Entry, Replay
from decod.protocol.state.stage_state import Loaded, StageState


class Arrival:
    """What one node still lacks when it has entered the view.

    Args:
        context: The node's.
        stage: Told what is held; fetches what nothing else brings.
        loaded: Called when the last averages have come and are stepped through.
    """

    def __init__(self, context: Context, stage: StageState, loaded: Loaded) -> None:
        self._context = context
        self._stage = stage
        self._is_here = loaded
        self._replay: Replay | None = None
        """Brings the last averages; None: nothing is lacking, or it is fetched."""
        self._iteration = context.iteration
        """The iteration of the entry."""

    @property
    def deadline_s(self) -> float | None:
        return self._replay.deadline_s if self._replay is not None else None

    def overdue(self, now_s: float) -> list[Effect]:
        late = self.deadline_s is not None and self.deadline_s <= now_s
        return self.fetch_instead() if late else []

    def enter(self, now_s: float, decision: Open, replay: Replay) -> list[Effect]:
        """The node takes part from now on, and needs the state of the last commit.

        Args:
            now_s: The time.
            decision: With which it enters.
            replay: What it has of that state as a candidate.
        """
        opening = decision.opening
        view_version = decision.view_version if opening.averaged is None else 0
        iteration, stage = opening.anchor.number, self._context.member.stage_index
        wanted = dict(decision.hashes).get(stage, "")
        if not wanted and (mark := opening.mark_of(iteration)) is not None:
            wanted = mark.hash_of(stage)
        pristine = replay.pristine
        entry, effects = replay.enter(now_s, opening, view_version, wanted)
        if entry is Entry.READY:
            self._stage.parameter_hash = replay.parameter_hash
            return [*effects, *replay.end(), *self._stage.holds(iteration)]
        if entry is Entry.WAITING:
            self._replay, self._iteration = replay, opening.iteration
            replay.user = self
            self._stage.lacks(iteration, wanted)
            return effects
        return effects + self._stage.enter(iteration, wanted, pristine=pristine)

    def progressed(self, now_s: float) -> list[Effect]:
        """What was lacking has come nearer, or will not come."""
        replay = self._replay
        if replay is None or replay.waiting:
            return []
        if not replay.arrived:
            return self.fetch_instead()
        self._replay = None
        self._stage.parameter_hash = replay.parameter_hash
        return [*replay.end(), *self._is_here(now_s)]

    def replay_failed(self, now_s: float, reason: str) -> list[Effect]:  # noqa: ARG002
        """A step could not be taken here."""
        return self.fetch_instead()

    def opened(self, opening: Opening) -> list[Effect]:
        """An iteration is opened; another than that of the entry disturbs it."""
        return self.fetch_instead() if opening.iteration != self._iteration else []

    def fetch_instead(self) -> list[Effect]:
        """Fetch what was committed from those who hold it: they can't go on without this node."""
        if self._replay is None:
            return []
        return [*self.end(), *self._stage.fetch_entered()]

    def end(self) -> list[Effect]:
        """Nothing is lacking any more, or something else."""
        replay, self._replay = self._replay, None
        return replay.end() if replay is not None else []
