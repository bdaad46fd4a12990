"""What the leader does when a stage has lost its last member: the run goes on, from where it can.

    (a stage is empty) -> ASKING -> (all members have said what is on their disks) -> the next era
                             |--> WAITING for a host that can be spared ---|
                             `--> READING the leader's checkpoint ---------'

The states of one iteration are looked for that all stages can have: kept on disks, of other stages'
hosts too; else the leader's checkpoint, if that is newer or nothing else is whole; else what the
run started from, if that is not long ago. All of that is read to its last byte first, the hosts'
states before they answer (`protocol.state.rollback`); where it was altered or removed, the next
best serves. All members go back there, and compute the same iterations again from the same tokens.
If there is nothing of that kind, the lost stage's weights are made from its neighbours', and nobody
goes back. If the leader itself can't get what was promised all the same, everybody is asked again,
and another era begins; what has failed twice is not tried a third time.

The stage is taken over by a candidate that has prepared it, or by a relay of a stage that has more
than one worker: first one whose disk holds the state, then of the largest stage. If none can be
spared, the run waits for somebody to come. Whatever is lost meanwhile leads back to ASKING; an
elected leader begins there too, since a stage without members shows in the view.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decod.ids import Iteration, NodeId
from decod.limits import StageBlocks
from decod.planner.partition import part_sizes
from decod.protocol.core.context import NodeState
from decod.protocol.core.effects import Effect, EffectSink, ReadCheckpoint
from decod.protocol.core.era import (
    HOLDERS_MAX,
    Hashes,
    Kept,
    Mark,
    Origin,
    Source,
    StateHolders,
    add_mark,
)
from decod.protocol.core.events import CheckpointRead
from decod.protocol.core.messages import NodeLoad
from decod.protocol.core.view import Member, Opening, View
from decod.protocol.leadership.admission import Admission, Candidate
from decod.protocol.leadership.seats import Seats
from decod.run.run_config import RunConfig

_START_INTERVALS_MAX = 2
"""So many intervals between marks the run goes back at most to what it started from."""

_REASON_MAX = 200
"""Characters of what members are told."""

HOLD_S = 5.0
"""How long commits wait for states to be written, so that another cut repeats nothing."""

_TRIES_MAX = 2
"""So often the leader tries to get what has been found whole, and can't be had."""


@dataclass(frozen=True, slots=True)
class EraPlan:
    """How the next era begins."""

    iteration: int
    origin: Origin
    members: tuple[Member, ...]
    """All members, in their new places; candidates that were prepared are among them."""
    cut: StageBlocks
    """How the model is cut."""
    missing: str = ""
    """Why all go back no less far; empty if nothing newer was there to go back to."""

    @property
    def reason(self) -> str:
        """What members are told."""
        return "; ".join(text for text in (self.origin.reason, self.missing) if text)[:_REASON_MAX]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The last rebuilding of a stage, and what it cost."""

    origin: Origin
    iteration: int
    """That the run went on from."""
    duration_s: float
    """From the loss to the first commit after it."""


class Recut:
    """The leader's part in a cut of the model that the operator asks for.

        NONE -> (asked) WANTED -> (the next average is committed) MARKED -> the next era
                                                    `--> (not in time) NONE

    As long as it is WANTED, another cut may take its place.

    While it is MARKED, members write the states of the mark to their disks. Commits wait a little
    for that, so that nothing has to be computed again. Until the era is opened, the old cut holds,
    whatever happens; from then on, the new one.

    Args:
        out: The leading node's.
        timeout_s: How long members have for writing.
    """

    def __init__(self, out: EffectSink[Effect], timeout_s: float) -> None:
        self._out = out
        self._timeout_s = timeout_s
        self.wanted: StageBlocks = ()
        """The new cut. None: none is asked for."""
        self.marked: int | None = None
        """The iteration from which it is to hold."""
        self.hold_by_s: float | None = None
        """Until when commits wait. None: they don't."""
        self.by_s: float | None = None
        """When the leader gives up."""
        self.awaited: tuple[str, ...] = ()
        """Members whose states are not written yet, for people."""

    def mark(self, now_s: float, iteration: int) -> bool:
        """An iteration with an average is committed. Returns whether its states are to be kept."""
        if not self.wanted or self.marked is not None:
            return False
        self.marked = iteration
        self.hold_by_s = now_s + HOLD_S
        self.by_s = now_s + self._timeout_s
        return True

    def take(self) -> StageBlocks:
        """Return the new cut, which holds from now on."""
        cut = self.wanted
        self._forget()
        return cut

    def give_up(self, reason: str) -> None:
        """The old cut stays."""
        if self.wanted:
            self._forget()
            self._out.note("recut.failed", reason=reason)

    def _forget(self) -> None:
        self.wanted = ()
        self.marked = self.by_s = self.hold_by_s = None
        self.awaited = ()


class StageRecovery:
    """The leader's record of marks, and of the stages that it has to have rebuilt.

    Args:
        run: The run's settings.
        start_iteration: The committed iteration whose state the run starts from.
        out: The leading node's.
    """

    def __init__(self, run: RunConfig, start_iteration: int, out: EffectSink[Effect]) -> None:
        self._out = out
        self.marks: tuple[Mark, ...] = ()
        self.origin: Origin | None = None
        """Of the current era, until its first commit."""
        self.checkpoint: int | None = None
        """The newest iteration of which this host has a checkpoint."""
        self._checkpoint_cuts: dict[int, StageBlocks] = {}
        """The cuts of the stages of checkpoints that this host has written, by iteration."""
        self._reading: int | None = None
        """The checkpoint that this host reads, to see whether it is whole."""
        self._whole: int | None = None
        """The one that was."""
        self.has_start = True
        """Whether members can be given what the run started from."""
        self.pending: tuple[int, ...] = ()
        """Stages that nobody is left of."""
        self.waiting = False
        """Nobody can be spared for one of them."""
        self.hopeless = False
        """Nothing can bring one of them back."""
        self._refused = Counter[tuple[Source, int]]()
        """What the leader itself could not get, though it was promised, since the last commit."""
        self._stuck = set[NodeId]()
        """Members that have told that they can't get what the era begins with."""
        self.last: Rebuilt | None = None
        self._num_stages = run.stages.num_relay_stages + 1
        """As the run file says."""
        self._every = run.protocol.snapshot_every_iterations
        self._start_iteration = start_iteration
        self._lost_s = 0.0
        self._base = 0
        """Iteration that the era began with."""
        self._loads: tuple[NodeLoad, ...] | None = None
        """What the members have on their disks; None: not all have answered yet."""
        self.recut = Recut(out, run.protocol.iteration_timeout_s)

    @property
    def needed(self) -> bool:
        """Whether another era is to begin."""
        return self.broken or self.recut.marked is not None

    @property
    def broken(self) -> bool:
        """Whether the run can't go on without another era."""
        return bool(self.pending or self._stuck)

    # --- what happens -------------------------------------------------------------------------

    def resume(self, now_s: float, opening: Opening) -> None:
        """A new leader goes on from where an opening has brought the run."""
        self.marks = opening.marks
        self.origin = opening.origin
        self._lost_s = now_s
        self._base = opening.committed.number

    def opened(self, now_s: float, view: View, iteration: int) -> None:
        """The leader announces a view. If a stage is empty that was not, all must be asked.

        Args:
            now_s: The time.
            view: The first one had members of all stages.
            iteration: Last committed.
        """
        lost = view.empty_stages
        self._loads = None
        self.waiting = False
        self._stuck &= view.by_id.keys()
        new = [stage for stage in lost if stage not in self.pending]
        if new and not self.pending and self.origin is None:
            self._lost_s = now_s
        self.pending = lost
        for stage in new:
            self._out.note("stage.lost", stage=stage, iteration=iteration)

    def told(self, loads: tuple[NodeLoad, ...]) -> None:
        """All members have said what is on their disks."""
        self._loads = loads

    def refuse(self, node: NodeId, leader: NodeId) -> bool:
        """A member can't get the state that the era begins with; whether another era may help."""
        if self.origin is None or node in self._stuck:
            return False
        # A member that fails twice leaves; the leader can't.
        self._refused[self.origin.source, self._base] += node == leader
        self._stuck.add(node)
        self._loads = None
        return True

    def written(self, iteration: int, cut: StageBlocks) -> None:
        """This host has written a checkpoint, whose stages are of this cut."""
        self.checkpoint = iteration
        self._checkpoint_cuts[iteration] = cut

    def read(self, event: CheckpointRead) -> None:
        """This host has read its checkpoint: that is what it rests on, or an older one."""
        if event.iteration == self._reading:
            self._reading = None
            self.checkpoint = self._whole = event.newest

    def committed(
        self,
        now_s: float,
        iteration: int,
        hashes: Hashes,
        *,
        before: int | None,
        cut: StageBlocks = (),
    ) -> None:
        """An iteration is final. It is marked if it is the first since it was time.

        Args:
            now_s: The time.
            iteration: Its number.
            hashes: Of all stages.
            before: The iteration of the average before this one. None: there is none in this.
            cut: How the model is cut.
        """
        every = self._every
        due = every and before is not None and iteration // every > before // every
        # Nobody goes back to what comes between the mark of another cut and its era.
        due = due and self.recut.marked is None
        recut = before is not None and self.recut.mark(now_s, iteration)
        if recut:
            self._lost_s = now_s
        if due or recut:
            # What only another cut needs does not travel.
            self.marks = add_mark(self.marks, Mark(iteration, hashes, cut, mirrored=bool(due)))
        self._refused.clear()
        self._stuck.clear()
        origin = self.origin
        self.origin = None
        if origin is None:
            return
        self.last = Rebuilt(origin, self._base, now_s - self._lost_s)
        if not origin.lost:
            duration_s = round(now_s - self._lost_s, 3)
            text = ", ".join(map(str, cut))
            self._out.note("run.recut", blocks=text, iteration=self._base, duration_s=duration_s)
            return
        self._out.note(
            "stage.rebuilt",
            stage=", ".join(map(str, origin.lost)),
            source=origin.source.value,
            num_repeated=origin.num_repeated,
            duration_s=round(now_s - self._lost_s, 3),
        )

    def _begun(self, plan: EraPlan) -> None:
        """The next era begins."""
        self.origin = plan.origin
        self._base = plan.iteration
        self.marks = tuple(mark for mark in self.marks if mark.iteration <= plan.iteration)
        self._reading = self._whole = None
        self._stuck.clear()
        if self.checkpoint is not None and self.checkpoint > plan.iteration:
            # It is of a future that has been given up.
            self.checkpoint = None

    # --- what is to be done -------------------------------------------------------------------

    def decide(
        self, view: View, iteration: int, admission: Admission, seats: Seats
    ) -> EraPlan | None:
        """Return how the next era begins, once that is known; see `hopeless` and `waiting` too.

        A checkpoint is read before all go back to it: who has gone back has nothing else.

        Args:
            view: Members; some stages have none.
            iteration: Last committed.
            admission: Its candidates that are prepared enter with the era.
            seats: Who leaves moves nowhere.
        """
        if not self.needed or self._loads is None:
            return None
        if not self.broken:
            return self._recut_plan(view, iteration)
        if self.recut.marked is not None:
            self.recut.give_up("a stage was lost, or a member could not load its state")
        prepared = {node: c for node, c in admission.candidates.items() if c.stands_by}
        holders = self._holders(view, iteration, prepared)
        found = self._best(view, iteration, holders)
        if found is None:
            self.hopeless = not self._lacking_stages(view)[1]
            return None
        base, source, named, kept_in = found
        # If another stage was lost before this era has committed anything: what that cost too.
        before, lost = self._before
        mixed = source is Source.NEIGHBOURS
        lost = (self._lacking_stages(view)[0] if mixed else self.pending) or lost
        origin = Origin(source, lost, before + iteration - base, named, kept_in)
        served = {candidate.stage_index for candidate in prepared.values()}
        lacking = [stage for stage in self.pending if stage not in served]
        moves, cut = self._seated(view, lacking, origin, seats)
        if moves is None:
            first = not self.waiting
            self.waiting = True
            if first:
                self._out.note("stage.waiting", reason=self.describe())
            return None
        if source is Source.CHECKPOINT and self._whole != base:
            self._read(base)
            return None
        for node in moves:
            admission.moved(node)
        members = [_moved(member, moves, base) for member in view.members]
        if cut == view.cut:
            members += admission.members(Iteration(base, 0), Iteration(base, 0))
        else:
            self.recut.take()
        missing = self._missing(range(base + 1, iteration + 1), holders)
        plan = EraPlan(base, origin, tuple(members), cut, missing)
        self._begun(plan)
        return plan

    def _seated(
        self, view: View, lacking: Sequence[int], origin: Origin, seats: Seats
    ) -> tuple[dict[NodeId, int] | None, StageBlocks]:
        """Return which relays change their stage, and the cut; None if nobody can be spared.

        Then another cut may do, into fewer stages, if one is asked for.
        """
        wanted = self.recut.wanted
        moves = _moves(view, lacking, origin, seats)
        if moves is None and wanted and origin.source is not Source.NEIGHBOURS:
            return seats_in(view, wanted), wanted
        return moves, view.cut

    def _recut_plan(self, view: View, iteration: int) -> EraPlan | None:
        """Return how the era begins with which the model is cut anew; None: not yet, or never."""
        recut = self.recut
        assert self._loads is not None
        kept = {load.node_id: load.kept for load in self._loads}
        mark = next((mark for mark in self.marks if mark.iteration == recut.marked), None)
        if mark is None:
            recut.give_up("members were still writing their states when newer ones came")
            return None
        named = []
        awaited = []
        for stage, roster in enumerate(view.rosters):
            state = Kept(stage, mark.iteration, mark.hash_of(stage))
            # Newcomers have none to write.
            older = [member for member in roster if member.since_iteration < mark.iteration]
            awaited += [m.label for m in older if state not in kept.get(m.node_id, ())]
            nodes = dict.fromkeys([*(m.node_id for m in older), *kept])
            holders = tuple(node for node in nodes if state in kept.get(node, ()))
            named.append((stage, holders[:HOLDERS_MAX]))
        recut.awaited = tuple(awaited)
        if awaited or not all(holders for _, holders in named):
            return None
        num_repeated = iteration - mark.iteration
        holders_of = tuple(StateHolders(*each) for each in named)
        origin = Origin(Source.KEPT, (), num_repeated, holders_of, mark.cut)
        places = seats_in(view, recut.wanted)
        if places is None:
            recut.give_up("it has more stages than there are relays")
            return None
        members = tuple(_moved(member, places, mark.iteration) for member in view.members)
        plan = EraPlan(mark.iteration, origin, members, recut.take())
        self._begun(plan)
        return plan

    def _stages_of(self, cut: StageBlocks) -> range:
        """Return the stages of a cut."""
        return range(len(cut) + 1 if cut else self._num_stages)

    @property
    def _before(self) -> tuple[int, tuple[int, ...]]:
        """What an era that has committed nothing had cost already, and the stages it was for."""
        return (0, ()) if self.origin is None else (self.origin.num_repeated, self.origin.lost)

    def _missing(self, newer: range, holders: Mapping[Kept, Sequence[NodeId]]) -> str:
        """Say which marks in a range of iterations nobody can go back to."""
        texts: list[str] = []
        for mark in reversed(self.marks):
            whole = self._stages_of(mark.cut)
            kept = (Kept(s, mark.iteration, mark.hash_of(s)) for s in whole)
            stages = ", ".join(str(each.stage_index) for each in kept if not holders.get(each))
            if mark.iteration in newer and stages:
                texts.append(
                    f"no whole state of stage {stages} after iteration {mark.iteration} is left"
                )
        return "; ".join(texts)

    def _lacking_stages(self, view: View) -> tuple[tuple[int, ...], bool]:
        """Return stages of which nobody has anything, and whether that may still change.

        Whoever has gone back has nothing else, until it has loaded what it has gone back to.
        """
        if self.origin is None:
            return self.pending, False
        loading = self._loading
        lacking = [
            stage
            for stage, roster in enumerate(view.rosters)
            if all(member.node_id in loading for member in roster)
        ]
        stuck = [all(m.node_id in self._stuck for m in view.roster(stage)) for stage in lacking]
        return tuple(lacking), not (self._mixed or all(stuck))

    def _read(self, iteration: int) -> None:
        if self._reading != iteration:
            self._reading = iteration
            self.waiting = False
            self._out.put(ReadCheckpoint(iteration))

    def _holders(
        self, view: View, iteration: int, prepared: Mapping[NodeId, Candidate]
    ) -> dict[Kept, list[NodeId]]:
        """Return who has which state, in the order of the view."""
        found = defaultdict[Kept, list[NodeId]](list)
        for load in self._loads or ():
            for kept in load.kept:
                found[kept].append(load.node_id)
        for node, candidate in prepared.items():
            for kept in candidate.join.kept:
                found[kept].append(node)
        mark = next((mark for mark in self.marks if mark.iteration == iteration), None)
        if mark is None or mark.cut != view.cut:
            return found
        # Nothing was committed since: members still hold it themselves.
        loading = self._loading
        for member in (each for roster in view.rosters for each in roster):
            stage = member.stage_index
            nodes = found[Kept(stage, iteration, mark.hash_of(stage))]
            new = member.since_iteration >= iteration if self.origin is None else self._mixed
            if not new and member.node_id not in loading and member.node_id not in nodes:
                nodes.append(member.node_id)
        return found

    @property
    def _loading(self) -> set[NodeId]:
        """Members that hold nothing yet."""
        return {load.node_id for load in self._loads or () if load.state == NodeState.SYNCING}

    @property
    def _mixed(self) -> bool:
        """Whether nobody has gone back with the era."""
        return self.origin is not None and self.origin.source is Source.NEIGHBOURS

    def _best(
        self, view: View, iteration: int, holders: Mapping[Kept, Sequence[NodeId]]
    ) -> tuple[int, Source, tuple[StateHolders, ...], StageBlocks] | None:
        """Return the newest iteration that all stages have a state of, where those are, and the cut
        that they are of."""
        options: list[tuple[int, Source, tuple[StateHolders, ...], StageBlocks]] = []
        for mark in reversed(self.marks):
            stages = self._stages_of(mark.cut)
            nodes = [holders.get(Kept(s, mark.iteration, mark.hash_of(s)), ()) for s in stages]
            if all(nodes) and mark.iteration <= iteration:
                named = [StateHolders(s, tuple(nodes[s][:HOLDERS_MAX])) for s in stages]
                options.append((mark.iteration, Source.KEPT, tuple(named), mark.cut))
        if self.checkpoint is not None and self.checkpoint <= iteration:
            cut = self._checkpoint_cuts.get(self.checkpoint, ())
            here = tuple(StateHolders(s, (view.leader,)) for s in self._stages_of(cut))
            options.append((self.checkpoint, Source.CHECKPOINT, here, cut))
        num_since_start = iteration - self._start_iteration
        if self.has_start and num_since_start <= _START_INTERVALS_MAX * self._every:
            options.append((self._start_iteration, Source.START, (), ()))
        options = [o for o in options if self._refused[o[1], o[0]] < _TRIES_MAX]
        if options:
            return max(options, key=lambda option: option[0])
        lost, changes = self._lacking_stages(view)
        if changes or 0 in lost or len(lost) >= view.num_stages - 1:
            return None
        return iteration, Source.NEIGHBOURS, (), view.cut

    @property
    def lost(self) -> str:
        """Why the run has to end if it is hopeless."""
        return f"stage {(self.pending or self._before[1])[0]} has lost its last member"

    def describe(self) -> str:
        """Return what `status` says while a stage is missing; empty if none is."""
        if not self.needed:
            return ""
        if not self.broken:
            return "the model is about to be cut anew: states are being written to disks"
        stages = ", ".join(map(str, self.pending or self._before[1]))
        if self.waiting:
            return (
                f"stage {stages} is lost, and no other stage can spare a node: training waits for"
                " a host to take it over; `decod run recut` has the others take its blocks"
            )
        if self._reading is not None:
            return f"stage {stages} is lost: reading the checkpoint of iteration {self._reading}"
        return f"stage {stages} is lost: looking for its state on the other hosts"


def seats_in(view: View, cut: StageBlocks) -> dict[NodeId, int] | None:
    """Return which relays change their stage with another cut; None if there are too few.

    With as many stages, nobody does. Else relays are dealt out in the order of their stages, so
    that most of what they hold is of use.
    """
    relays = [m for roster in view.rosters[1:] for m in roster]
    if len(cut) == view.num_stages - 1 and all(view.rosters[1:]):
        return {}
    if len(relays) < len(cut):
        return None
    sizes = part_sizes(len(relays), len(cut))
    stages = [stage for stage, size in enumerate(sizes, 1) for _ in range(size)]
    return {member.node_id: stage for member, stage in zip(relays, stages, strict=True)}


def _moved(member: Member, moves: Mapping[NodeId, int], base: int) -> Member:
    stage_index = moves.get(member.node_id, member.stage_index)
    # It says who may still lack a state: with the era, all get that of `base`.
    since = min(member.since_iteration, base)
    return replace(member, stage_index=stage_index, since_iteration=since)


def _moves(
    view: View, lost: Sequence[int], origin: Origin, seats: Seats
) -> dict[NodeId, int] | None:
    """Return which relays take the lost stages over; None if too few can be spared."""
    workers = [m for roster in view.workers[1:] for m in roster if not seats.leaves(m.node_id)]
    num_workers = Counter(member.stage_index for member in workers)
    moves: dict[NodeId, int] = {}
    for stage in lost:
        holders = origin.holders_of(stage)
        spare = [
            (member.node_id not in holders, -num_workers[member.stage_index], member.node_id)
            for member in workers
            if num_workers[member.stage_index] > 1 and member.node_id not in moves
        ]
        if not spare:
            return None
        *_, best = min(spare)
        num_workers[view.by_id[best].stage_index] -= 1
        moves[best] = stage
    return moves
