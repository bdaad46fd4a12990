"""The leader's decisions: who takes part, when a batch is done, what is final.

    GATHERING -> TRAINING -> AGGREGATING -> TRAINING -> ... -> PAUSED

The leader is one of the data nodes. It opens an iteration with a view of its members; data nodes
report their share of the batch; it says BEGIN AGGREGATION; when the vote of all members comes back
up the tree, it decides *once*: commit, or abort. Either decision opens the next iteration, in a
message that every member gets down the tree. Membership changes nowhere else:

- a candidate is assigned a stage (`Join` -> `Assign`), prepares it (`Prepared`), and enters with
  the next commit; while a stage is empty it enters at once;
- a suspect is pinged; if it does not answer it is removed. A relay is done without in the same
  iteration (`Mend`); the loss of a data node repeats the iteration;
- a node that leaves is left out at the next commit, unless it is its stage's last;
- a node that wants another capacity, none for a pause, has it from the next opening on that
  no loss has made, unless its stage would stop.

If a stage loses its last member after an iteration has been committed, the leader asks all members
what is on their disks, and begins another era of the run: see `protocol.leadership.stage_recovery`.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Any

from decod.ids import AveragingId, Iteration, NodeId
from decod.limits import StageBlocks
from decod.protocol.core.context import Context
from decod.protocol.core.effects import BanLiar, CompleteRun
from decod.protocol.core.events import earliest
from decod.protocol.core.fingerprints import add_digests
from decod.protocol.core.messages import (
    NOT_FINITE,
    AuditResult,
    BeginAggregation,
    Capacity,
    CapacityAnswer,
    CatchUp,
    Join,
    Leave,
    Mend,
    Message,
    NodeLoad,
    Open,
    Outcome,
    Pong,
    Prepared,
    Ready,
    Refuse,
    Report,
    StandOut,
    Suspect,
)
from decod.protocol.core.view import Member, Opening, Role, View, fault_of, orphans
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.election import Succession
from decod.protocol.leadership.quorum import LastDecisions, Quorum, electors_of
from decod.protocol.leadership.relay_audits import RelayAudits, Verdict
from decod.protocol.leadership.seats import Seats
from decod.protocol.leadership.stage_recovery import StageRecovery
from decod.protocol.leadership.suspicions import Around, IterationProgress, Suspicions
from decod.protocol.leadership.sync_schedule import SyncSchedule
from decod.protocol.leadership.utilisation import Polling
from decod.protocol.strategy.data_share import summed
from decod.protocol.strategy.strategy import Strategy

_FAILURES_MAX = 5
"""Attempts at one iteration that may fail with all stages present before the run is stopped.
Iterations without progress are not among them: whatever holds them up may pass."""

_STUCK_FAILURES = 2
"""Attempts at one iteration that may fail before candidates enter that have not followed."""

_USUAL_ITERATIONS = 4
"""An iteration may always take so many times as long as the last one."""

_LATE_ENTRY_AFTER_S = 5.0
"""How long a client waits for a commit first. Short iterations are not disturbed."""

_RECUT_POLL_S = 0.5
"""Pause between two questions whether all members have written what another cut begins with."""

_NAMES_MAX = 3
"""So many members that enter or leave are told by name."""

_NO_AUDITS_DRAWN = Random(0)  # noqa: S311 - whoever audits gives another.


class LeaderState(Enum):
    GATHERING = "gathering"
    """Some stage has too few members, or only paused ones."""
    TRAINING = "training"
    AGGREGATING = "aggregating"
    PAUSED = "paused"
    """All iterations are done, or the run can't go on: the result is being kept."""
    FINISHED = "finished"


UNDER_WAY = (LeaderState.TRAINING, LeaderState.AGGREGATING)


class Batch:
    """One iteration after another: its reports and its vote, and how long it may take.

    Args:
        timeout_s: Least time without progress before the leader repeats it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._reports: dict[NodeId, Report] = {}
        self.begun: BeginAggregation | None = None
        """What the batch holds, once all data nodes have reported."""
        self.vote: Ready | None = None
        """Of all members."""
        self.vote_term = 0
        """The term that they have voted in."""
        self.by_s: float | None = None
        """When the iteration is repeated; None: never, nobody can work on it."""
        self._timeout_s = timeout_s
        self._start_s = 0.0
        self._usual_s = 0.0
        self._progressed_s = 0.0

    def begin(self, now_s: float, *, runs: bool) -> None:
        """Another iteration is opened. `runs`: all that it takes is there."""
        self._begin_again()
        self._start_s = now_s
        self.by_s = None
        if runs:
            self.progressed(now_s)

    def resume(self, now_s: float) -> None:
        """The iteration goes on in another view."""
        self._begin_again()
        self.progressed(now_s)

    def _begin_again(self) -> None:
        self._reports.clear()
        self.begun = self.vote = None

    @property
    def due_s(self) -> float:
        """When the iteration last got on, or until when it would usually last."""
        return max(self._progressed_s, self._start_s + self._usual_s)

    def progressed(self, now_s: float) -> None:
        self._progressed_s = now_s
        self.by_s = now_s + max(self._timeout_s, _USUAL_ITERATIONS * self._usual_s)

    def report(self, sender: NodeId, message: Report, view: View) -> BeginAggregation | None:
        """Take in the report of a data node. Return what the batch holds if it was the last."""
        assert self.begun is None, "the batch is whole: nothing more enters it"
        self._reports[sender] = message
        if len(self._reports) < len(view.data_nodes):
            return None
        reports = self._reports.values()
        self.begun = BeginAggregation(
            AveragingId(message.iteration, view.version),
            num_committed=sum(r.num_committed for r in reports),
            digest=add_digests(r.digest for r in reports),
            loss_sum=summed([(r.loss_sum, r.num_committed, r.num_tokens) for r in reports]),
            num_tokens=sum(r.num_tokens for r in reports),
            num_deferred=sum(r.num_deferred for r in reports),
            num_reread=sum(r.num_reread for r in reports),
        )
        return self.begun

    def missing(self, view: View) -> str:
        """Return what an iteration without progress waits for, as far as the leader knows."""
        late = [m.label for m in view.data_nodes if m.node_id not in self._reports]
        return f"the batches of {', '.join(late)}" if late else "the votes of all members"

    def committed(self, now_s: float) -> float:
        """Return how long the iteration took."""
        self._usual_s = now_s - self._start_s
        return self._usual_s


class Leader:
    """The state that only the leader has. Driven by its own node's `NodeMachine`.

    Args:
        context: That node's, whose view may be behind.
        strategy: That node's.
        around: Sends by way of other members.
        rng: Draws whose work is audited.
    """

    def __init__(
        self,
        context: Context,
        strategy: Strategy,
        around: Around = lambda *_: 0,
        rng: Random = _NO_AUDITS_DRAWN,
    ) -> None:
        node_id = self.node_id = context.node_id
        run = self.run = context.run
        facts = context.facts
        out = self._out = context.out
        self._strategy = strategy
        self.start_iteration = facts.start_iteration
        config = run.protocol
        start = facts.start_iteration
        self.state = LeaderState.GATHERING
        num_stages = run.stages.num_relay_stages + 1
        self.view = View(version=0, leader=node_id, term=1, num_stages=num_stages, members=())
        self.iteration = Iteration(start + 1, 0)
        self.committed = Iteration(start, 0)
        self.sync = SyncSchedule(run, facts, out)
        self.seats = Seats(run.sync, out)
        self.admission = Admission(run, facts, self.seats, out, lambda: self.started)
        self.recovery = StageRecovery(run, start, out)
        self.loss: float | None = None
        self.commits_blocked = False
        self._batch = Batch(config.iteration_timeout_s)
        self.quorum = Quorum(node_id, out)
        self.suspicions = Suspicions(config, self.admission, self.quorum, out, around)
        self.audits = RelayAudits(run, rng, out)
        self.decisions = LastDecisions()
        self._num_failures = 0
        self._num_stalls = 0
        self.failure = ""
        self._completed = False
        """The driver has been told that all iterations are done."""
        self.polling = Polling(config, self.admission, self.seats, out)
        self._late_entry_s: float | None = None
        """When clients are let in that wait to enter."""

    # --- time ---------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        members_s = earliest(self.suspicions.deadline_s, self.admission.deadline_s)
        recut = self.recovery.recut
        timer_s = earliest(self._batch.by_s, self.audits.by_s, recut.hold_by_s, recut.by_s)
        return earliest(members_s, timer_s, self.polling.due_s, self._late_entry_s)

    @property
    def started(self) -> bool:
        """Whether the members hold what nobody could build again."""
        return self.committed.number > self.start_iteration or self.iteration.era > 0

    def take_over(self, now_s: float, won: Succession, begun: BeginAggregation | None) -> None:
        """Finish the iteration if the last leader may have, as `begun` announced it; else repeat
        it.
        """
        opening = won.last.opening
        view = replace(won.view, term=won.term)
        self.view = view
        self.iteration = opening.iteration
        self.committed = opening.committed
        self.sync.resume(opening)
        self.decisions.opened = won.last
        self.recovery.resume(now_s, opening)
        self.quorum.committed(view, electors_of(opening))
        self.polling.start(now_s)
        self.polling.renumber(won.term)
        self.suspicions.renumber(won.term)
        old = [] if won.old == self.node_id else [won.old]
        event, gone = won.told
        reason = gone if old else "the leader's term was called in question"
        for node in old:
            self._out.note(event, peer=node, reason=reason)
        if opening.paused:
            self.state = LeaderState.PAUSED
        elif won.hashes and begun is not None and begun.num_committed:
            self.state = LeaderState.AGGREGATING
            self._batch.begun = begun
            self._batch.vote = Ready(AveragingId(self.iteration, view.version), won.hashes)
            self._batch.vote_term = won.view.term
            for node in old:
                self.seats.leave_out(node)
            self._out.note("iteration.kept", iteration=str(self.iteration), reason=reason)
            self.decide(now_s)
            return
        view = self._next_view(without=old, admit=False)
        self._open(now_s, view, reason=reason, goodbye=old)

    def overdue(self, now_s: float) -> None:
        if gone := self.suspicions.overdue(now_s, self.view):
            self.remove(now_s, gone)
        if self._batch.by_s is not None and self._batch.by_s <= now_s:
            self._batch.progressed(now_s)
            held = self._held and self._batch.vote is not None
            if not (held or self.suspicions.stalled(now_s, self.view, self.seats.loads.values())):
                self._num_stalls += 1
                why = f"no progress in time, {self._batch.missing(self.view)} did not come"
                self.repeat(now_s, why, counts=False)
        if self.polling.due_s is not None and self.polling.due_s <= now_s:
            self._query(now_s)
        if self._late_entry_s is not None and self._late_entry_s <= now_s:
            self._late_entry_s = None
            if self.state is LeaderState.TRAINING and (clients := self._clients_that_wait()):
                self._let_in(now_s, clients)
        if self.audits.by_s is not None and self.audits.by_s <= now_s:
            self._judge(now_s, self.audits.overdue(now_s, self.view))
        recut = self.recovery.recut
        if recut.hold_by_s is not None and recut.hold_by_s <= now_s:
            recut.hold_by_s = None
            self.decide(now_s)
        if recut.by_s is not None and recut.by_s <= now_s:
            names = ", ".join(recut.awaited[:_NAMES_MAX]) or "members"
            recut.give_up(f"{names} did not write their states to their disks in time")
            self.decide(now_s)

    # --- messages ---------------------------------------------------------------------------------

    def received(  # noqa: C901 - a line each.
        self, now_s: float, sender: NodeId, message: Message
    ) -> None:
        """Take in a message for the leader."""
        self.admission.heard(now_s, sender)
        match message:
            case Join():
                self.join(now_s, sender, message)
            case Prepared():
                self.prepared(now_s, sender, message)
            case Suspect(node, reason) if reason == NOT_FINITE:
                self._not_finite(now_s, sender, node)
            case Suspect():
                self.suspicions.suspected(now_s, sender, message, self.progress)
            case Pong(nonce):
                self._answered(now_s, sender, nonce)
            case Leave():
                self.leave(now_s, sender, message)
            case Capacity():
                self.capacity(now_s, sender, message)
            case CatchUp():
                self.catch_up(sender, message)
            case Report():
                self.report(now_s, sender, message)
            case StandOut():
                self.audits.stand_out(self.view, sender, message)
            case AuditResult():
                self._judge(now_s, self.audits.found(now_s, self.view, sender, message))

    # --- joining ------------------------------------------------------------------------------

    def join(self, now_s: float, sender: NodeId, join: Join) -> None:
        """A candidate offers itself, or repeats its offer."""
        if self.admission.outdated(sender, join):
            return
        needed = self.state is LeaderState.GATHERING or sender in self.view
        if not needed and self.suspicions.cooldowns.refuse(now_s, sender):
            return
        member = sender in self.view and sender not in self.admission.candidates
        if member and not self.admission.refusal(join, self.view.num_stages):
            if self.admission.repeated(sender, join):
                self.decisions.send(sender, self._out)
                return
            self.remove(now_s, {sender: "restarted"})
        self.quorum.readmit(sender)
        self.admission.join(self.view, sender, join)
        self.admission.heard(now_s, sender)

    def prepared(self, now_s: float, sender: NodeId, message: Prepared) -> None:
        """A candidate stands ready; it enters now if the run waits for it, else at a commit."""
        self.admission.prepared(self.view, sender, message)
        candidate = self.admission.candidates.get(sender)
        client = candidate is not None and candidate.join.role is Role.CLIENT
        if client and self._late_entry_s is None:
            self._late_entry_s = now_s + _LATE_ENTRY_AFTER_S
        gathering = self.state is LeaderState.GATHERING
        if self.quorum.lacking and self.admission.any_prepared:
            self.retry(now_s)
        elif self.recovery.needed:
            self.begin_era(now_s)
        elif gathering and self.admission.enough(self.view, self.sync.anchor, started=self.started):
            self._open(now_s, self._next_view(), reason="every stage has its members")

    # --- doubts and leaving -------------------------------------------------------------------

    @property
    def progress(self) -> IterationProgress:
        """How far the run is."""
        under_way = self.state in UNDER_WAY
        return IterationProgress(self.view, self._batch.due_s, under_way)

    def unreachable(self, now_s: float, node: NodeId, *, ping: bool, reason: str) -> None:
        """A message to `node` could not be delivered; if it was one ping too many, it is gone."""
        if self.suspicions.unreachable(now_s, self.view, node, reason, ping=ping):
            self.remove(now_s, {node: reason})

    def _answered(self, now_s: float, sender: NodeId, nonce: int) -> None:
        """Who was asked whether it lives does. If it was given up, others may not be needed now."""
        self.suspicions.probes.answered(sender, nonce)
        later_life = sender in self.admission.candidates  # It has to prepare first.
        # That a liar lives helps nobody: with it, the iteration would only be repeated again.
        lied = sender in self.audits.counts.liars
        if not (later_life or lied) and self.quorum.returned(sender):
            self.retry(now_s)

    def leave(self, now_s: float, sender: NodeId, message: Leave) -> None:
        if self.admission.candidates.pop(sender, None) is not None or sender not in self.view:
            return
        self.quorum.dismiss(sender)
        if message.at_once:
            self.remove(now_s, {sender: message.reason})
        elif not self.seats.leaves(sender):
            self.seats.leave(sender, message.reason)
            needed = self.started and sender in self.seats.still_needed(self.view)
            if self.state is LeaderState.GATHERING and not needed:
                self.remove(now_s, {sender: message.reason})
            else:
                self.seats.note_leaving(self.view, sender)

    def capacity(self, now_s: float, sender: NodeId, message: Capacity) -> None:
        """A member wants another capacity: it has it from the next opening on."""
        member = self.view.by_id.get(sender)
        if member is None:
            return
        if self.state is LeaderState.PAUSED:
            self._out.send(sender, CapacityAnswer(message.request_id, "all iterations are done"))
            return
        self.seats.ask(self.view, member, message)
        if self.state is LeaderState.GATHERING and self.seats.resizes(self.view):
            reason = f"{member.label} changes its capacity"
            self._open(now_s, self._next_view(), reason=reason)

    def catch_up(self, sender: NodeId, message: CatchUp) -> None:
        """Repeat the last decision to a node that may have missed it."""
        begun = self._batch.begun
        if sender in self.view and message.iteration == self.iteration and begun is not None:
            if self.decisions.mended is not None:
                self._out.send(sender, self.decisions.mended)
            self._out.send(sender, begun)
        else:
            self.decisions.send(sender, self._out)

    def remove(
        self, now_s: float, nodes: dict[NodeId, str], *, admit: bool = False, mends: bool = True
    ) -> None:
        """Go on without some nodes, unless the run has lost a stage: in this iteration or another.

        `mends`: what others have computed from these nodes' work is right.
        """
        for node, reason in nodes.items():
            self.suspicions.probes.forget(node)
            if not admit:
                self.admission.lost(node, reason)
            self.seats.forget(node)
            if node in self.view and node not in self.quorum.lacking:
                self._out.note("member.lost", peer=node, reason=reason)
        missing = dict.fromkeys((*nodes, *self.quorum.lacking))
        gone = [node for node in missing if node in self.view]
        if not gone:
            return
        # What others want can wait until an iteration ends in order: now they are needed as they
        # are.
        view = self._next_view(without=gone, admit=admit, resize=False)
        # Who is back and stands prepared votes for nobody else, even if it can't enter yet.
        back = self.admission.ready_candidates if admit else set[NodeId]()
        if not self.quorum.allows(back.union(view.by_id)):
            self.quorum.wait_for(gone, self.view)
            return
        names = ", ".join(self.view.by_id[node].label for node in gone)
        reason = f"lost {names} ({nodes.get(gone[0], 'gone')})"
        under_way = not admit and self.state in UNDER_WAY
        if view.empty_stages and self.started and self.state is LeaderState.PAUSED:
            stage = view.empty_stages[0]
            lost = f"stage {stage} has lost its last member, and nobody else holds its weights"
            self.finish(reason=lost, failed=True)
        elif mends and under_way and survives(self.view, view, gone):
            self._go_on_without(now_s, view, reason, gone)
        else:
            goodbye = gone if mends else ()  # Liars hear of their ban instead.
            self._open(now_s, view, reason=reason, goodbye=goodbye)

    def retry(self, now_s: float) -> None:
        """Go on without the members that are waited for, if a quorum is there by now."""
        self.remove(now_s, {}, admit=True)

    # --- iterations -------------------------------------------------------------------------------

    def report(self, now_s: float, sender: NodeId, message: Report) -> None:
        """A data node's share is done; when all are, the batch is."""
        member = self.view.by_id.get(sender)
        if member is None or member.role is not Role.DATA or self.state not in UNDER_WAY:
            return
        if message.iteration != self.iteration:
            return
        if message.failure:
            self.repeat(now_s, message.failure, counts=False)
            return
        if self.state is LeaderState.AGGREGATING or message.view_version != self.view.version:
            return
        self._batch.progressed(now_s)
        begun = self._batch.report(sender, message, self.view)
        if begun is not None and begun.num_committed == 0:
            self.repeat(now_s, "no microbatch found a way through", counts=True)
        elif begun is not None:
            self.state = LeaderState.AGGREGATING
            self._out.send(self.node_id, begun)

    def voted(self, now_s: float, vote: Ready) -> None:
        """All members have voted (or one against): decide, unless commits are blocked."""
        late = vote.averaging != AveragingId(self.iteration, self.view.version)
        if late or self.state is not LeaderState.AGGREGATING:
            return
        if failure := self.sync.failure(self._batch.begun, vote):
            self.repeat(now_s, failure, counts=True)
        else:
            self._batch.vote = vote
            self._batch.vote_term = self.view.term
            self._batch.progressed(now_s)
            self.audits.begin(now_s, self.view, vote.averaging)
            self.decide(now_s)

    @property
    def _held(self) -> bool:
        """Whether commits wait."""
        return self.commits_blocked or self.recovery.recut.hold_by_s is not None

    def block_commits(self, now_s: float, *, blocked: bool) -> None:
        self.commits_blocked = blocked
        self.decide(now_s)

    def decide(self, now_s: float) -> None:
        """Commit the iteration. The only place where a commit is made."""
        begun = self._batch.begun
        vote = self._batch.vote
        if self._held or self.audits.pending or vote is None or begun is None:
            return
        assert self.committed.number == self.iteration.number - 1, "commits leave no gap"
        assert self.committed.era == self.iteration.era, (self.committed, self.iteration)
        self.committed = self.iteration
        self._num_failures = 0
        self._num_stalls = 0
        self.suspicions.committed()
        self.quorum.committed(self.view)
        self.audits.committed(self.view)
        duration_s = self._batch.committed(now_s)
        self.loss = begun.loss_sum / begun.num_committed
        commit = self.sync.committed(begun, vote, duration_s)
        self._out.note(
            "iteration.committed",
            iteration=str(self.iteration),
            loss=self.loss,
            num_tokens=begun.num_tokens,
            num_microbatches=begun.num_committed,
            duration_s=round(duration_s, 6),
            num_deferred=begun.num_deferred,
            **({"num_reread": begun.num_reread} if begun.num_reread else {}),
            **({"average_delay": commit.average_delay} if commit.average_delay else {}),
        )
        self.recovery.committed(
            now_s,
            self.iteration.number,
            vote.hashes,
            before=commit.before,
            cut=self.view.cut,
        )
        done = 0 < self.run.num_iterations <= self.iteration.number
        averaged = commit.before is not None
        self.seats.committed(self.view, averaged=averaged, whole=commit.whole, last=done)
        gone = self.seats.departing(self.view)
        staff = self.view.members if self.started else None
        comes = self.admission.committed(self.committed, self.sync.anchor, staff) and not done
        resized = self.seats.resizes(self.view) or self.seats.relieves(self.view)
        changed = gone or comes or (not done and resized)
        view = self._next_view(without=gone, admit=comes) if changed else self.view
        epoch = 0 if changed else self._strategy.facts.agreed_epoch
        next_iteration = replace(self.iteration, number=self.iteration.number + 1, attempt=1)
        opening = self._opening(next_iteration, view, paused=done, epoch=epoch)
        told = (self.loss, begun.num_tokens, self.view.version, self._batch.vote_term)
        message = Open(self.iteration, Outcome.COMMITTED, opening, "", vote.hashes, *told)
        self._announce(now_s, message, goodbye=gone)
        if done:
            self.state = LeaderState.PAUSED
            self._batch.by_s = None
            self._query(now_s)

    def repeat(self, now_s: float, reason: str, *, counts: bool) -> None:
        """Repeat the iteration with the same members and new flows."""
        if counts and not (self.view.idle_stages or self.quorum.lacking):
            self._num_failures += 1
        if self._num_failures >= _FAILURES_MAX:
            times = f"iteration {self.iteration.number} failed {self._num_failures} times"
            self.give_up(f"{times}, last: {reason}")
        else:
            # Candidates follow commits. If none come they fetch the state as members: with them the
            # run may have a quorum without whoever holds it up.
            level = self._num_failures + self._num_stalls < _STUCK_FAILURES
            self._open(now_s, self._next_view(level=level), reason=reason)

    def give_up(self, reason: str) -> None:
        """The run can't go on: what it has learnt is kept first, and then it ends for everybody."""
        if self.failure or self.state is LeaderState.FINISHED:
            return
        self.failure = reason
        self._completed = True
        self.state = LeaderState.PAUSED
        self._batch.by_s = None
        self._out.put(CompleteRun(self.committed.number))

    def finish(self, *, reason: str, failed: bool) -> None:
        """End the run for everybody."""
        if self.state is LeaderState.FINISHED:
            return
        self.state = LeaderState.FINISHED
        self._batch.by_s = self.polling.due_s = None
        opening = self._opening(_again(self.iteration), self.view)
        # Without a quorum the others may go on, led by somebody else.
        word = Refuse(reason, over=not self.quorum.lacking)
        aside = [node for node in self.suspicions.cooldowns.nodes if node not in self.view]
        outside = dict.fromkeys([*self.admission.candidates, *aside])
        self._out.send_all((node for node in outside if node != self.node_id), word)
        ended = Open(self.iteration, Outcome.ENDED, opening, reason[:200], failed=failed)
        self.decisions.opened = ended
        self._out.send(self.node_id, ended)

    def _open(
        self, now_s: float, view: View, *, reason: str, goodbye: Sequence[NodeId] = ()
    ) -> None:
        """Open another attempt at the iteration."""
        aborted = self.iteration
        next_iteration = _again(self.iteration)
        opening = self._opening(next_iteration, view, paused=self.state is LeaderState.PAUSED)
        last = self.decisions.opened
        hashes = last.hashes if last is not None else ()
        outcome = Outcome.REPEATED if aborted.attempt else Outcome.BEGUN
        message = Open(aborted, outcome, opening, reason[:200], hashes)
        # Attempt 0 was never trained: it stands for the time before the first members.
        if aborted.attempt:
            self._out.note("iteration.aborted", iteration=str(aborted), reason=reason)
        else:
            self._out.note("run.opened", iteration=str(next_iteration), reason=reason)
        self._announce(now_s, message, goodbye=goodbye)

    def _opening(self, next_iteration: Iteration, view: View, **how: Any) -> Opening:
        assert self.committed < next_iteration, (self.committed, next_iteration)
        electors = self.quorum.told_with(view)
        recovery = self.recovery
        # While an average travels, all would have to wait for it.
        travels = self._strategy.facts.average_travels
        if not travels and self.seats.hurry(view):
            self.sync.hasten(next_iteration)
        how |= {"marks": recovery.marks, "origin": recovery.origin}
        how |= self.sync.told(self.committed, next_iteration, view)
        opening = Opening(next_iteration, self.committed, view, electors=electors, **how)
        self.sync.opened(opening)
        return opening

    def _announce(self, now_s: float, message: Open, *, goodbye: Sequence[NodeId]) -> None:
        """Make a decision known, and start the iteration that it opens."""
        opening = message.opening
        assert opening.iteration > self.iteration, "members would drop it as one that they know"
        assert opening.view.version >= self.view.version, (opening.view.version, self.view.version)
        assert opening.view is self.view or fault_of(opening.view) is None, "it would be refused"
        self.decisions = LastDecisions(message)
        self.audits.reset()
        self.view = opening.view
        self.iteration = opening.iteration
        self.quorum.opened(self.view)
        for node in goodbye:
            self.seats.forget(node)
        paused = opening.paused
        complete = not self.view.idle_stages
        if not paused:
            self.state = LeaderState.TRAINING if complete else LeaderState.GATHERING
        self._batch.begin(now_s, runs=complete and not paused)
        self._out.send(self.node_id, message)
        if self.sync.early == self.iteration.number:
            self._out.note("average.hastened", iteration=str(self.iteration))
        self._out.send_all(goodbye, message)
        self.quorum.wait_for(self.admission.entered(self.view), self.view)
        self.recovery.opened(now_s, self.view, self.committed.number)
        if self.recovery.needed:
            self._query(now_s)
        self.seats.opened(self.view)

    # --- other views of the same iteration --------------------------------------------------------

    def _clients_that_wait(self) -> list[Member]:
        """Return the clients that may enter the iteration in hand.

        All others know which servers it was opened with (`protocol.strategy.servers.placement`),
        and so must they. So none enters until the next commit if a server has been lost meanwhile.
        """
        opened = self.decisions.opened
        view = self.view
        if opened is None or opened.opening.iteration != self.iteration or opened.opening.paused:
            return []
        if opened.opening.view.keepers != view.keepers or self.quorum.lacking:
            return []
        members = self.admission.members(self.committed, self.sync.anchor, view.members)
        return [m for m in members if m.role is Role.CLIENT and view.roster(m.stage_index)]

    def _let_in(self, now_s: float, clients: Sequence[Member]) -> None:
        """Go on with the iteration with these clients, too.

        A batch may take an hour. Clients hold nothing that others rely on, so nobody needs to wait
        for them.
        """
        opened = self.decisions.opened
        assert opened is not None
        new = {member.node_id for member in clients}
        # An earlier life of it may be in the view still.
        others = [member for member in self.view.members if member.node_id not in new]
        view = self.view.successor((*others, *clients), leader=self.node_id)
        names = ", ".join(member.label for member in clients[:_NAMES_MAX])
        reason = f"{names} came in" if len(clients) <= _NAMES_MAX else f"{len(clients)} came in"
        electors = self.quorum.told_with(view)
        word = replace(opened, opening=replace(opened.opening, view=view, electors=electors))
        mend = Mend(self.iteration, view, reason)
        self.decisions.opened = word
        self.admission.entered(view)
        self._out.note("clients.entered", iteration=str(self.iteration), reason=reason)
        self._resume_in(now_s, view, mend)
        self._out.send_all(sorted(new), word)

    def _go_on_without(self, now_s: float, view: View, reason: str, gone: Sequence[NodeId]) -> None:
        """Go on with the iteration without some relays or clients: others do their part again."""
        # What opened the iteration may have been lost with whom they were to have it from.
        left = orphans(self.view, gone, fanout=self.run.protocol.tree_fanout)
        self._out.note("iteration.mended", iteration=str(self.iteration), reason=reason)
        for node in left:
            self.decisions.send(node, self._out)
        mend = Mend(self.iteration, view, reason[:200])
        self._resume_in(now_s, view, mend)
        self._out.send_all(gone, mend)
        self.seats.opened(view)

    def _resume_in(self, now_s: float, view: View, mend: Mend) -> None:
        """Go on with the iteration in another view."""
        self._batch.resume(now_s)
        self.view = view
        self.state = LeaderState.TRAINING
        self.quorum.opened(view)
        self.audits.reset()
        self.decisions.mended = mend
        self._out.send(self.node_id, mend)

    def _next_view(
        self,
        *,
        without: Sequence[NodeId] = (),
        admit: bool = True,
        level: bool = True,
        resize: bool = True,
    ) -> View:
        """Return a view of the next version.

        Args:
            without: Members that go.
            admit: Candidates that are prepared enter.
            level: Only if they are level with their stage.
            resize: Members get the capacities that they have asked for.
        """
        members = [m for m in self.view.members if m.node_id not in without]
        if admit:
            staff = members if self.started and level else None
            entering = self.admission.members(self.committed, self.sync.anchor, staff)
            members = _with(members, entering)
        if resize:
            members = self.seats.resized(members)
        return self.view.successor(self.seats.relieved(members), leader=self.node_id)

    # --- another cut --------------------------------------------------------------------------

    def recut(self, now_s: float, cut: StageBlocks) -> None:
        """The operator wants the model cut anew: at the next average, or at once if the run waits
        for somebody to take over a stage that is lost, or for its first members."""
        recut = self.recovery.recut
        if recut.marked is not None:
            self._out.note("recut.failed", reason="another one is under way")
            return
        if not (self.started or self.view.members):
            # Nobody has anything yet that is of a stage.
            self.view = replace(self.view, cut=cut, num_stages=len(cut) + 1)
            self.admission.recut(self.view.num_stages)
            self._query(now_s)
            return
        recut.wanted = cut
        if self.recovery.waiting:
            self.begin_era(now_s)
        elif self.state not in UNDER_WAY:
            recut.give_up("the run is not training")

    # --- lost stages and polls --------------------------------------------------------------------

    def begin_era(self, now_s: float) -> None:
        """Go on without what a stage has lost, if it is known how and somebody can take it over."""
        recovery = self.recovery
        if self.commits_blocked and not recovery.broken:
            return  # A checkpoint is being copied.
        plan = recovery.decide(self.view, self.committed.number, self.admission, self.seats)
        if recovery.hopeless:
            reason = f"{recovery.lost}, and its weights are nowhere"
            self.finish(reason=reason, failed=True)
            return
        if plan is None:
            self.decide(now_s)  # It may have waited for an era that does not come.
            return
        era = self.iteration.era + 1
        self.committed = Iteration(plan.iteration, 0, era)
        if plan.origin.num_repeated:
            self.loss = None
        self._num_failures = 0
        self.seats.begin_era()
        view = self.view.successor(plan.members, leader=self.node_id, cut=plan.cut)
        self.sync.begin_era(self.committed, plan.origin, view.num_stages)
        if plan.cut != self.view.cut:
            self.admission.recut(view.num_stages)
        opening = self._opening(Iteration(plan.iteration + 1, 1, era), view)
        message = Open(self.iteration, Outcome.ROLLED_BACK, opening, plan.reason)
        self._announce(now_s, message, goodbye=())

    def stuck(self, now_s: float, sender: NodeId, reason: str) -> None:
        """A member can't get what the era begins with: ask all again what is there."""
        if sender in self.view and self.recovery.refuse(sender, self.node_id):
            self.polling.due_s = now_s
            self._out.note("return.failed", peer=sender, reason=reason)

    def loads_told(self, now_s: float, loads: tuple[NodeLoad, ...]) -> None:
        """The answers of all members have come up the tree."""
        self.polling.told(loads, self.view)
        if self.state is LeaderState.PAUSED and not self._completed:
            # All have got as far: nobody misses the last commit if the end overtakes it.
            self._completed = True
            self._out.put(CompleteRun(self.committed.number))
        self.recovery.told(loads)
        self.begin_era(now_s)
        if self.recovery.recut.marked is not None:
            self.polling.due_s = now_s + _RECUT_POLL_S

    def _query(self, now_s: float) -> None:
        """Ask all members how busy they are and, if a stage is lost, what they keep."""
        view = self.view
        polling = self.polling
        with_kept = self.recovery.needed
        polling.ask(now_s, self.iteration, view, with_kept=with_kept)
        if lacking := self.quorum.lacking:
            # Those who are gone can't answer; whoever comes back is needed.
            polling.told((), view)
            gone = {*lacking} - self.admission.candidates.keys()
            self.suspicions.probes.ask_all(now_s, gone, "gone")
            self.retry(now_s)

    # --- audits -----------------------------------------------------------------------------------

    def _not_finite(self, now_s: float, sender: NodeId, node: NodeId) -> None:
        """A member says that it can't use what another has sent."""
        if serves(self.view, sender, node):
            self.remove(now_s, {node: NOT_FINITE})
        else:
            self._follow(now_s, self.audits.not_finite(self.view, sender, node))

    def _judge(self, now_s: float, verdict: Verdict) -> None:
        """An audit has ended, or has taken too long: the decision may wait for that."""
        if not self._follow(now_s, verdict):
            self.decide(now_s)

    def _follow(self, now_s: float, verdict: Verdict) -> bool:
        """Go on without liars. Returns whether there is anything to do after an audit."""
        gone = {**verdict.aside, **verdict.liars}
        # Others have computed with lies: all of the iteration is repeated.
        if present := {node: reason for node, reason in gone.items() if node in self.view}:
            for node in [node for node in present if node in verdict.liars]:
                self._out.put(BanLiar(node, present[node]))
            self.remove(now_s, present, mends=False)
        elif verdict.repeats:
            self.repeat(now_s, verdict.repeats, counts=False)
        return bool(present or verdict.repeats)


def serves(view: View, server: NodeId, client: NodeId) -> bool:
    """Whether a node is a client of another's stage."""
    one = view.by_id.get(client)
    other = view.by_id.get(server)
    if one is None or other is None or one.role is not Role.CLIENT:
        return False
    return other.role is Role.RELAY and one.stage_index == other.stage_index


def survives(before: View, view: View, gone: Sequence[NodeId]) -> bool:
    """Return whether others can do again in the iteration what members that are gone have done."""
    others = all(before.by_id[node].role is not Role.DATA for node in gone)
    return others and not view.idle_stages


def replaceable(view: View, node: NodeId) -> bool:
    """Whether another member of a node's stage can do the same work."""
    member = view.by_id.get(node)
    if member is None:
        return False
    if member.role is Role.CLIENT:
        return True
    others = (m for m in view.workers[member.stage_index] if m.node_id != node)
    return any(other.duty is member.duty for other in others)


def _with(members: Sequence[Member], new: Sequence[Member]) -> list[Member]:
    """Return members and new ones, who may be later lives of some."""
    back = {member.node_id for member in new}
    return [*(member for member in members if member.node_id not in back), *new]


def _again(iteration: Iteration) -> Iteration:
    return replace(iteration, attempt=iteration.attempt + 1)
