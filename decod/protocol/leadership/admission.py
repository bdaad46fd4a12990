"""Who may enter the run, and which stage each newcomer prepares.

    WAITING -> (assigned) ASSIGNED -> (Prepared) PREPARED -> (level with its stage) in the view
       `---------------------- (silent, and no answer) ----------> forgotten

Data nodes and volunteers that insist on a stage are placed at once; the others when the leader
knows how utilised each stage is. A candidate is taken into the view by the leader alone.

Nobody watches a candidate but the leader: one that it has not heard for `heartbeat_timeout_s` it
asks, as it asks a member that somebody suspects. Until there is an answer the candidate neither
counts nor enters; without one it is forgotten, and others may have its place. If it was only slow
it offers itself anew when it finds that nobody answers it (`decod.protocol.leadership.joining`).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decod.ids import Iteration, NodeId
from decod.planner.assignment import Applicant, StageLoad, assign_stages
from decod.protocol.core.context import RunFacts
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages import Assign, Join, Prepared, Refuse
from decod.protocol.core.messages.membership_messages import DONORS_MAX
from decod.protocol.core.view import Duty, Member, Role, View
from decod.protocol.leadership.seats import Seats
from decod.run.run_config import Organisation, RunConfig

_LIVES_MAX = 16
"""Starts of a node's daemon that are told apart."""


_NOTHING = Iteration(0, 0)

_SEAT_AGAIN_S = 2.0
"""After which a data node may ask again whether the run has a place: one of those that it has by
the leader's record may be gone already."""

_LAG_MAX = 8
_COMMITS_PER_LAG = 4
"""A candidate may enter when it lacks one iteration's average, which is on its way to it then; one
more after each so many commits. So whoever keeps up enters soon, however slow its link."""


@dataclass(slots=True)
class Candidate:
    """A node that has asked to join and is not in the view."""

    join: Join
    stage_index: int | None = None
    data_node_index: int = -1
    prepared: bool = False
    state_at: Iteration = _NOTHING
    """How far the candidate has followed its stage."""
    num_passed: int = 0
    """Commits with which it did not enter though it follows."""
    duty: Duty = Duty.NONE
    reason: str = ""
    """Why this stage, for people."""
    heard_s: float = math.inf
    """When the candidate last said something; before that nobody asked whether it lives."""
    doubted: bool = False
    """The candidate has been asked, and has not said anything since."""

    @property
    def stands_by(self) -> bool:
        """Whether the candidate is prepared, and there as far as is known."""
        return self.prepared and not self.doubted


class Admission:
    """The candidates, from their first offer until they are members.

    Args:
        run: The run's settings.
        facts: What else is known of it.
        seats: The members'.
        out: The leading node's.
        begun: Tells whether the run has committed iterations.
    """

    def __init__(
        self,
        run: RunConfig,
        facts: RunFacts,
        seats: Seats,
        out: EffectSink[Effect],
        begun: Callable[[], bool] = lambda: False,
    ) -> None:
        self.candidates: dict[NodeId, Candidate] = {}
        self._run = run
        self._facts = facts
        self._seats = seats
        self._out = out
        self._begun = begun
        self._incarnations: dict[NodeId, list[int]] = {}
        """Of the last starts of each node's daemon, in order."""
        self._hashes: dict[NodeId, str] = {}
        """Of the initial weights that candidates, members by now or not, have built."""

    @property
    def any_prepared(self) -> bool:
        return bool(self.ready_candidates)

    @property
    def ready_candidates(self) -> set[NodeId]:
        """The prepared candidates, without those that may be gone."""
        return {node for node, candidate in self.candidates.items() if candidate.stands_by}

    # --- who is there -------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        """When somebody will have been silent for too long."""
        heard_s = [c.heard_s for c in self.candidates.values() if not c.doubted]
        return min(heard_s) + self._run.protocol.heartbeat_timeout_s if heard_s else None

    def heard(self, now_s: float, node: NodeId) -> None:
        """A node, a candidate maybe, has said something."""
        if (candidate := self.candidates.get(node)) is not None:
            candidate.heard_s = now_s
            candidate.doubted = False

    def doubt(self, now_s: float) -> list[NodeId]:
        """Return candidates that are to be asked whether they live: they count when they answer."""
        timeout_s = self._run.protocol.heartbeat_timeout_s
        asked = list[NodeId]()
        for node, candidate in self.candidates.items():
            if not candidate.doubted and candidate.heard_s + timeout_s <= now_s:
                candidate.doubted = True
                asked.append(node)
        return asked

    # --- who may enter ------------------------------------------------------------------------

    def level(self, candidate: Candidate, anchor: Iteration) -> bool:
        """Whether a prepared candidate holds, or is about to hold, what its stage has in common.

        Args:
            candidate: Of a known stage.
            anchor: The iteration whose state that is.
        """
        if anchor.number == self._facts.start_iteration:
            return True  # That was built.
        if candidate.join.role is Role.CLIENT:
            return True  # It fetches the parameters as a member.
        if not self._follows(candidate):
            return False
        lag = -((candidate.state_at.number - anchor.number) // self._run.sync.every)
        allowed = min(_LAG_MAX, 1 + candidate.num_passed // _COMMITS_PER_LAG)
        # One that is ahead has proposed a step that was not committed: it undoes that.
        return anchor.era == candidate.state_at.era and -1 <= lag <= allowed

    def _follows(self, candidate: Candidate) -> bool:
        """Whether a candidate has the state of an iteration of this run, and what came after."""
        return candidate.state_at.number > self._facts.start_iteration

    def committed(
        self, committed: Iteration, anchor: Iteration, staff: Sequence[Member] | None
    ) -> bool:
        """An iteration is final: who follows has waited for one more. Returns whether somebody
        enters.

        Args:
            committed: The iteration.
            anchor: As of `members`.
            staff: As of `members`.
        """
        for candidate in self.candidates.values():
            follows = self._follows(candidate)
            candidate.num_passed = candidate.num_passed + 1 if follows else 0
        return bool(self.members(committed, anchor, staff))

    def members(
        self, committed: Iteration, anchor: Iteration, staff: Sequence[Member] | None = None
    ) -> list[Member]:
        """Return what the candidates that may enter now are as members.

        Args:
            committed: The last iteration that is.
            anchor: The last that ended with an average.
            staff: Whom they have followed: where nobody is left, they can't have. None: they need
                not have followed, because all get another state, or they fetch it as members.
        """
        keepers = [member for member in staff or () if member.role is not Role.CLIENT]
        staffed = None if staff is None else {member.stage_index for member in keepers}
        return [
            Member(
                node_id=node,
                address=candidate.join.address,
                role=candidate.join.role,
                stage_index=candidate.stage_index,
                capacity=candidate.join.capacity,
                data_node_index=candidate.data_node_index,
                since_iteration=committed.number,
                name=candidate.join.name,
                duty=candidate.duty,
                reach=candidate.join.reach,
            )
            for node, candidate in self.candidates.items()
            if candidate.stands_by and candidate.stage_index is not None
            if staffed is None
            or (candidate.stage_index in staffed and self.level(candidate, anchor))
        ]

    def repeated(self, sender: NodeId, join: Join) -> bool:
        """Whether this offer is from the same start of the daemon as the last one."""
        return self._incarnations.get(sender, [])[-1:] == [join.incarnation]

    def outdated(self, sender: NodeId, join: Join) -> bool:
        """Whether this offer comes late, from an earlier start of the daemon."""
        return join.incarnation in self._incarnations.get(sender, [])[:-1]

    def lost(self, node: NodeId, reason: str) -> None:
        """A candidate is gone. Should it live, its next offer is a new one: it is no member."""
        candidate = self.candidates.pop(node, None)
        if candidate is None:
            return
        self._incarnations[node].pop()
        stage = {} if candidate.stage_index is None else {"stage": candidate.stage_index}
        self._out.note("candidate.lost", peer=node, reason=reason, **stage)

    def entered(self, view: View) -> list[NodeId]:
        """Forget candidates that are members now.

        Returns those of whom only an earlier life is in the view: the leader could not remove them
        when they started again, and they have not prepared since.
        """
        back = [n for n, c in self.candidates.items() if n in view and not c.prepared]
        for node in view.by_id:
            if node not in back:
                self.candidates.pop(node, None)
        return back

    def join(self, view: View, sender: NodeId, join: Join) -> None:
        """Take in an offer, new or repeated, and answer with what has been decided of it."""
        if refusal := self.refusal(join, view.num_stages):
            self._out.send(sender, Refuse(refusal))
            return
        candidate = self.candidates.get(sender)
        if candidate is None or not self.repeated(sender, join):
            self._forget_strangers(view)
            candidate = self.candidates[sender] = Candidate(join)
            known = self._incarnations.setdefault(sender, [])
            known[:] = [*known[1 - _LIVES_MAX :], join.incarnation]
            self._hashes.pop(sender, None)
            self._out.note("candidate.joined", peer=sender, capacity=join.capacity)
        candidate.join = join
        if candidate.stage_index is None:
            self._assign_fixed(view, sender, candidate)
        if candidate.stage_index is not None:
            self._send_assignment(view, sender, candidate)

    def refusal(self, join: Join, num_stages: int) -> str:
        """Return why a run of so many stages can't take a node, or nothing."""
        if join.manifest_sha256 != self._facts.manifest_sha256:
            return (
                f"its manifest is {join.manifest_sha256[:16]}, this run's is "
                f"{self._facts.manifest_sha256[:16]}: the two describe different training jobs"
            )
        last = num_stages - 1
        if join.role is not Role.DATA and join.stage_index not in (None, *range(1, last + 1)):
            return f"stage {join.stage_index} is not a relay stage: choose auto or 1 to {last}"
        if join.role is Role.CLIENT and self._run.organisation is not Organisation.SERVERS:
            return "its stages have no servers, so nobody can be their client"
        return ""

    def _assign_fixed(self, view: View, sender: NodeId, candidate: Candidate) -> None:
        """Place candidates whose stage is no question: data nodes and those that insist."""
        if candidate.join.role is not Role.DATA:
            candidate.stage_index = candidate.join.stage_index
            candidate.reason = "its operator chose it"
            return
        # A member that was restarted has its own place, if the view can't do without it.
        taken = {m.data_node_index for m in view.data_nodes if m.node_id != sender}
        taken |= {c.data_node_index for c in self.candidates.values()}
        free = sorted(set(range(self._run.batch.num_data_nodes)) - taken)
        if not free:
            del self.candidates[sender]
            reason = (
                f"the run has all the data nodes that it takes ({self._run.batch.num_data_nodes})"
            )
            self._out.send(sender, Refuse(reason, _SEAT_AGAIN_S))
        else:
            candidate.stage_index = 0
            candidate.data_node_index = free[0]
            candidate.reason = "it holds data"

    def _send_assignment(self, view: View, sender: NodeId, candidate: Candidate) -> None:
        assert candidate.stage_index is not None
        stage = candidate.stage_index
        index = candidate.data_node_index
        if candidate.duty is Duty.NONE and candidate.join.role is Role.RELAY:
            candidate.duty = self._duty_for(view, candidate)
        begun = self._begun()
        assign = Assign(
            stage,
            index,
            candidate.reason,
            begun=begun,
            donors=donors_of(view, stage, sender) if begun else (),
            view_term=view.term,
            view_version=view.version,
            cut=view.cut,
        )
        self._out.send(sender, assign)

    def _duty_for(self, view: View, candidate: Candidate) -> Duty:
        """Return what a server is to do: what it insists on, or what fewer of its stage do."""
        if self._run.organisation is not Organisation.SERVERS:
            return Duty.NONE
        if candidate.join.duty is not Duty.NONE:
            return candidate.join.duty
        stage = candidate.stage_index
        duties = Counter(member.duty for member in view.members if member.stage_index == stage)
        duties.update(c.duty for c in self.candidates.values() if c.stage_index == stage)
        return min((Duty.FRONTAL, Duty.BACKWARD), key=lambda duty: duties[duty])

    def assign_waiting(self, view: View) -> None:
        """Give the largest candidates to the most utilised stages (GWTF V-B).

        First of all a stage without members gets those whose disk holds a state of it.
        """
        waiting = {n: c for n, c in self.candidates.items() if c.stage_index is None}
        for node, candidate in waiting.items():
            stages = {kept.stage_index for kept in candidate.join.kept if kept.stage_index}
            if own := sorted(stages.intersection(view.empty_stages)):
                self._assign(view, node, own[0], "its disk holds the state of that stage")
        # Each stage needs somebody who keeps its state, before anybody can be a client there.
        for role in (Role.RELAY, Role.CLIENT):
            applicants = [
                Applicant(node, candidate.join.capacity)
                for node, candidate in waiting.items()
                if candidate.stage_index is None and candidate.join.role is role
            ]
            if applicants:
                stage_loads = self._stage_loads(view, role)
                for node, stage in sorted(assign_stages(applicants, stage_loads).items()):
                    self._assign(view, node, stage, _reason(stage_loads[stage - 1]))

    def _assign(self, view: View, node: NodeId, stage_index: int, reason: str) -> None:
        candidate = self.candidates[node]
        candidate.stage_index = stage_index
        candidate.reason = reason
        self._out.note("candidate.assigned", peer=node, stage=stage_index)
        self._send_assignment(view, node, candidate)

    def _stage_loads(self, view: View, role: Role) -> list[StageLoad]:
        """Return each relay stage's flows and capacity, candidates on their way included.

        Clients share a stage's work with its servers. Servers are told apart: each stage needs
        some, however many clients it has. There are no flows then: each microbatch passes through
        all stages, so they differ in capacity only. What members have in hand at the moment would
        send all clients to the stage that happens to be at work.
        """
        served = self._run.organisation is Organisation.SERVERS
        loads = self._seats.loads
        result = []
        for stage in range(1, view.num_stages):
            everybody = (*view.workers[stage], *view.clients[stage])
            staying = [m for m in everybody if not self._seats.leaves(m.node_id)]
            members = [m for m in staying if m.role in (role, Role.RELAY)]
            coming = [
                candidate.join
                for candidate in self.candidates.values()
                if candidate.stage_index == stage and candidate.join.role in (role, Role.RELAY)
            ]
            capacity = sum(m.capacity for m in members) + sum(join.capacity for join in coming)
            flows = sum(loads[m.node_id].num_flows for m in members if m.node_id in loads)
            num = len(members) + len(coming)
            flows = 1 if served else flows
            missing = max(0, self._run.protocol.min_nodes_per_stage - num)
            result.append(StageLoad(stage, flows, capacity, missing))
        return result

    def prepared(self, view: View, sender: NodeId, message: Prepared) -> None:
        """A candidate says that its stage stands ready; the answer tells it that we live."""
        candidate = self.candidates.get(sender)
        if candidate is None or candidate.stage_index != message.stage_index:
            return
        if message.cut != view.cut:
            candidate.prepared = False
            self._send_assignment(view, sender, candidate)
            return
        # Once iterations are committed newcomers load their state: what they have built is no more.
        if not self._begun():
            if self._expected_hash(view, sender, message) != message.parameter_hash:
                del self.candidates[sender]
                reason = "it builds other initial weights than the rest of its stage"
                self._out.send(sender, Refuse(reason))
                return
            if candidate.join.role is not Role.CLIENT:
                self._hashes[sender] = message.parameter_hash
        candidate.prepared = True
        candidate.state_at = message.state_at
        self._send_assignment(view, sender, candidate)

    def _expected_hash(self, view: View, sender: NodeId, message: Prepared) -> str:
        """Return what members or candidates of a stage have built, while any of them is there.

        Who has left decides nothing: a stranger may come, say what it likes, and go.
        """
        for node, parameter_hash in self._hashes.items():
            candidate = self.candidates.get(node)
            if node in view:
                stage_index = view.by_id[node].stage_index
            elif candidate is not None and candidate.stage_index is not None:
                stage_index = candidate.stage_index
            else:
                continue
            if node != sender and stage_index == message.stage_index:
                return parameter_hash
        return message.parameter_hash

    def recut(self, num_stages: int) -> None:
        """The model is cut anew, into so many stages: what candidates have built is of no use."""
        for candidate in self.candidates.values():
            candidate.prepared = False
            if candidate.stage_index is not None and candidate.stage_index >= num_stages:
                candidate.stage_index = None
        self._hashes.clear()

    def moved(self, node: NodeId) -> None:
        """A member serves another stage now: what it built at first says nothing of that."""
        self._hashes.pop(node, None)

    def _forget_strangers(self, view: View) -> None:
        """Keep nothing of nodes that are neither members nor candidates any more."""
        for known in (self._incarnations, self._hashes):
            for node in [n for n in known if n not in view and n not in self.candidates]:
                del known[node]

    def enough(self, view: View, anchor: Iteration, *, started: bool) -> bool:
        """Whether members that work and candidates that may enter together fill every stage."""
        entering = [c for c in self.candidates.values() if c.stands_by]
        if started:
            entering = [c for c in entering if self.level(c, anchor)]
        for stage in range(view.num_stages):
            num = len(view.workers[stage])
            keepers = (c for c in entering if c.join.role is not Role.CLIENT)
            num += sum(c.stage_index == stage for c in keepers)
            need = (
                self._run.protocol.min_nodes_per_stage
                if stage
                else self._run.protocol.min_data_nodes
            )
            if num < (1 if started else need):
                return False
        return True


def donors_of(view: View, stage_index: int, candidate: NodeId) -> tuple[Member, ...]:
    """Return members that can give a candidate its stage's state, in its own order of them."""
    members = [m for m in view.roster(stage_index) if m.node_id != candidate]
    if stage_index:
        members.sort(key=lambda m: hashlib.sha256(f"{candidate}/{m.node_id}".encode()).digest())
    # Of stage 0 the leader is the first: whoever serves there has to know where it is.
    return tuple(members[:DONORS_MAX])


def _reason(load: StageLoad) -> str:
    """Return for people why a stage was given to a candidate."""
    if load.num_missing:
        return f"it lacks {load.num_missing} node{'s' if load.num_missing > 1 else ''}"
    return f"{load.num_flows} of {load.capacity} slots are in use there, more than elsewhere"
