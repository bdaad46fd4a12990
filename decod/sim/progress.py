"""I7: once faults are over, a run commits again in bounded time or says what it waits for.

The check looks from outside: which members of the newest view are present, whether they form a
quorum, and whether every stage has a member. The run's own statement must be true. Waiting for a
quorum that is present violates the invariant, just as waiting in silence does.

A run must not stand still either while all its members are present and its leader waits for
nothing. It may stand still for as long as it takes to detect a lost member. If the tensors of a
relay trickle, and the run can do without that relay, it may take as long as it needs to identify
the relay.
"""

import math
from typing import Protocol

from decod.protocol.leadership.quorum import is_quorum
from decod.sim.core import LeadershipPart, Wait, leadership_part_of
from decod.sim.invariants import Checker, InvariantViolation
from decod.sim.network import give_up_after_s
from decod.sim.scenario import Cut, FaultKind, Scenario
from decod.sim.simulated_host import SimHost, World

_TENSORS = 5
"""Tensors that may be given up in a row before the run knows the culprit."""

_MOVES_S = 4.0
"""Longer than an iteration's reduction and votes, or than sending a newcomer its state."""


class _Run(Protocol):
    """A simulation, as this check sees it."""

    checker: Checker
    hosts: dict[str, SimHost]
    world: World

    @property
    def acting(self) -> SimHost | None: ...


class ProgressCheck:
    """Looks now and then whether a run commits.

    Attributes:
        waits_for: The thing that the run waits for in vain, once that is certain.
    """

    def __init__(self, scenario: Scenario, run: _Run) -> None:
        self.waits_for = ""
        self._num_wanted = scenario.num_iterations
        self._num_batch = scenario.batch.microbatches_per_iteration
        self._calm_s = _calm_s_of(scenario)
        self._run = run
        self._num = 0
        self._since_s = 0.0
        self._num_passes = 0
        self._stands_s = 0.0
        """When the run was last seen to move."""
        self._excused_s = -math.inf
        """When the leader was last frozen, or a member was needed whose tensors trickle. Afterwards
        the run gets the full time again."""
        protocol = scenario.protocol
        self._bound_s = (
            protocol.iteration_timeout_s
            + 2 * protocol.leader_timeout_s
            + 4 * (protocol.heartbeat_timeout_s + protocol.probe_timeout_s)
        )
        self._still_s = _MOVES_S + protocol.heartbeat_timeout_s + protocol.probe_timeout_s
        largest = max(scenario.profile.activation_bytes, scenario.profile.parameter_bytes)
        tensor_s = give_up_after_s(largest)
        self._crawls_s = self._still_s + _TENSORS * tensor_s
        self._slowed = [cut for cut in scenario.cuts if cut.rate_bytes_per_s]

    def ended(self, now_s: float) -> bool:
        """Return whether the run rightly waits for good.

        Raises:
            InvariantViolation: It stops without need, or does not say why.
        """
        num = self._run.checker.num_iterations
        num_passes = sum(host.device.num_microbatch_jobs for host in self._run.hosts.values())
        moves = (num, num_passes) != (self._num, self._num_passes)
        loads = any(host.device.hopes for host in self._run.hosts.values())
        if moves or loads or not self._whole():
            self._num_passes = num_passes
            self._stands_s = now_s
        if num != self._num:
            self._num = num
            self._since_s = now_s
        limit_s = self._limit_s(now_s)
        leader = self._run.acting
        if limit_s == math.inf or (leader is not None and leader.frozen):
            self._excused_s = now_s
        if self._calm_s is None:
            return False
        stands_s = now_s - max(self._calm_s, self._stands_s)
        if num < self._num_wanted and stands_s > limit_s:
            raise self._stuck(leader, "all its members are there", limit_s)
        # The run waits for a member that it needs, until that member's tensors travel again.
        if limit_s == math.inf or now_s - max(self._calm_s, self._since_s) <= self._bound_s:
            return False
        if self._excused_s < now_s <= self._excused_s + self._bound_s:
            return False
        self.waits_for = self._explained()
        return True

    def _limit_s(self, now_s: float) -> float:
        """Return how long the run may stand still: longer if tensors trickle, or did lately."""
        fades_s = self._crawls_s
        recent = [c for c in self._slowed if c.at_s <= now_s <= c.at_s + c.duration_s + fades_s]
        if not recent:
            return self._still_s
        leader = self._run.acting
        part = leadership_part_of(leader.machine) if leader is not None else None
        needed = part is None or any(self._needs(part, cut) for cut in recent)
        return math.inf if needed else self._crawls_s

    def _needs(self, part: LeadershipPart, cut: Cut) -> bool:
        """Return whether the run can't do without slow links: nobody could go, or pass on."""
        if cut.culprit is not None:
            return self._run.hosts[cut.culprit].node_id in part.needed
        ends = {self._run.hosts[name].node_id for name in (*cut.senders, *cut.receivers)}
        return ends.issuperset(part.members)

    def _whole(self) -> bool:
        """Return whether all members of the view are present and nobody is awaited.

        The iteration must also have room for the batch. In an iteration with less room, a late
        member finds all flows taken and gets more time.
        """
        leader = self._run.acting
        part = leadership_part_of(leader.machine) if leader is not None else None
        if part is None or part.wait is not Wait.NOTHING or part.room < self._num_batch:
            return False
        known = {host.node_id: host for host in self._run.hosts.values() if host.present}
        here = [leadership_part_of(known[node].machine) for node in part.members if node in known]
        alike = [other for other in here if other is not None and other.place == part.place]
        return len(alike) == len(part.members)

    def _explained(self) -> str:
        alive = {host.node_id for host in self._run.hosts.values() if host.present}
        parts = {
            host.node_id: part
            for host in self._run.hosts.values()
            if host.present and (part := leadership_part_of(host.machine)) is not None
        }
        leader = self._run.acting
        if leader is not None and leader.node_id in parts:
            part = parts[leader.node_id]
            match part.wait:
                case Wait.QUORUM if not is_quorum(alive - self._run.world.liars, part.electors):
                    return "quorum"
                case Wait.STAGE:
                    return "members of a stage"
            what = f"its leader waits for {part.wait.value}"
            raise self._stuck(leader, what, self._bound_s)
        inside = {node: s for node, s in parts.items() if s.in_view}
        if not inside:
            return "a leader"
        newest = max(inside.values(), key=lambda s: s.place)
        voters = {node for node, s in inside.items() if not s.abstains}
        quorum = is_quorum(voters, newest.electors) and is_quorum(voters, newest.members)
        if quorum and any(s.may_stand for s in inside.values()):
            raise self._stuck(None, "a quorum is there and elects nobody", self._bound_s)
        return "a leader"

    def _stuck(self, host: SimHost | None, what: str, waited_s: float) -> InvariantViolation:
        text = f"nothing committed for {waited_s:.0f} s after faults were over: {what}"
        return self._run.checker.violated("I7", host, text)


def _calm_s_of(scenario: Scenario) -> float | None:
    """Return when all faults are over. Slow devices must also be fast again by then."""
    slow = [fault for fault in scenario.faults if fault.kind is FaultKind.SLOW]
    ends_s = [fault.at_s + fault.duration_s for fault in slow if fault.at_s is not None]
    return None if scenario.calm_s is None else max(scenario.calm_s, *ends_s, 0.0)
