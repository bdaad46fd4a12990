"""A data node's share of each batch: who reads which, and what becomes of every microbatch.

A share is what one data node index stands for in every batch: see `decod.data.order`. A data node
reads the share of its own index; those that no data node of the view has are dealt out among all.
So every position is handed out once, in the iteration that it belongs to, whoever is there; and a
batch has the same size with one data node as with all of them (invariant I5).

`Positions` counts what was handed out, `Deferrals` holds what waits for a later iteration,
`Learners` remembers who has learnt from what, and `ShareReport` is what the leader is told.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.era import MARKS_MAX
from decod.protocol.core.fingerprints import digest_of
from decod.protocol.core.jobs import Loss
from decod.protocol.core.messages import BeginAggregation, Report
from decod.protocol.core.view import View
from decod.protocol.flows.substitutes import Path
from decod.protocol.strategy.microbatch import HeldMicrobatch, Phase

_REMEMBERED_MAX = 1024
"""Iterations that a run may go back without that the count begins anew."""


def summed(losses: Sequence[tuple[float, int, int]]) -> float:
    """Return a sum of losses that is, over the number of microbatches, the mean over all tokens.

    Args:
        losses: Each the sum of some microbatches' losses, with how many these are, and how many
            tokens they have.
    """
    num = sum(each for _, each, _ in losses)
    num_tokens = sum(each for _, _, each in losses)
    if all(tokens * num == each * num_tokens for _, each, tokens in losses):
        return math.fsum(loss for loss, _, _ in losses)
    means = (loss / each * tokens for loss, each, tokens in losses if each)
    return num * math.fsum(means) / num_tokens


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
        self._counting = True
        self.num_deferred = begun.num_deferred
        counts = self.num_skipped, self.num_deferred, self.num_reread
        self._then[begun.averaging.iteration.number] = counts
        if len(self._then) > _REMEMBERED_MAX:
            del self._then[min(self._then)]

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier iteration: what came after it is trained on again."""
        known = iteration in self._then
        now = self.num_skipped, 0, self.num_reread
        self.num_skipped, self.num_deferred, self.num_reread = self._then.get(iteration, now)
        self.whole = self.whole and known
        self._counting = known
        self._then = {i: counts for i, counts in self._then.items() if i <= iteration}


_DEFERRALS_MAX = 3
"""Iterations that a microbatch may be put off to before it is given up, and counted as lost."""

WAITING_MAX = 1 << 16
"""Microbatches that may wait to be trained on again. They take some 20 MB."""


@dataclass(slots=True)
class _Deferral:
    """A microbatch that was put off."""

    times: int = 0
    not_before: int = 0
    """First iteration that may take it again."""
    again: bool = False
    """The microbatch has been trained on before."""


class Deferrals:
    """What one data node has put off.

    Either no flow took them, or they are to be trained on again (`Learners`). The latter are never
    given up. An iteration takes some of them beside its own batch, and so becomes little longer.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self._known: dict[MicrobatchId, _Deferral] = {}
        self._marked: dict[int, dict[MicrobatchId, _Deferral]] = {}
        """What was put off at the newest iterations whose states are kept."""

    def __contains__(self, microbatch: object) -> bool:
        return microbatch in self._known

    @property
    def microbatches(self) -> set[MicrobatchId]:
        """Those that have not been trained on."""
        return {m for m, each in self._known.items() if not each.again}

    @property
    def again(self) -> set[MicrobatchId]:
        """Those that are to be trained on again."""
        return {m for m, each in self._known.items() if each.again}

    def read_again(self, microbatches: Collection[MicrobatchId]) -> None:
        """Have microbatches trained on again, from the context's iteration on."""
        new = [m for m in sorted(microbatches) if m not in self._known]
        new = new[: max(0, WAITING_MAX - len(self._known))]
        self._known.update((microbatch, _Deferral(again=True)) for microbatch in new)
        if new:
            num_waiting = len(self.again)
            self._out.note("learning.repeated", num_microbatches=len(new), num_waiting=num_waiting)

    def put_off(self, microbatch: MicrobatchId) -> None:
        """A microbatch waits for the next iteration."""
        deferral = self._known.setdefault(microbatch, _Deferral())
        deferral.times += 1
        deferral.not_before = self._context.iteration.number + 1

    def committed(
        self, folded: Iterable[MicrobatchId], put_off: Iterable[MicrobatchId], *, marked: bool
    ) -> None:
        """The iteration is final: what was folded needs no second chance.

        Args:
            folded: Microbatches of the iteration.
            put_off: Those that are put off now.
            marked: States of the iteration are kept: the run may go back to it.
        """
        for microbatch in folded:
            self._known.pop(microbatch, None)
        for microbatch in put_off:
            self.put_off(microbatch)
        iteration = self._context.iteration.number
        if marked:
            self._marked[iteration] = {m: replace(each) for m, each in self._known.items()}
            for earlier in sorted(self._marked)[:-MARKS_MAX]:
                del self._marked[earlier]

    def go_back(self, iteration: int) -> None:
        """The run goes on from an earlier state: so does what was put off."""
        # A later iteration draws its microbatches again.
        then = self._marked.get(iteration, self._known)
        self._known = {m: replace(each) for m, each in then.items() if m.iteration <= iteration}

    def due(self, shares: Sequence[int], *, num_again: int) -> list[MicrobatchId]:
        """Return what the context's iteration takes up again, and note what is given up.

        Args:
            shares: Of the iteration's batch that are this data node's.
            num_again: At most so many that have been trained on before.
        """
        iteration = self._context.iteration.number
        due = list[MicrobatchId]()
        for microbatch, deferral in sorted(self._known.items()):
            if microbatch.iteration == iteration and microbatch.data_node_index not in shares:
                # It was put off in an iteration that is repeated now, and another has its share.
                del self._known[microbatch]
            elif deferral.again:
                if num_again and deferral.not_before <= iteration:
                    due.append(microbatch)
                    num_again -= 1
            elif deferral.not_before <= iteration and deferral.times > _DEFERRALS_MAX:
                del self._known[microbatch]
                self._out.note("microbatch.lost", microbatch=str(microbatch))
            elif deferral.not_before <= iteration:
                due.append(microbatch)
        return due


_Life = tuple[NodeId, int]
"""A member, and the iteration with which it was admitted."""


@dataclass(slots=True)
class _Phase:
    """The iterations between two averages."""

    missing: set[int]
    """Fragments that have not been averaged since."""
    lives: dict[MicrobatchId, dict[int, _Life]] = field(default_factory=dict)
    """Who has learnt from each microbatch, by its place on the path."""


class Learners:
    """The relays that have learnt from one data node's microbatches.

    Where members step by themselves, what a relay has learnt since the last average is lost with
    it. With `sync.reread`, the data nodes then have its microbatches trained on again. Each data
    node remembers one relay of each stage for each of its microbatches:

        trained on --an average--> forgotten                      (it is used at once)
        trained on --an average--> sending --used--> forgotten    (it travels until then)
             `------- the relay is lost -------> lacking --trained on again--> trained on

    Where fragments are averaged in turn, it takes an average of each. A relay is lost when the view
    lacks it, or has it as a later life. What it had put into an average that travels is lost too,
    because the others average again without it, unless all of its stage have that average. A
    microbatch that is trained on again passes through all stages, but only the relays of stages
    that lacked it are remembered: the others have had it before. In a stage that has it from a lost
    relay alone, its new relay is remembered too: should the average be dropped, the stage has it
    all the same.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._phases: deque[_Phase] = deque()
        """Oldest first. They hold `WAITING_MAX` microbatches at most: the oldest are forgotten."""
        self._lacking: dict[MicrobatchId, set[int]] = {}
        """Places on the path whose relays have learnt in vain."""
        self._lost = set[MicrobatchId]()
        """Of those: microbatches that have not been taken yet."""
        self._seen = (0, 0)
        """Term and version of the view that was looked at last."""
        self._begin()

    def _begin(self) -> None:
        fragments = range(1, self._context.run.sync.fragments + 1)
        self._phases.append(_Phase({*fragments}))

    def committed(
        self,
        done: Mapping[MicrobatchId, HeldMicrobatch],
        averaged: int | None,
        *,
        arrived: bool = False,
    ) -> None:
        """An iteration of the context's view is final.

        Args:
            done: This data node's share of it.
            averaged: The fragment whose local phase it has ended. 0: that of all. None: none.
            arrived: It has ended with an average that had travelled.
        """
        context = self._context
        if not context.run.sync.reread:
            return
        self._look()  # Who was lost in this iteration is not in its average.
        members = context.view.by_id
        lives = self._phases[-1].lives
        for microbatch, held in done.items():
            lacking = self._lacking.pop(microbatch, None)
            if lacking is not None:
                lacking |= self._replaced(microbatch)
            lives.setdefault(microbatch, {}).update(
                (place, (relay, members[relay].since_iteration))
                for place, relay in enumerate(held.path)
                if lacking is None or place in lacking
            )
        self._lost.difference_update(done)
        if arrived:
            self._arrived()
        if averaged is not None:
            self._averaged(averaged)
        num_more = sum(len(phase.lives) for phase in self._phases) - WAITING_MAX
        for phase in self._phases:
            while num_more > 0 and phase.lives:
                del phase.lives[next(iter(phase.lives))]
                num_more -= 1

    def _arrived(self) -> None:
        """Forget what all members have now: what was sent."""
        self._phases = deque(phase for phase in self._phases if phase.missing)

    def _averaged(self, fragment: int) -> None:
        """Forget what all members have now: what was sent, or what is averaged at once."""
        self._arrived()
        for phase in self._phases:
            phase.missing -= phase.missing if not fragment else {fragment}
        if not self._context.run.sync.overlap:
            self._arrived()
        self._begin()

    def _replaced(self, microbatch: MicrobatchId) -> set[int]:
        """Forget lost relays that had learnt from a microbatch. Return their places."""
        members = self._context.view.by_id
        found = set[int]()
        for lives in (phase.lives.get(microbatch, {}) for phase in self._phases):
            for place, (relay, since) in [*lives.items()]:
                if relay not in members or members[relay].since_iteration != since:
                    del lives[place]
                    found.add(place)
        return found

    def take_lost(self) -> set[MicrobatchId]:
        """Return microbatches that are to be trained on again, each once."""
        self._look()
        lost = self._lost
        self._lost = set()
        return lost

    def _look(self) -> None:
        """Look for lost relays, if the context's view is a new one."""
        view = self._context.view
        before = self._seen
        self._seen = (view.term, view.version)
        if before == self._seen:
            return
        members = {(m.node_id, m.since_iteration) for m in view.members}
        travelled = self._context.opening.travelled
        for phase in self._phases:
            # Places on the path are stages counted from the first of the relays.
            kept = set() if phase.missing else {stage - 1 for stage, _ in travelled}
            for microbatch, lives in phase.lives.items():
                lost = (place for place, life in lives.items() if life not in members)
                if gone := [place for place in lost if place not in kept]:
                    self._lost.add(microbatch)
                    self._lacking.setdefault(microbatch, set()).update(gone)
                    for place in gone:
                        del lives[place]

    def clear(self) -> None:
        """The run goes back: what was learnt is repeated."""
        self._phases.clear()
        self._lacking.clear()
        self._lost.clear()
        self._begin()


class ShareReport:
    """The account of one data node's share in the context's iteration.

    The report goes once, when all relays have done their part of the share. If the iteration can't
    be ended with it, the data node asks for the iteration to be repeated instead.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self.deferrals = Deferrals(context)
        self.done: dict[MicrobatchId, HeldMicrobatch] = {}
        """Home."""
        self.losses: dict[MicrobatchId, Loss] = {}
        self.put_off: set[MicrobatchId] = set()
        """Put off in this iteration; becomes a deferral when the iteration is committed."""
        self.owing: dict[MicrobatchId, set[NodeId]] = {}
        """Of microbatches whose path was changed: who has taken a lost relay's place, and not yet
        said that it is done."""
        self._sent = True
        self.failed = True
        """The leader has been asked to repeat the iteration, or there is none."""

    def reset(self) -> None:
        """Forget the iteration; what had been put off before it stays put off."""
        for record in (self.done, self.losses, self.put_off, self.owing):
            record.clear()
        self._sent = self.failed = True

    def open(self) -> None:
        """The share is to be reported, for the first time or again in a new view."""
        self._sent = self.failed = False

    def committed(self, *, marked: bool) -> None:
        """The iteration is final. `marked`: its states are kept."""
        self.deferrals.committed(self.done, self.put_off, marked=marked)

    def ask_again(self, reason: str) -> None:
        """Ask the leader to repeat the iteration."""
        self._sent = self.failed = True
        report = Report(
            iteration=self._context.iteration,
            num_committed=0,
            digest=0,
            num_deferred=1,
            loss_sum=0.0,
            num_tokens=0,
            view_version=self._context.view.version,
            failure=reason[:200],
        )
        self._out.send(self._context.view.leader, report)

    def rerouted(self, microbatch: MicrobatchId, before: Path, path: Path) -> tuple[NodeId, ...]:
        """A microbatch's path was changed. Return the relays that owe it a pass."""
        owing = self.owing.setdefault(microbatch, set())
        owing.intersection_update(path)
        owing.update(set(path) - set(before))
        return tuple(sorted(owing))

    def mended(self, microbatch: MicrobatchId, relay: NodeId) -> None:
        """A relay that took a lost one's place has folded a microbatch in."""
        owing = self.owing.get(microbatch, set())
        owing.discard(relay)
        if not owing:
            self.owing.pop(microbatch, None)

    def report(
        self, waiting: Collection[MicrobatchId], held: Mapping[MicrobatchId, HeldMicrobatch]
    ) -> None:
        """Tell the leader, once, when all relays have done their part of this node's share.

        What is left to do then concerns nobody else: the relays' reductions need not wait for it.
        Microbatches that are `waiting` have not been sent, those that are `held` are under way.
        """
        returning = [m for m, each in held.items() if each.phase is Phase.RETURNING]
        if self._sent or waiting or self.owing or len(returning) < len(held):
            return
        self._sent = True
        done = [*self.done, *returning]
        losses = [self.losses[m] for m in done]
        again = self.deferrals.again
        put_off = self.put_off - again | self.deferrals.microbatches - set(done)
        report = Report(
            iteration=self._context.iteration,
            num_committed=len(done),
            digest=digest_of(done),
            num_deferred=len(put_off),
            loss_sum=summed([(loss.loss, 1, loss.num_tokens) for loss in losses]),
            num_tokens=sum(loss.num_tokens for loss in losses),
            view_version=self._context.view.version,
            num_reread=len(again.intersection(done)),
        )
        self._out.send(self._context.view.leader, report)
