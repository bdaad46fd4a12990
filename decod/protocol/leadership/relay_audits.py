"""The leader has some of the relays' work done again, and finds out who lies.

When all members have voted on a step, the leader draws which relays are audited, and by whom. It
waits with its decision until it knows what they have found:

    first opinion: all is well   -> nothing
                   something is wrong -> a second member of the stage audits the relay too
    second opinion: the same     -> the relay lies
                    all is well  -> the first auditor lies

Whoever lies is done without, and the iteration is repeated: others have computed with its lies. So
nothing of them enters the model.

One witness is not enough, since it may lie itself: two members of other stages must have got
something wrong, or a data node, or the auditor. Otherwise the two are only named. A stage of two
has nobody for a second opinion.

Source: E. Gorbunov et al., "Secure Distributed Training at Scale" (arXiv:2106.11257), where members
drawn at random compute others' gradients again. Deviations: passes of a pipeline stage are audited,
whose inputs come from other members; and the iteration is repeated before its step is final.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from decod.ids import AveragingId, NodeId
from decod.protocol.core.effects import Effect, Send, noted
from decod.protocol.core.messages import Audit, AuditResult
from decod.protocol.core.params import AuditConfig
from decod.protocol.core.view import Role, View

PROBATION_ITERATIONS = 100
"""So many committed iterations long, a relay is new."""

_WITNESSES_NEEDED = 2


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
class _Case:
    """The audit of one relay."""

    auditors: list[NodeId]
    """The one who is at work last."""
    found: str = ""
    """What the first has found."""


class RelayAudits:
    """The leader's audits of one iteration after another.

    Args:
        config: How much is audited.
        rng: Draws who is audited. Nobody may be able to foresee it.
        patience_s: How long an audit may take.
    """

    def __init__(self, config: AuditConfig, rng: Random, patience_s: float) -> None:
        self._config, self._rng, self._patience_s = config, rng, patience_s
        self._cases: dict[NodeId, _Case] = {}
        self._averaging: AveragingId | None = None
        self._begun_s = 0.0
        self.by_s: float | None = None
        """When audits that are not finished are given up."""
        self._num_commits: dict[NodeId, int] = {}
        """Iterations in which each relay has worked."""
        self._suspects: set[NodeId] = set()
        """Relays that are audited next time, come what may."""
        self.counts = AuditCounts()

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

    def reset(self) -> None:
        """Another iteration is opened, or this one goes on in another view."""
        self._cases.clear()
        self._averaging = self.by_s = None

    def committed(self, view: View) -> None:
        """An iteration is final: count in which each relay has worked."""
        relays = [m.node_id for m in view.members if m.role is Role.RELAY and m.capacity]
        self._num_commits = {node: self._num_commits.get(node, 0) + 1 for node in relays}
        self.counts.num_worked += len(relays)

    # --- an iteration -------------------------------------------------------------------------

    def begin(self, now_s: float, view: View, averaging: AveragingId) -> list[Effect]:
        """All members have voted: audit some relays, or none. Once for each vote."""
        if averaging == self._averaging:
            return []
        self._averaging, self._begun_s = averaging, now_s
        self._cases = {relay: _Case([auditor]) for relay, auditor in self._drawn(view)}
        return self._ask(now_s, view, list(self._cases))

    def _drawn(self, view: View) -> list[tuple[NodeId, NodeId]]:
        """Return who is audited, and by whom."""
        pairs = list[tuple[NodeId, NodeId]]()
        for stage in range(1, view.num_stages):
            relays = [m.node_id for m in view.roster(stage)]
            drawn = [r for r in relays if self.share_of(r) > 0 and self._hits(self.share_of(r))]
            # Nobody has two audits at a time while there is somebody without.
            free = [relay for relay in relays if relay not in drawn] or relays
            self._rng.shuffle(free)
            for k, relay in enumerate(drawn):
                others = [node for node in free if node != relay] or [
                    r for r in relays if r != relay
                ]
                if others:
                    pairs.append((relay, others[k % len(others)]))
        return pairs

    def _hits(self, share: float) -> bool:
        return self._rng.random() < share

    def _ask(self, now_s: float, view: View, relays: Sequence[NodeId]) -> list[Effect]:
        """Have the latest auditors of some relays begin."""
        if not relays or self._averaging is None:
            return []
        self.by_s = now_s + self._patience_s
        pairs = tuple((relay, self._cases[relay].auditors[-1]) for relay in relays)
        return [Send(view.leader, Audit(self._averaging, pairs))]

    def overdue(self, now_s: float) -> list[Effect]:
        """Give up what takes too long: the iteration must go on."""
        if self.by_s is None or now_s < self.by_s:
            return []
        effects = [
            e for relay in [*self._cases] for e in self._unfinished(relay, "it took too long")
        ]
        self._close(now_s)
        return effects

    def found(
        self, now_s: float, view: View, sender: NodeId, result: AuditResult
    ) -> tuple[dict[NodeId, str], list[Effect]]:
        """Take in what an auditor has found.

        Returns:
            Who lies, and how, and effects.
        """
        case = self._cases.get(result.relay)
        late = case is None or result.averaging != self._averaging or case.auditors[-1] != sender
        if case is None or late:
            return {}, []
        liars, effects = dict[NodeId, str](), list[Effect]()
        if result.failure:
            effects += self._unfinished(result.relay, result.failure)
        elif not result.doubts:
            effects += self._found_right(case, result, liars)
        elif not self._convinces(view, sender, result):
            effects += self._disputed(result)
        else:
            effects += self._found_wrong(now_s, view, case, result, liars)
        self.counts.liars.update(liars)
        if not self._cases:
            self._close(now_s)
        return liars, effects

    def _convinces(self, view: View, auditor: NodeId, result: AuditResult) -> bool:
        """Whether what an auditor has found can't be the lie of a single witness."""
        witnesses = [witness for witness, _ in result.doubts]
        trusted = {m.node_id for m in view.data_nodes} | {auditor}
        return len(witnesses) >= _WITNESSES_NEEDED or not trusted.isdisjoint(witnesses)

    def _found_right(
        self, case: _Case, result: AuditResult, liars: dict[NodeId, str]
    ) -> list[Effect]:
        self._count(result)
        if len(case.auditors) == 1:
            return []
        first = case.auditors[0]
        liars[first] = f"it has accused {_name(result.relay)}, whose work is right"
        return [noted("relay.lied", peer=first, reason=liars[first])]

    def _found_wrong(
        self,
        now_s: float,
        view: View,
        case: _Case,
        result: AuditResult,
        liars: dict[NodeId, str],
    ) -> list[Effect]:
        """An auditor has found something wrong: ask a second one, or believe the second."""
        relay, stage = result.relay, view.by_id[result.relay].stage_index
        what = _described(view, result)
        if len(case.auditors) == 1:
            others = [m.node_id for m in view.roster(stage)]
            others = [node for node in others if node not in (relay, *case.auditors)]
            if not others:
                self._count(result)
                peer = case.auditors[0]
                return [noted("audit.unsettled", peer=relay, auditor=_name(peer), reason=what)]
            case.auditors.append(self._rng.choice(others))
            case.found = what
            return self._ask(now_s, view, [relay])
        self._count(result)
        liars[relay] = what
        return [noted("relay.lied", peer=relay, reason=what)]

    def _disputed(self, result: AuditResult) -> list[Effect]:
        """The relay or one other member lies. Both are looked at next time."""
        self._count(result)
        witness, error = result.doubts[0]
        self._suspects = {result.relay, witness}
        reason = f"{_name(witness)} has got something {error:.2f} off from it, and nobody else"
        return [noted("audit.disputed", peer=result.relay, reason=reason)]

    def _unfinished(self, relay: NodeId, reason: str) -> list[Effect]:
        case = self._cases.pop(relay)
        self.counts.num_unfinished += 1
        return [
            noted("audit.unfinished", peer=relay, auditor=_name(case.auditors[-1]), reason=reason)
        ]

    def _count(self, result: AuditResult) -> None:
        """An audit has come to an end."""
        del self._cases[result.relay]
        self._suspects.discard(result.relay)
        self.counts.num_audited += 1
        self.counts.num_replayed += result.num_microbatches

    def _close(self, now_s: float) -> None:
        self.counts.waited_s += now_s - self._begun_s
        self.by_s = None


def _described(view: View, result: AuditResult) -> str:
    """Return what was wrong with a relay's work."""
    kinds: Mapping[bool, str] = {True: "contribution", False: "activations or gradients"}
    stage = view.by_id[result.relay].stage_index
    found = dict[str, float]()
    for witness, error in result.doubts:
        member = view.by_id.get(witness)
        kind = kinds[member is not None and member.stage_index == stage]
        found[kind] = max(error, found.get(kind, 0.0))
    return " and ".join(f"its {kind}: {error:.2f} off" for kind, error in sorted(found.items()))


def _name(node: NodeId) -> str:
    return node[:8]
