"""A member's copy of its stage's state: where it comes from, and whom it serves.

| situation | where the state comes from | machine |
|---|---|---|
| the run's first iteration | built from the seed, or fetched from the leader | `Joining` |
| a newcomer that has replayed its stage | the replayed averages | `Replay`, then `Arrival` |
| a newcomer whose replay was disturbed | a member of its stage | `StageState` |
| a member whose parameters differ from most of its stage | a member of its stage | `StageState` |
| the run has gone back to a mark | a disk of the stage, or a mirror's | `Rollback` |
| a stage that was lost without a copy | the mean of its neighbours | `Rollback` |
| the run has begun anew | built from the seed | `Rollback` |

`Mirrors` keeps states on disks at every mark, and `ReplaySource` serves newcomers.
"""

from typing import Protocol

from decod.protocol.core.context import Context
from decod.protocol.core.era import Origin
from decod.protocol.core.events import StateFetched, StateFetchFailed
from decod.protocol.core.messages import Open
from decod.protocol.core.view import Opening
from decod.protocol.state.replay import Entry, Replay
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.state.rollback import Mirrors, Rollback, same_stage
from decod.protocol.state.stage_state import Loaded, StageState


def note_return(decision: Open, context: Context, stage_before: int | None) -> None:
    """Note that the run goes back, and that this node serves another stage.

    Args:
        decision: Begins the era.
        context: Has its view.
        stage_before: Of which the node was a member. None: of none.
    """
    origin = decision.opening.origin
    index = context.member.stage_index
    assert origin is not None
    if decision.opening.view.cut != origin.cut:
        blocks = context.run.stage_blocks(decision.opening.view.cut)[index]
        context.out.note(
            "stage.recut",
            stage=index,
            blocks=f"{blocks.start} to {blocks.stop - 1}" if blocks else "none",
            iteration=decision.opening.committed.number,
        )
        if not (origin.lost or origin.num_repeated):
            _note_stage(context, stage_before, origin)
            return
    # Later decisions of the era say why the iteration was repeated.
    told = decision.reason.startswith(origin.reason)
    context.out.note(
        "run.returned",
        iteration=decision.opening.committed.number,
        source=origin.source.value,
        num_repeated=origin.num_repeated,
        reason=decision.reason if told else origin.reason,
    )
    _note_stage(context, stage_before, origin)


def _note_stage(context: Context, stage_before: int | None, origin: Origin) -> None:
    """Note that this node serves another stage."""
    index = context.member.stage_index
    if stage_before not in (None, index):
        context.why = "all nodes of it were lost" if origin.lost else "the model is cut anew"
        context.out.note("stage.assigned", stage=index, reason=context.why)


class Arrival:
    """What one node still lacks when it has entered the view.

        (in the view) --it has followed its stage--> HERE
                      --the last averages are on their way--> WAITING --they have come--> HERE
                      --it has nothing, or WAITING is disturbed--> fetches what stands still

    Whatever interrupts the iteration of its entry (a loss, another opening) or comes too late makes
    it fetch the state: that is always right, since nothing can be committed without its vote.

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

    def overdue(self, now_s: float) -> None:
        if self.deadline_s is not None and self.deadline_s <= now_s:
            self.fetch_instead()

    def enter(self, now_s: float, decision: Open, replay: Replay) -> None:
        """The node takes part from now on, and needs the state of the last commit.

        Args:
            now_s: The time.
            decision: With which it enters.
            replay: What it has of that state as a candidate.
        """
        opening = decision.opening
        view_version = decision.view_version if opening.averaged is None else 0
        iteration = opening.anchor.number
        stage = self._context.member.stage_index
        wanted = dict(decision.hashes).get(stage, "")
        wanted = wanted or opening.marked_hash(iteration, stage)
        pristine = replay.pristine
        match replay.enter(now_s, opening, view_version, wanted):
            case Entry.READY:
                self._stage.parameter_hash = replay.parameter_hash
                replay.end()
                self._stage.holds(iteration)
            case Entry.WAITING:
                self._replay = replay
                self._iteration = opening.iteration
                replay.user = self
                self._stage.lacks(iteration, wanted)
            case Entry.LOST:
                self._stage.enter(iteration, wanted, pristine=pristine)

    def progressed(self, now_s: float) -> None:
        """What was lacking has come nearer, or will not come."""
        replay = self._replay
        if replay is not None and replay.arrived:
            self._stage.parameter_hash = replay.parameter_hash
            self.end()
            self._is_here(now_s)
        elif replay is not None and not replay.waiting:
            self.fetch_instead()

    def replay_failed(self, now_s: float, reason: str) -> None:  # noqa: ARG002
        """A step could not be taken here."""
        self.fetch_instead()

    def opened(self, opening: Opening) -> None:
        """An iteration is opened; another than that of the entry disturbs it."""
        if opening.iteration != self._iteration:
            self.fetch_instead()

    def fetch_instead(self) -> None:
        """Fetch what was committed from those who hold it: they can't go on without this node."""
        if self._replay is not None:
            self.end()
            self._stage.fetch_entered()

    def end(self) -> None:
        """Nothing is lacking any more, or something else."""
        if self._replay is not None:
            self._replay.end()
        self._replay = None


class Judging(Protocol):
    """Asks for other stages' states, to judge between their members."""

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about a state that it has asked for."""

    def fetched(self, event: StateFetched) -> None:
        """The state is here."""

    def fetch_failed(self, event: StateFetchFailed) -> None:
        """Nobody gives it."""


class StageCopy:
    """One member's copy of its stage's state.

    Args:
        context: The node's.
        loaded: Called when a state that was missing is there.
    """

    def __init__(self, context: Context, loaded: Loaded) -> None:
        self._context = context
        self._loaded = loaded
        self.judging: Judging | None = None
        self.stage = StageState(context, self._is_here)
        self.rollback = Rollback(context, self.stage, self._is_here)
        self.arrival = Arrival(context, self.stage, self._is_here)
        self.mirrors = Mirrors(context)
        self.replay_source = ReplaySource(context, self.stage)

    @property
    def loaded(self) -> bool:
        """Whether the stage's committed state stands on this node's device."""
        return self.stage.loaded

    @property
    def deadline_s(self) -> float | None:
        return self.arrival.deadline_s

    def overdue(self, now_s: float) -> None:
        """Fetch what has not come in time."""
        self.arrival.overdue(now_s)

    def enter(self, now_s: float, decision: Open, replay: Replay) -> None:
        """The node becomes a member: use what it has replayed, or fetch what it lacks."""
        self.arrival.enter(now_s, decision, replay)

    def told(self, decision: Open) -> None:
        """What was committed is known."""

    def mended(self) -> None:
        """The view has lost members: fetch what they may have had on its way to this node."""
        self.arrival.fetch_instead()

    def begin_era(
        self, opening: Opening, stage_before: int | None, *, stage_index: int, pristine: bool
    ) -> None:
        """An era begins: get the state that it starts from.

        Args:
            opening: With an origin.
            stage_before: Of which the node was a member. None: of none.
            stage_index: Of which it is one now.
            pristine: If it was none: whether its device holds what the run began with.
        """
        assert opening.origin is not None
        entering = stage_before is None
        moved = not entering and stage_before != stage_index
        context = self._context
        recut = not same_stage(context.run, context.built_in, opening.view.cut, stage_index)
        self.arrival.end()
        self.stage.parameter_hash = ""
        rebuilds = moved or recut or (entering and not pristine)
        self.rollback.begin(opening, entering=entering, moved=rebuilds)

    def closed(self, now_s: float, opening: Opening, *, stepped: bool) -> None:
        """An iteration is over: serve and keep what was committed.

        Args:
            now_s: The time.
            opening: Says what was committed.
            stepped: Whether this node has taken the step.
        """
        self.mirrors.opened(opening, stepped=stepped)
        self.replay_source.opened(now_s, opening, stepped=stepped)

    def opened(self, opening: Opening) -> None:
        """An iteration begins: fetch anew what is known to be wrong."""
        self.stage.opened()
        self.arrival.opened(opening)
        self.rollback.tell()

    def fetched(self, event: StateFetched) -> None:
        """A state that this node asked for has come."""
        if self.judging is not None and self.judging.takes(event):
            self.judging.fetched(event)
        elif self.rollback.takes(event):
            self.rollback.fetched(event)
        else:
            self.stage.fetched(event)

    def fetch_failed(self, now_s: float, event: StateFetchFailed) -> None:
        """Nobody gives the state."""
        if self.judging is not None and self.judging.takes(event):
            self.judging.fetch_failed(event)
        elif self.rollback.takes(event):
            self.rollback.fetch_failed(event)
        elif self.stage.keeps_own(event):
            self.stage.give_up_own_steps()
            self._is_here(now_s)
        else:
            self.stage.fetch_failed(event)

    def end(self) -> None:
        """The run is over: let go of all that is held."""
        self.arrival.end()
        self.replay_source.end()
        self.rollback.end()

    def _is_here(self, now_s: float) -> None:
        self.stage.loaded = True
        self.arrival.end()
        self._loaded(now_s)
