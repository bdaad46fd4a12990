"""The leader has some of the relays' work done again, and finds out who lies.

When all members have voted on a step, the leader draws whose work is audited, and by whom. It waits
with its decision until it knows what they have found:

    several members share the work  -> all is well: nothing
                                    -> something is wrong: judges do all of it, one by one
    two judges say that all is well -> nothing
    two say that the same one lies  -> it does
    two find that another may lie   -> the iteration is repeated, and both are audited again
    otherwise                       -> a third judge is asked; then nothing follows
    there is only one judge         -> the leader judges, and is believed
    it can't                        -> the iteration is repeated, but not for ever; both are named

The run goes on without a liar. It repeats the iteration, since others have computed with the lies.
So nothing of them enters the model.

What travels between stages is proven (`decod.protocol.core.proofs`). So it is known who lies if
passes are wrong: the relay; or a neighbour, which has told the judges something else than it has
signed. Two judges have to find the same. A relay that says nothing to judges leaves for a while.

Nobody but the two ends knows what a member has contributed to another's part of the average. A
finding about that names its suspects, any of whom may have made the relay's work look wrong. The
relay lies if no one member could have made all of it look wrong. Otherwise the leader names those
who could (`audit.disputed`), and repeats the iteration: so nothing of the lie enters the model. All
of them stay. They, the relay and the others of their stages are audited next time, until it is
known who lies: that is who has differed with three, or with all with whom it could. Honest members
differ with liars only. So a single liar gets nobody else banned. A data node is believed.

If the same members differ for the third time, all of them leave, and may come back. The last of a
stage never leaves.

Source: E. Gorbunov et al., "Secure Distributed Training at Scale" (arXiv:2106.11257), where members
drawn at random compute others' gradients again. Deviations: passes of a pipeline stage are audited,
whose inputs come from other members; and the iteration is repeated before its step is final.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from decod.ids import AveragingId, NodeId
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.fingerprints import SEED_BYTES
from decod.protocol.core.messages import Audit, AuditResult, StandOut
from decod.protocol.core.messages.audit_messages import AuditCase, AuditedWork
from decod.protocol.core.view import Role, View
from decod.run.protocol_config import NO_AUDITS
from decod.run.run_config import RunConfig

PROBATION_ITERATIONS = 100
"""So many committed iterations long, a relay is new."""

_JUDGES_NEEDED = 2
_JUDGES_MAX = 3

_OWNERS_NEEDED = 2
"""Members that say that a relay stands out, at least."""

_DISPUTES_NEEDED = 3
"""Members with whom one differs until it counts as a liar, or times that the same members differ
until something follows."""

_TOO_LONG = "it took too long"

_REPEATS_MAX = 3
"""Repeats of iterations because the only two members of a stage differ."""

_DIFFER_MIN = 2
"""Members with whom one differs at least until it counts as a liar."""

_AUDITORS_MAX = 4
"""Members that share a relay's microbatches. More would be done sooner, but each needs a sketch of
each part of the contribution."""


@dataclass(slots=True)
class AuditCounts:
    """What audits have come to, since this node leads."""

    num_audited: int = 0
    """Times that a relay's work of an iteration was found to be right, or wrong."""
    num_worked: int = 0
    """Times that a relay has worked in an iteration."""
    num_unfinished: int = 0
    num_replayed: int = 0
    """Microbatches."""
    waited_s: float = 0.0
    """How long decisions have waited for audits."""
    liars: dict[NodeId, str] = field(default_factory=dict)
    """Who was found to lie, and how."""


@dataclass(slots=True)
class Verdict:
    """Who has to leave after an audit, and why."""

    liars: dict[NodeId, str] = field(default_factory=dict)
    """Members that have lied for sure: they are banned."""
    aside: dict[NodeId, str] = field(default_factory=dict)
    """One of them lies, and nobody knows which. They may come back."""
    repeats: str = ""
    """Why the iteration is repeated with everybody: somebody has lied, and nobody knows who."""


@dataclass(slots=True)
class _Open:
    """An audit that is not finished."""

    case: AuditCase
    """The case in its latest opinion."""
    accused: bool = False
    """The first opinion was that something is wrong."""
    judged: dict[NodeId, "_Judgement"] = field(default_factory=dict)

    appealed: str = ""
    """What the only other member of the stage has found, if the leader judges now."""

    @property
    def num_right(self) -> int:
        return sum(found == _Judgement() for found in self.judged.values())

    @property
    def num_wrong(self) -> Counter[NodeId]:
        """So many judges say of a member that it lies."""
        return Counter(liar for found in self.judged.values() for liar in found.liars)

    @property
    def silent(self) -> bool:
        """Whether a judge says no worse than that the relay has said nothing."""
        return any(found.silent for found in self.judged.values())


@dataclass(frozen=True, slots=True)
class _Judgement:
    """What a judge has found. Nothing: all is well."""

    liars: frozenset[NodeId] = frozenset()
    """Members that have lied for sure, if the judge does not."""
    suspects: frozenset[NodeId] = frozenset()
    """Any of them may have lied instead of the relay."""
    silent: bool = False
    """The relay is a liar only because it says nothing."""
    repeated: bool = False
    """The judge has come to other results than the relay, from what the relay has signed."""


class RelayAudits:
    """The leader's audits of one iteration after another.

    Args:
        run: The run's settings.
        rng: Draws who is audited. Nobody may be able to foresee it.
        out: The leading node's.
    """

    def __init__(self, run: RunConfig, rng: Random, out: EffectSink[Effect]) -> None:
        self._rng = rng
        self._out = out
        self._patience_s = run.protocol.complete_timeout_s
        self._config = run.audits if run.audited else NO_AUDITS
        self._cases: dict[NodeId, _Open] = {}
        self._averaging: AveragingId | None = None
        self._begun_s = 0.0
        self.by_s: float | None = None
        """When audits that are not finished are closed, or given up."""
        self._num_commits: dict[NodeId, int] = {}
        """Iterations in which each relay has worked."""
        self._not_finite: set[tuple[NodeId, NodeId]] = set()
        """Who says in this iteration that it can't use what another has sent."""
        self._standing_out: dict[NodeId, set[NodeId]] = {}
        """Who says in this iteration that a relay stands out."""
        self._suspects: set[NodeId] = set()
        """Relays that are audited next time, come what may."""
        self._differ: dict[NodeId, set[NodeId]] = {}
        """With whom each member has differed about what one has given to the other."""
        self._num_disputes = Counter[frozenset[NodeId]]()
        """How often the same members could have lied."""
        self._false: set[NodeId] = set()
        """Who has said falsely that the only other member of its stage lies."""
        self._convicted: list[NodeId] = []
        self.counts = AuditCounts()

    @property
    def possible(self) -> bool:
        """Whether anything is audited in this run."""
        return self._config != NO_AUDITS

    def chance_of_discovery(self, num_lies: int) -> float:
        """Return how likely a relay is caught that is no longer new and lies in some iterations.

        Lies that stand out are caught sooner.
        """
        return 1 - (1 - self._config.share) ** num_lies

    @property
    def pending(self) -> bool:
        """Whether something is still to be found out before a decision."""
        return bool(self._cases)

    def share_of(self, node: NodeId) -> float:
        """Return how likely a relay is audited in an iteration."""
        if node in self._suspects:
            return 1.0
        new = self._num_commits.get(node, 0) < PROBATION_ITERATIONS
        return self._config.share_in_probation if new else self._config.share

    def take_convicted(self) -> list[NodeId]:
        """Return who was found to lie since the last time: the list of bans tells them why."""
        convicted = self._convicted
        self._convicted = []
        return convicted

    def reset(self) -> None:
        """Another iteration is opened, or this one goes on in another view."""
        self._cases.clear()
        self._standing_out.clear()
        self._not_finite.clear()
        self._averaging = self.by_s = None

    def committed(self, view: View) -> None:
        """An iteration is final: count in which each relay has worked."""
        relays = [m.node_id for m in view.members if m.role is Role.RELAY and m.capacity]
        self._num_commits = {node: self._num_commits.get(node, 0) + 1 for node in relays}
        self.counts.num_worked += len(relays)

    def stand_out(self, view: View, owner: NodeId, message: StandOut) -> None:
        """A member that has reduced a part says who stands out in it.

        It is no proof. If at least half of the others in the stage say so, the relay is audited
        for sure.
        """
        stage = view.by_id[owner].stage_index
        roster = [member.node_id for member in view.roster(stage)]
        for node in [n for n in message.nodes if n in roster and n != owner and stage]:
            owners = self._standing_out.setdefault(node, set())
            before = len(owners)
            needed = max(_OWNERS_NEEDED, len(roster) // 2)
            owners.add(owner)
            if before < needed == len(owners):
                self._suspects.add(node)
                self._out.note("relay.stands_out", peer=node, num_members=needed)

    def not_finite(self, view: View, receiver: NodeId, node: NodeId) -> Verdict:
        """A member says that what another has sent is not finite.

        A data node is believed. Of relays that have no proof, the word of several is needed.
        """
        verdict = Verdict()
        heard = (receiver, node)
        one = view.by_id.get(receiver)
        other = view.by_id.get(node)
        if one is None or other is None or heard in self._not_finite:
            return verdict
        near = abs(one.stage_index - other.stage_index) == 1 or one.role is Role.DATA
        if other.role is not Role.RELAY or not near:
            return verdict
        self._not_finite.add(heard)
        self._suspects.add(node)
        what = f"what it has sent is not finite: {one.label} has seen it"
        found = (node, what) if one.role is Role.DATA else self._liar_of(view, heard)
        if found is None:
            self._out.note("audit.disputed", peer=node, reason=f"{what}, or says so falsely")
        else:
            self._named(view, *found, verdict)
            self._convict(verdict.liars)
        return verdict

    # --- an iteration -------------------------------------------------------------------------

    def begin(self, now_s: float, view: View, averaging: AveragingId) -> None:
        """All members have voted: audit some relays, or none. Once for each vote."""
        if averaging != self._averaging:
            self._averaging = averaging
            self._begun_s = now_s
            self._cases = {case.relay: _Open(case) for case in self._drawn(view)}
            self._ask(now_s, view, [each.case for each in self._cases.values()])

    def _drawn(self, view: View) -> list[AuditCase]:
        """Return whose work is audited, and by whom."""
        cases = list[AuditCase]()
        if not self.possible:
            return cases
        for stage in range(1, view.num_stages):
            relays = [member.node_id for member in view.roster(stage)]
            for relay in [r for r in relays if self._rng.random() < self.share_of(r)]:
                others = [node for node in relays if node != relay]
                if others:
                    num = min(_AUDITORS_MAX, len(others))
                    auditors = tuple(self._rng.sample(others, num))
                    cases.append(AuditCase(relay, auditors, seed=self._seed()))
        return cases

    def _seed(self) -> bytes:
        return self._rng.randbytes(SEED_BYTES)

    def _ask(self, now_s: float, view: View, cases: Sequence[AuditCase]) -> None:
        """Have auditors begin."""
        if cases and self._averaging is not None:
            self.by_s = now_s + self._patience_s
            self._out.send(view.leader, Audit(self._averaging, tuple(cases)))

    def overdue(self, now_s: float, view: View) -> Verdict:
        """Close what takes too long, and then give it up: the iteration must go on."""
        verdict = Verdict()
        if self.by_s is None or now_s < self.by_s:
            return verdict
        waiting = [found for found in self._cases.values() if not found.case.closes]
        for found in waiting:
            found.case = replace(found.case, closes=True)
        if waiting:
            self._ask(now_s, view, [found.case for found in waiting])
            return verdict
        for relay, found in [*self._cases.items()]:
            if found.appealed and self._averaging is not None:
                about = (self._averaging, relay, found.case.opinion, 0, _TOO_LONG)
                self._settled(view, found, AuditResult(*about), verdict)
            else:
                self._unfinished(relay, _TOO_LONG)
        self._close(now_s)
        return verdict

    def found(self, now_s: float, view: View, sender: NodeId, result: AuditResult) -> Verdict:
        """Take in what auditors have found."""
        verdict = Verdict()
        found = self._cases.get(result.relay)
        if found is None or result.averaging != self._averaging:
            return verdict
        if (sender, result.opinion) != (found.case.auditors[0], found.case.opinion):
            return verdict
        if found.appealed:
            self._settled(view, found, result, verdict)
        elif result.failure:
            self._unfinished(result.relay, result.failure)
        elif result.findings and self._disbelieved(view, sender):
            self._count(result)
        elif found.accused or result.findings:
            if found.accused:
                found.judged[sender] = _judgement(view, result)
            found.accused = True
            self._judged(now_s, view, found, result, verdict)
        else:
            self._count(result)
        self._convict(verdict.liars)
        if not self._cases:
            self._close(now_s)
        return verdict

    def _disbelieved(self, view: View, auditor: NodeId) -> bool:
        """Whether a member has said falsely that the only other of its stage lies."""
        return auditor in self._false and len(view.roster(view.by_id[auditor].stage_index)) == 2

    def _convict(self, liars: Mapping[NodeId, str]) -> None:
        """Remember who lies, and forget with whom these have differed."""
        for node in liars:
            self._out.note("relay.lied", peer=node, reason=liars[node])
        self.counts.liars.update(liars)
        self._convicted += liars
        for liar in liars:
            for other in self._differ.pop(liar, ()):
                self._differ[other].discard(liar)
            for members in [each for each in self._num_disputes if liar in each]:
                del self._num_disputes[members]

    def _judged(
        self,
        now_s: float,
        view: View,
        found: _Open,
        result: AuditResult,
        verdict: Verdict,
    ) -> None:
        """Judges have said what they can: decide, or ask another. Adds to the verdict."""
        relay = result.relay
        stage = view.by_id[result.relay].stage_index
        judges = [m.node_id for m in view.roster(stage) if m.node_id not in (relay, *found.judged)]
        disputes = [each.suspects for each in found.judged.values() if each.suspects]
        wrong = found.num_wrong
        agreed = max(found.num_right, len(disputes), *wrong.values(), 0) >= _JUDGES_NEEDED
        if not agreed and judges and len(found.judged) < _JUDGES_MAX:
            opinion = found.case.opinion + 1
            found.case = AuditCase(relay, (self._rng.choice(judges),), opinion, self._seed())
            self._ask(now_s, view, [found.case])
            return
        if not agreed and len(found.judged) < _JUDGES_NEEDED and not found.num_right:
            self._appealed(now_s, view, found, result)
            return
        self._count(result)
        what = _described(result) or "others have found it wrong"
        liars = [node for node, num in wrong.items() if num >= _JUDGES_NEEDED]
        common = frozenset[NodeId]().union(*disputes).intersection(*disputes)
        if liars:
            for liar in liars:
                self._proven(view, relay, liar, what, verdict, silent=found.silent)
        elif len(disputes) + wrong[relay] >= _JUDGES_NEEDED and common:
            self._disputed(view, relay, common, what, verdict)
        else:
            self._out.note("audit.unsettled", peer=relay, reason=what)

    def _appealed(self, now_s: float, view: View, found: _Open, result: AuditResult) -> None:
        """The only other member of a stage says that a relay lies: the leader judges itself."""
        found.appealed = _described(result)
        opinion = found.case.opinion + 1
        found.case = AuditCase(result.relay, (view.leader,), opinion, self._seed())
        self._ask(now_s, view, [found.case])

    def _settled(self, view: View, found: _Open, result: AuditResult, verdict: Verdict) -> None:
        """The leader has judged between the only two of a stage, or could not. Adds to the verdict.

        A data node is believed.
        """
        relay, (accuser,) = result.relay, [*found.judged]
        judgement = _judgement(view, result)
        said = found.judged[accuser]
        self._count(result)
        what = _described(result) or found.appealed
        for liar in judgement.liars:
            self._proven(view, relay, liar, what, verdict, silent=judgement.silent)
        if judgement.liars or verdict != Verdict():
            return
        # Of other things, somebody may have told the two judges different things.
        if result.failure or judgement.suspects or not said.repeated:
            why = f" (the leader can't tell: {result.failure})" if result.failure else ""
            self._alone(relay, accuser, what + why, verdict)
        else:
            reason = f"it says falsely that {_name(relay)} lies, and is not believed again"
            self._false.add(accuser)
            self._out.note("audit.disputed", peer=accuser, reason=reason)

    def _alone(self, relay: NodeId, accuser: NodeId, what: str, verdict: Verdict) -> None:
        """Nobody can tell which of the only two members of a stage lies. Adds to the verdict.

        Nobody leaves: it might be the honest one. The iteration is repeated, but not for ever.
        """
        members = frozenset({relay, accuser})
        self._num_disputes[members] += 1
        self._suspects.update(members)
        reason = f"{what}, says {_name(accuser)}, or says so falsely"
        if self._num_disputes[members] <= _REPEATS_MAX:
            verdict.repeats = f"{_name(relay)} lies, or {_name(accuser)} about it"
        else:
            reason += f"; after {_REPEATS_MAX} repeats its work is used all the same"
        self._out.note("audit.unsettled", peer=relay, reason=reason)

    def _proven(
        self, view: View, relay: NodeId, liar: NodeId, what: str, verdict: Verdict, *, silent: bool
    ) -> None:
        """Judges agree on who lies. Adds to the verdict what follows."""
        if liar != relay:
            why = f"it has signed something else for {_name(relay)} than it tells auditors"
            self._named(view, liar, why, verdict)
        elif silent:
            # It may be cut off from the judges.
            verdict.aside[relay] = "it does not tell its auditors what it has sent"
        else:
            verdict.liars[relay] = what

    def _disputed(
        self,
        view: View,
        relay: NodeId,
        others: frozenset[NodeId],
        what: str,
        verdict: Verdict,
    ) -> None:
        """The relay or another member lies. Adds to the verdict what follows."""
        members = frozenset({relay, *others})
        self._num_disputes[members] += 1
        for node in members & view.by_id.keys():
            self._suspects.update(m.node_id for m in view.roster(view.by_id[node].stage_index))
        if (found := self._liar_of(view, members)) is not None:
            self._named(view, *found, verdict)
            return
        reason = f"{what}, or another member lies"
        if self._num_disputes[members] < _DISPUTES_NEEDED:
            verdict.repeats = reason
        else:
            verdict.aside = dict.fromkeys(_may_leave(view, sorted(members)), reason)
        names = " or ".join(_name(node) for node in sorted(others))
        self._out.note("audit.disputed", peer=relay, reason=f"{what}, unless {names} lies")

    def _named(self, view: View, liar: NodeId, why: str, verdict: Verdict) -> None:
        """Let a known liar leave, if others work on its stage. Adds to the verdict."""
        if _may_leave(view, [liar]):
            verdict.liars[liar] = why
        else:
            reason = f"{why}: it is not believed, and stays as the last of its stage"
            self._out.note("audit.disputed", peer=liar, reason=reason)

    def _liar_of(self, view: View, members: Collection[NodeId]) -> tuple[NodeId, str] | None:
        """Return who of two members that differ lies, and why that is known; None: it is not."""
        if len(members) != 2 or not all(node in view for node in members):
            return None
        could = dict[NodeId, int]()
        for node in members:
            (other,) = {*members} - {node}
            self._differ.setdefault(node, set()).add(other)
            there = view.roster(view.by_id[other].stage_index)
            could[node] = sum(member.node_id != node for member in there)
        most = max(members, key=lambda node: (len(self._differ[node]), node))
        num = len(self._differ[most])
        if num >= max(_DIFFER_MIN, min(_DISPUTES_NEEDED, could[most])):
            return most, f"{num} members say something else than it does"
        return None

    def _unfinished(self, relay: NodeId, reason: str) -> None:
        auditor = self._cases.pop(relay).case.auditors[0]
        self.counts.num_unfinished += 1
        self._out.note("audit.unfinished", peer=relay, auditor=_name(auditor), reason=reason)

    def _count(self, result: AuditResult) -> None:
        """An audit has come to an end."""
        del self._cases[result.relay]
        self._suspects.discard(result.relay)
        self.counts.num_audited += 1
        self.counts.num_replayed += result.num_microbatches

    def _close(self, now_s: float) -> None:
        self.counts.waited_s += now_s - self._begun_s
        self.by_s = None


def _judgement(view: View, result: AuditResult) -> _Judgement:
    """Return what a judge has found. A data node does not lie."""
    trusted = {member.node_id for member in view.data_nodes}
    gifts = [each for each in result.findings if each.work is AuditedWork.GIFT]
    of_relay = [each for each in result.findings if each not in gifts]
    liars = {node for each in gifts for node in each.suspects} - trusted
    if not of_relay:
        return _Judgement(frozenset(liars))
    found = [frozenset(each.suspects) - trusted for each in of_relay]
    suspects = found[0].intersection(*found[1:])
    if not suspects:
        liars.add(result.relay)
    silent = all(each.work is AuditedWork.SILENCE for each in of_relay)
    repeated = any(each.work is AuditedWork.PASSES for each in of_relay)
    return _Judgement(frozenset(liars), suspects, silent, repeated)


def _may_leave(view: View, nodes: Sequence[NodeId]) -> list[NodeId]:
    """Return which of some members may leave: somebody goes on working on each stage."""
    leaving = list[NodeId]()
    for node in [each for each in nodes if each in view]:
        workers = view.workers[view.by_id[node].stage_index]
        if any(member.node_id not in (node, *leaving) for member in workers):
            leaving.append(node)
    return leaving


def _described(result: AuditResult) -> str:
    """Return what was wrong with a relay's work."""
    found = dict[str, float]()
    for finding in result.findings:
        kind = finding.work.value
        found[kind] = max(finding.error, found.get(kind, 0.0))
    return " and ".join(f"its {kind}: {error:.2f} off" for kind, error in sorted(found.items()))


def _name(node: NodeId) -> str:
    return node[:8]
