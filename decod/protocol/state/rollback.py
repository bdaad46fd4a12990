"""States that outlive their stage, and how members go back to one of them.

When the commit of a marked iteration is final (`protocol.core.era`), each node copies its stage's
state and has its host write it; and for every stage some hosts of *other* stages mirror that state
to their disks. Which hosts follows from the view, so it needs no message. A host that lacks room or
time keeps nothing and says nothing: what is there is asked for when a stage is lost. Before a host
answers, it reads what could serve to the last byte, once in an iteration: whoever has gone back
holds nothing else.
"""

import hashlib
from collections.abc import Sequence

from decod.ids import NodeId
from decod.limits import StageBlocks
from decod.protocol.core.context import Context
from decod.protocol.core.effects import FetchState, KeepState, MirrorState, ReadKept
from decod.protocol.core.era import KEPT_MAX, Kept, Mark, Origin, Source, StagePart
from decod.protocol.core.events import (
    JobFinished,
    KeptRead,
    StateFetched,
    StateFetchFailed,
    StateForgotten,
    StateKept,
)
from decod.protocol.core.jobs import Build, Built, Job, Load, Mix, Snapshot, SnapshotTaken
from decod.protocol.core.messages import Suspect
from decod.protocol.core.view import Opening, View
from decod.protocol.state.stage_state import Loaded, StageState
from decod.run.run_config import RunConfig

NUM_MIRRORS = 2
"""Hosts of other stages that keep a copy of each stage's state, where there are so many."""


class Mirrors:
    """What one node's host keeps, and when it keeps more.

    Inputs: `opened`, jobs that have ended, `examine`, `told`. Effects: `KeepState`,
    `MirrorState`, `ReadKept`, jobs.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._copying: list[tuple[Snapshot, Kept]] = []
        """Copies of this node's own state in the making, and what they are to be of."""
        self._marks: tuple[Mark, ...] = ()
        """Of the iteration: only their states can serve."""
        self._reading = set[Kept]()
        self._read = set[Kept]()
        """In this iteration."""

    def opened(self, opening: Opening, *, stepped: bool) -> None:
        """An iteration begins. If the last commit is marked, copy states.

        Args:
            opening: Of the iteration; the context has its view.
            stepped: Whether this node took the step that was committed.
        """
        self._marks = opening.marks
        self._read.clear()
        mark = opening.mark_of(opening.committed.number)
        if mark is None or opening.origin is not None or opening.paused:
            return
        if stepped:
            self._keep_own(mark)
        if mark.mirrored:
            self._mirror(mark)

    def _keep_own(self, mark: Mark) -> None:
        context = self._context
        job = Snapshot(with_optimizer=True)
        stage = context.member.stage_index
        self._copying.append((job, Kept(stage, mark.iteration, mark.hash_of(stage))))
        context.compute.submit(job, self)

    def _mirror(self, mark: Mark) -> None:
        context = self._context
        for stage, roster in enumerate(context.view.rosters):
            mirrors = mirrors_of(context.view, stage)
            if context.node_id not in mirrors:
                continue
            wanted = mark.hash_of(stage)
            # Newcomers are still loading it themselves.
            donors = [m.node_id for m in roster if m.since_iteration < mark.iteration]
            if not donors or context.kept.get((stage, mark.iteration)) == wanted:
                continue
            first = mirrors.index(context.node_id) % len(donors)
            donors = donors[first:] + donors[:first]
            cut = context.view.cut
            self._out.put(MirrorState(tuple(donors), stage, mark.iteration, wanted, cut))

    # --- copies of this node's own state ------------------------------------------------------

    def _take(self, job: Job) -> Kept:
        found = next(entry for entry in self._copying if entry[0] is job)
        self._copying.remove(found)
        return found[1]

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """A copy is there: have it written."""
        assert isinstance(event.result, SnapshotTaken)
        wanted = self._take(job)
        tensors = self._context.tensors
        result = event.result
        output = event.outputs[0]
        here = (self._context.member.stage_index, result.iteration)
        if here != (wanted.stage_index, wanted.iteration):
            tensors.release(output.id)
            return
        tensors.hand_over(output.id)
        keep = KeepState(wanted.iteration, wanted.parameter_hash, result.manifest, output.id)
        self._out.put(keep)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """The device could not make a copy: this one is left out."""
        wanted = self._take(job)
        stage = wanted.stage_index
        self._out.note("state.unkept", stage=stage, iteration=wanted.iteration, reason=reason)

    # --- what is on the disk ------------------------------------------------------------------

    def told(self, event: StateKept | StateForgotten | KeptRead) -> None:
        if isinstance(event, KeptRead):
            self._reading.difference_update(event.states)
            self._read.update(event.states)
            return
        place = (event.stage_index, event.iteration)
        if isinstance(event, StateKept):
            self._context.kept[place] = event.parameter_hash
        else:
            self._context.kept.pop(place, None)

    @property
    def examined(self) -> bool:
        """Whether nothing is being read just now."""
        return not self._reading

    def examine(self) -> None:
        """Have what all could go back to read to its last byte, unless that has been done."""
        useful = {mark.iteration: mark for mark in self._marks}
        wanted = [
            kept
            for kept in inventory(self._context)
            if kept.iteration in useful
            and kept.parameter_hash == useful[kept.iteration].hash_of(kept.stage_index)
            and kept not in self._read | self._reading
        ]
        self._reading.update(wanted)
        if wanted:
            self._out.put(ReadKept(tuple(wanted)))


def inventory(context: Context) -> tuple[Kept, ...]:
    """Return what is on a node's disk, newest first, as far as others need to be told."""
    found = [Kept(*place, parameter_hash) for place, parameter_hash in context.kept.items()]
    newest = sorted(found, key=lambda kept: (-kept.iteration, kept.stage_index))
    return tuple(newest[:KEPT_MAX])


def mirrors_of(view: View, stage_index: int) -> tuple[NodeId, ...]:
    """Return the hosts of other stages that keep a copy of a stage's state.

    Rendezvous hashing: each host has a rank for each stage that depends on nothing else, so when
    hosts come and go few copies change their place. The second is of another stage than the first
    if it can be: then no one stage's end takes both.
    """
    ranked = sorted(
        (m for roster in view.rosters for m in roster if m.stage_index != stage_index),
        key=lambda m: hashlib.sha256(f"{stage_index}/{m.node_id}".encode()).digest(),
    )
    chosen = ranked[:1]
    while len(chosen) < min(NUM_MIRRORS, len(ranked)):
        rest = [m for m in ranked if m not in chosen]
        stages = {m.stage_index for m in chosen}
        chosen.append(next((m for m in rest if m.stage_index not in stages), rest[0]))
    return tuple(m.node_id for m in chosen)


_LOADS_MAX = 3
"""Times that a state is fetched anew because what came can't be loaded."""


class Rollback:
    """One node's way to the state of an era.

        IDLE -> [BUILDING] -> FETCHING -> LOADING -> IDLE, loaded
                     `--> (neighbours) FETCHING both -> MIXING --'

    A node that holds that state already has nothing to do. One that takes over a lost stage builds
    it first. States are fetched from this host's disk if it has them, else from the hosts that the
    opening names. Whoever can't get its state tells the leader, in each iteration anew: that has
    all disks read once more, and plans another era. Who fails again at the same iteration leaves,
    for it must be its own fault; but the leader stays, and plans without what it can't get. A later
    era begins all of this anew; what an earlier one had asked for is dropped.

    Args:
        context: The node's.
        stage: Told what is held.
        loaded: Called when the era's state stands on the device.
    """

    def __init__(self, context: Context, stage: StageState, loaded: Loaded) -> None:
        self._context = context
        self._out = context.out
        self._stage = stage
        self._is_here = loaded
        self._opening: Opening | None = None
        """Of the era, while its state is not here yet."""
        self._job: Job | None = None
        self._awaited: list[int] = []
        """Stages whose states are needed: the node's own, or its neighbours'."""
        self._cut: StageBlocks = ()
        """Of which those stages are."""
        self._part: StagePart | None = None
        """What is needed of them. None: all."""
        self._arrived: dict[int, StateFetched] = {}
        self._num_loads = 0
        self._stuck = ""
        """Why this node could not get its state."""
        self._stuck_at: int | None = None
        """The iteration whose state it could not get last time."""

    @property
    def active(self) -> bool:
        """Whether this node is on its way to a state."""
        return self._opening is not None

    @property
    def _origin(self) -> Origin:
        assert self._opening is not None
        assert self._opening.origin is not None
        return self._opening.origin

    @property
    def _iteration(self) -> int:
        assert self._opening is not None
        return self._opening.anchor.number

    def begin(self, opening: Opening, *, entering: bool, moved: bool) -> None:
        """An era begins for this node. `stage.loaded` says whether it has its state.

        Args:
            opening: With an origin; the context has its view.
            entering: The node was no member before: its stage is built, in the run's first state.
            moved: It was a member of another stage, or what it has built is not there any more.
        """
        lacks = self.active or bool(self._stuck)
        stage = self._stage
        iteration = opening.anchor.number
        self.end()
        self._stuck = ""
        origin = opening.origin
        index = self._context.member.stage_index
        assert origin is not None
        if origin.source is Source.NEIGHBOURS and index not in origin.lost:
            # Nobody goes back.
            if entering:
                stage.enter(iteration)
            elif lacks:
                # It had begun to in an era before: others of its stage are there.
                stage.fetch_back(iteration)
            return
        same = stage.loaded and stage.iteration == iteration and not stage.moved_on
        if same and not (entering or moved):
            return
        stage.unload(iteration)
        if origin.source is Source.START and entering and not moved:
            stage.loaded = True
            return
        self._opening = opening
        self._num_loads = 0
        if moved or origin.source is Source.START:
            cut = self._context.view.cut
            if cut != self._context.built_in:
                self._context.built_in = cut
                self._context.links.rebuilt()
            self._submit(Build(index, cut=cut))
        else:
            self._fetch()

    def end(self) -> None:
        """Wait for nothing any more, and let go of what has arrived."""
        tensors = [event.tensor.id for event in self._arrived.values()]
        self._context.tensors.release(*tensors)
        self._arrived.clear()
        self._opening = self._job = None
        self._awaited.clear()

    def _submit(self, job: Job) -> None:
        self._job = job
        inputs = [self._arrived.pop(stage).tensor.id for stage in self._awaited if self._arrived]
        self._context.compute.submit(job, self, inputs)

    # --- fetching -----------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Ask for what is missing."""
        context = self._context
        iteration = self._iteration
        own = context.member.stage_index
        cut = self._cut = context.view.cut
        part: StagePart | None = None
        if self._origin.source is Source.NEIGHBOURS:
            self._awaited = neighbours_of(self._origin, context.view.rosters, own)
        else:
            self._cut = self._origin.cut
            self._awaited = stages_with(context.run, self._cut, cut, own)
            if not same_stage(context.run, self._cut, cut, own):
                part = StagePart(cut, own)
        self._part = part
        for stage in self._awaited:
            donors = self._donors(stage)
            self._out.note("state.requested", num_donors=len(donors), iteration=iteration)
            wanted = self._hash_of(stage)
            fetch = FetchState(donors, stage, iteration, wanted, cut=self._cut, part=part)
            self._out.put(fetch)

    def _hash_of(self, stage: int) -> str:
        """Return what the parameters of a stage that is fetched must hash to, if that is known."""
        assert self._opening is not None
        mark = self._opening.mark_of(self._iteration)
        kept = self._origin.source is Source.KEPT
        return mark.hash_of(stage) if mark is not None and kept else ""

    @property
    def _wanted_hash(self) -> str:
        """What this node's parameters must hash to in the end, if that is known."""
        assert self._opening is not None
        kept = self._origin.source is Source.KEPT
        own = self._context.member.stage_index
        return self._opening.marked_hash(self._iteration, own) if kept else ""

    def _donors(self, stage: int) -> tuple[NodeId, ...]:
        context = self._context
        me = self._context.node_id
        match self._origin.source:
            case Source.START:
                return (context.view.leader,)
            case Source.NEIGHBOURS:
                roster = context.view.roster(stage)
                donors = [m.node_id for m in roster if m.since_iteration < self._iteration]
                return tuple(donors or [m.node_id for m in roster])
        holders = [node for node in self._origin.holders_of(stage) if node != me]
        # Those that fetch the same begin with different donors.
        roster_ids = [m.node_id for m in context.view.roster(context.member.stage_index)]
        first = (roster_ids.index(me) + self._num_loads) % len(holders) if holders else 0
        holders = holders[first:] + holders[:first]
        if self._num_loads == 0 and self._has(stage):
            holders.insert(0, me)
        return tuple(holders)

    def _has(self, stage: int) -> bool:
        """Whether a stage's state is on this host's disk."""
        if self._context.node_id in self._origin.holders_of(stage):
            return True
        kept = self._context.kept.get((stage, self._iteration))
        return kept is not None and kept == self._hash_of(stage)

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about what this node asked for on its way to an era's state."""
        awaited = self.active and self._job is None and event.stage_index in self._awaited
        same = awaited and (event.cut, event.part) == (self._cut, self._part)
        return same and event.iteration == self._iteration

    def fetched(self, event: StateFetched) -> None:
        tensors = self._context.tensors
        tensors.add(event.tensor)
        if event.stage_index in self._arrived:
            tensors.release(event.tensor.id)
            return
        self._arrived[event.stage_index] = event
        if len(self._arrived) < len(self._awaited):
            return
        manifests = tuple(self._arrived[stage].manifest for stage in self._awaited)
        if self._origin.source is Source.NEIGHBOURS:
            self._submit(Mix(self._iteration, tuple(self._awaited), manifests))
        else:
            self._submit(Load(self._iteration, manifests))

    def fetch_failed(self, event: StateFetchFailed) -> None:
        """No donor gave it."""
        self._give_up(f"the state of iteration {event.iteration} could not be had: {event.reason}")

    def _give_up(self, reason: str) -> None:
        again = self._stuck_at == self._iteration
        leads = self._context.view.leader == self._context.node_id
        self._stuck_at = self._iteration
        self.end()
        if again and not leads:
            self._stage.give_up(reason)
        else:
            self._stuck = reason[:200]
            self.tell()

    def tell(self) -> None:
        """Tell who leads, if this node could not get its state: another may lead by now."""
        context = self._context
        if self._stuck:
            self._out.send(context.view.leader, Suspect(context.node_id, self._stuck))

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """A stage was built, or what came has been loaded."""
        if job is not self._job:
            return
        assert isinstance(event.result, Built)
        self._job = None
        parameter_hash = event.result.parameter_hash
        self._stage.parameter_hash = ""
        if isinstance(job, Build):
            if self._origin.source is not Source.START or self._context.facts.initial_from_leader:
                self._fetch()
                return
        elif isinstance(job, Load) and self._wanted_hash not in ("", parameter_hash):
            self.load_failed("it is not what was committed")
            return
        self._stuck_at = None
        self._stage.parameter_hash = parameter_hash
        self.end()
        self._is_here(now_s)

    def job_failed(self, now_s: float, job: Job, reason: str) -> bool:  # noqa: ARG002
        """What came could not be loaded. If not even a stage can be built, the node can't go on."""
        if isinstance(job, Build):
            return True
        if job is self._job:
            self.load_failed(reason)
        return False

    def load_failed(self, reason: str) -> None:
        """What came could not be loaded: others are asked first now."""
        self._job = None
        self._num_loads += 1
        self._out.note("state.failed", peer="", reason=reason)
        if self._num_loads >= _LOADS_MAX:
            self._give_up(reason)
        else:
            self._fetch()


def stages_with(run: RunConfig, theirs: Sequence[int], own: Sequence[int], stage: int) -> list[int]:
    """Return the stages of one cut that hold the blocks of a stage of another.

    Args:
        run: The run.
        theirs: The one cut.
        own: The other.
        stage: Of the other.
    """
    if same_stage(run, theirs, own, stage):
        return [stage]
    wanted = run.stage_blocks(own)[stage]
    return [
        index
        for index, blocks in enumerate(run.stage_blocks(theirs))
        if index and blocks.start < wanted.stop and wanted.start < blocks.stop
    ]


def same_stage(run: RunConfig, theirs: Sequence[int], own: Sequence[int], stage: int) -> bool:
    """Return whether a stage has the same blocks in two cuts. Stage 0 has in all."""
    if not stage or tuple(theirs) == tuple(own):
        return True
    one, other = run.stage_blocks(theirs), run.stage_blocks(own)
    return max(stage + 1, 1) <= min(len(one), len(other)) and one[stage] == other[stage]


def neighbours_of(origin: Origin, rosters: tuple[tuple[object, ...], ...], stage: int) -> list[int]:
    """Return the nearest relay stages before and behind a lost one that still have members."""
    alive = [i for i in range(1, len(rosters)) if rosters[i] and i not in origin.lost]
    before = [i for i in alive if i < stage][-1:]
    return before + [i for i in alive if i > stage][:1]
