"""States that outlive their stage: on each node's own disk, and on hosts of other stages.

When the commit of a marked iteration is final (`protocol.core.era`), each node copies its stage's
state and has its host write it; and for every stage some hosts of *other* stages mirror that state
to their disks. Which hosts follows from the view, so it needs no message. A host that lacks room or
time keeps nothing and says nothing: what is there is asked for when a stage is lost. Before a host
answers, it reads what could serve to the last byte, once in an iteration: whoever has gone back
holds nothing else.
"""

import hashlib

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, KeepState, MirrorState, Note, ReadKept
from decod.protocol.core.era import KEPT_MAX, Kept, Mark
from decod.protocol.core.events import JobFinished, KeptRead, StateForgotten, StateKept
from decod.protocol.core.jobs import Job, Snapshot, SnapshotTaken
from decod.protocol.core.view import Opening, View

NUM_MIRRORS = 2
"""Hosts of other stages that keep a copy of each stage's state, where there are so many."""


class Mirrors:
    """What one node's host keeps, and when it keeps more.

    Inputs: `opened`, jobs that have ended, `examine`, `told`. Effects: `KeepState`,
    `MirrorState`, `ReadKept`, jobs.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._copying: list[tuple[Snapshot, Kept]] = []
        """Copies of this node's own state in the making, and what they are to be of."""
        self._marks: tuple[Mark, ...] = ()
        """Of the iteration: only their states can serve."""
        self._reading = set[Kept]()
        self._read = set[Kept]()
        """In this iteration."""

    def opened(self, opening: Opening, *, stepped: bool) -> list[Effect]:
        """An iteration begins. If the last commit is marked, copy states.

        Args:
            opening: Of the iteration; the context has its view.
            stepped: Whether this node took the step that was committed.
        """
        self._marks = opening.marks
        self._read.clear()
        mark = opening.mark_of(opening.committed.number)
        if mark is None or opening.origin is not None or opening.paused:
            return []
        effects = self._keep_own(mark) if stepped else []
        return effects + self._mirror(mark)

    def _keep_own(self, mark: Mark) -> list[Effect]:
        context, job = self._context, Snapshot(with_optimizer=True)
        stage = context.member.stage_index
        self._copying.append((job, Kept(stage, mark.iteration, mark.hash_of(stage))))
        return context.compute.submit(job, self)

    def _mirror(self, mark: Mark) -> list[Effect]:
        context, effects = self._context, list[Effect]()
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
            effects.append(MirrorState(tuple(donors), stage, mark.iteration, wanted))
        return effects

    # --- copies of this node's own state ------------------------------------------------------

    def _take(self, job: Job) -> Kept:
        found = next(entry for entry in self._copying if entry[0] is job)
        self._copying.remove(found)
        return found[1]

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """A copy is there: have it written."""
        assert isinstance(event.result, SnapshotTaken)
        wanted, tensors = self._take(job), self._context.tensors
        result, output = event.result, event.outputs[0]
        here = (self._context.member.stage_index, result.iteration)
        if here != (wanted.stage_index, wanted.iteration):
            return tensors.release(output.id)
        tensors.hand_over(output.id)
        keep = KeepState(wanted.iteration, wanted.parameter_hash, result.manifest, output.id)
        return [keep]

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The device could not make a copy: this one is left out."""
        wanted = self._take(job)
        fields = (
            ("stage", wanted.stage_index),
            ("iteration", wanted.iteration),
            ("reason", reason),
        )
        return [Note("state.unkept", fields)]

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

    def examine(self) -> list[Effect]:
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
        return [ReadKept(tuple(wanted))] if wanted else []


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
