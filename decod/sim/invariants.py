"""The invariants, checked after every event from outside the nodes.

- I1 flow: each entry of a relay has one upstream and one downstream. Entries and requests stay
  within the relay's capacity. A complete flow ends where it began.
- I2 once: a committed step contains every microbatch exactly once, the same ones at every stage.
  Their number is the number that the leader announced and the data nodes reported.
- I3 same: all members of a stage hold the same parameters after the same step. No iteration is
  committed by one node and aborted by another. After a rollback, recomputing the same microbatches
  gives the same result to the last bit.
- I4 one leader: no term has two leaders. A node's term and iteration never go back,
  whatever it hears.
- I5 data: at most one committed batch contains each microbatch of an iteration. If nothing is put
  off, that is the microbatch's own batch. A node that took part from the first iteration on counts
  exactly the missing microbatches as put off or skipped. If what lost relays had learnt from is
  trained on again, a later batch contains it too, and says so; such a relay is a member no more.
- I6 memory: a node's storage stays within bounds that follow from its capacity and its stage.
- I7 progress: all iterations are committed within the scenario's time.
- I8 quiet: control messages per node and iteration, and their bytes, stay within a bound that
  follows from the node's peers, whatever the size of the run. So does the time that its core
  computes, if that is measured. `decod.sim.traffic` has the bounds.

`CORE` stands for a core that fails an assertion, misuses its tensors or its compute process, or
bans an honest member as a liar.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from decod.ids import FlowId, Iteration, NodeId
from decod.limits import StageBlocks
from decod.protocol.core import messages as msg
from decod.protocol.core.era import Source
from decod.protocol.core.events import Event, JobFinished, Received, TensorSent
from decod.protocol.core.jobs import Forward, Job
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.membership_messages import Average
from decod.protocol.core.view import Opening, View
from decod.protocol.flows.negotiation.draft import DraftMessage
from decod.protocol.state.replay_sources import FOLLOWERS_MAX, LAG_MAX
from decod.run.protocol_config import ProtocolConfig
from decod.sim.averages import Counts
from decod.sim.core import (
    FlowTable,
    NodeProgress,
    Whereabouts,
    flow_table,
    place_of,
    stage_peers,
    view_of,
)
from decod.sim.invariant_checks import Commits, DataChecker, Decisions, ShareChecker, missed
from decod.sim.kernel import Trace
from decod.sim.profile import ComputeProfile
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import SimHost, World
from decod.sim.traffic import Traffic

_FLOWLESS = frozenset(
    (
        JobFinished,
        TensorSent,
        msg.Heartbeat,
        msg.ForwardActivation,
        msg.BackwardGradient,
        msg.Complete,
        msg.ReducePart,
        msg.ReducedPart,
        msg.GradientSquares,
        msg.GradientNorm,
        Average,
        msg.Ready,
        msg.CanTake,
        msg.UtilisationQuery,
        msg.UtilisationAnswer,
        *get_args(DraftMessage),
    )
)
"""By far the most frequent messages and other events. They do not change flows. If one does by
mistake, the check at the next event about flows finds it."""


_DECISIONS = frozenset((msg.Open,))


class InvariantViolation(AssertionError):  # noqa: N818 - It is what it says, not an error of ours.
    """Something has happened that must never happen: the core or the simulator has a bug.

    Args:
        invariant: `I1` to `I8`, or `CORE`.
        node: Name of the host whose event showed the violation.
        now_s: Virtual time.
        what: Description of the violation, with the values.
        replay: Command that repeats the run.
    """

    def __init__(self, invariant: str, *, node: str, now_s: float, what: str, replay: str) -> None:
        self.invariant = invariant
        self.node = node
        self.what = what
        super().__init__(f"{invariant} at {node}, {now_s:.6f} s: {what}\nReplay: {replay}")


_Term = tuple[int, Iteration]
"""An iteration with the term that opened it: two leaders may give the same attempt number."""


@dataclass(slots=True)
class _Committed:
    """The checker's record of one committed iteration."""

    counts: Counts
    first: str
    again: "_Committed | None" = None
    """The same iteration of an earlier era, computed from the same state and microbatches."""
    hashes: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The parameters' hash of each stage, and the first node that had it."""
    weights: dict[int, str] = field(default_factory=dict)
    """What clients of each stage are to compute with."""


class Checker:
    """Observes a world and raises `InvariantViolation`.

    Args:
        config: The protocol's parameters, which determine the bound of I8.
        profile: Tensor sizes, which determine the bound of I6.
        capacities: Capacities of all hosts.
        batch: Number of microbatches in an iteration.
        replay: Command that runs the same scenario again.
        trace: Collects the events of all hosts.
    """

    def __init__(
        self,
        *,
        config: ProtocolConfig,
        profile: ComputeProfile,
        capacities: dict[NodeId, int],
        batch: int,
        replay: str,
        trace: Trace,
    ) -> None:
        self.audited = False
        """Members hold what auditors compute with."""
        self.num_clients = -1
        """Of the run. -1: its stages have no servers."""
        self._config = config
        self._profile = profile
        self._capacities = capacities
        self._capacity_max = max(capacities.values())
        self._batch = batch
        self._num_put_off = 0
        self._replay = replay
        self._trace = trace
        self._world: World | None = None
        self.traffic = Traffic(config, capacity_max=self._capacity_max, batch=batch)
        self.num_iterations = 0
        """Number of iterations that at least one node has committed."""
        self._made_up: set[int] = set()
        """Eras that began with weights made from neighbouring stages, or with another cut, and all
        later eras."""
        self._cuts: dict[int, StageBlocks] = {}
        """The cut of each era."""
        self._bases: dict[int, int] = {}
        """The iteration that each era began with."""
        self._iterations: dict[tuple[int, int], _Committed] = {}
        """By era and iteration."""
        self._announced: dict[_Term, int] = {}
        self._data = DataChecker(batch, self._bases)
        self._commits = Commits()
        self._steps_locally = False
        self._shares = ShareChecker()
        self._voting: dict[tuple[int, Iteration], View] = {}
        """In which each iteration was last voted on, by the leader's term and the iteration."""
        self._reports: dict[tuple[_Term, int], dict[NodeId, int]] = {}
        self._decisions = Decisions()
        self._leaders: dict[int, str] = {}
        self._places: dict[tuple[NodeId, int], NodeProgress] = {}
        """Each node's progress after its last step, by id and life."""
        self._whereabouts: dict[NodeId, Whereabouts] = defaultdict(Whereabouts)
        self._names: dict[str, str] = {}
        self._num_complete: dict[NodeId, int] = {}
        self._losses: dict[int, float] = {}
        self._memory_bounds: dict[NodeId, int] = {}
        self._per_message: dict[type, Callable[[SimHost, Message], None]] = {
            msg.Report: self._reported,
            msg.BeginAggregation: self._begun,
            msg.Open: self._decided,
        }

    def watch(self, world: World, *, steps_locally: bool = False) -> None:
        """Set the world to watch. From now on flows can be followed from host to host.

        Args:
            world: All hosts.
            steps_locally: Whether each node has a share of the batch, and steps by itself.
        """
        self._steps_locally = steps_locally
        self._world = world
        self._commits.hosts = world.hosts
        self._names.update({host.node_id: host.name for host in world.hosts.values()})

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss of each iteration that was announced as committed."""
        return tuple(self._losses[iteration] for iteration in sorted(self._losses))

    def check_counted(self, host: SimHost) -> None:
        """Check the count of skipped positions of a node that has seen all iterations."""
        place = place_of(host.machine)
        if self._steps_locally and place is not None:
            self._check_batch(host, place.iteration.era, self.num_iterations)
        self._refuse("I5", host, self._data.counted(host, self.num_iterations))

    def violated(self, invariant: str, host: SimHost | None, what: str) -> InvariantViolation:
        """Return the exception for a violation."""
        return InvariantViolation(
            invariant,
            node="nobody" if host is None else host.name,
            now_s=self._now_s,
            what=what,
            replay=self._replay,
        )

    def _refuse(self, invariant: str, host: SimHost, what: str) -> None:
        if what:
            raise self.violated(invariant, host, what)

    @property
    def _now_s(self) -> float:
        return 0.0 if self._world is None else self._world.kernel.now_s

    # --- what the hosts report ----------------------------------------------------------------

    def stepped(self, host: SimHost, event: Event | None) -> None:
        if not host.reachable:
            return
        kind = type(event.message) if isinstance(event, Received) else type(event)
        if kind not in _FLOWLESS and (table := flow_table(host.machine)) is not None:
            self._check_flows(host, table)
        self._check_memory(host)
        self._check_term(host, event)

    def sent(self, host: SimHost, to: NodeId, message: Message) -> None:
        self.traffic.sent(host, to, message)
        look = self._per_message.get(type(message))
        if look is not None:
            look(host, message)

    def computed(self, host: SimHost, job: Job, duration_s: float) -> None:  # noqa: ARG002
        self._refuse("I3", host, wrong_parameters(host, job, self._iterations))

    def committed(self, host: SimHost, step: SimulatedStep) -> None:
        era = _era_of(host, step)
        if self._steps_locally:
            self._check_share(host, step, era)
        else:
            self._check_once(host, step, era)
        self._check_same(host, step, era)
        self._commits.stepped(host, era, step.iteration)
        self._refuse("I8", host, self.traffic.committed(host, self._now_s))
        self.num_iterations = max(self.num_iterations, step.iteration)

    def noted(self, host: SimHost, event: str, fields: tuple[tuple[str, object], ...]) -> None:
        # Names say more than ids of 52 characters.
        shown = {
            key: self._names.get(value, value) if isinstance(value, str) else value
            for key, value in fields
        }
        self._trace.add(self._now_s, host.name, event, shown)
        if event in ("microbatch.deferred", "learning.repeated"):  # Later batches may contain it.
            all_of_it = self._batch if shown.get("microbatch") == "all" else 1
            num = shown.get("num_microbatches", all_of_it)
            self._num_put_off += num if isinstance(num, int) else 0
            self._memory_bounds.clear()

    def misused(self, host: SimHost, text: str, cause: BaseException | None) -> None:
        raise self.violated("CORE", host, text) from cause

    # --- I1 -----------------------------------------------------------------------------------

    def _check_flows(self, host: SimHost, table: FlowTable) -> None:
        # Do not trust the node's own capacity.
        room = min(table.capacity, max(self._capacities[host.node_id], table.num_data_nodes))
        if (num := len(table.downstream) + table.num_pending) > room:
            raise self.violated("I1", host, f"{num} flows and requests for a capacity of {room}")
        if table.relay:
            self._check_entries(host, table)
        elif self._num_complete.get(host.node_id) != len(table.downstream):
            self._num_complete[host.node_id] = len(table.downstream)
            for flow_id in table.downstream:
                self._follow(host, table, flow_id)

    def _check_entries(self, host: SimHost, table: FlowTable) -> None:
        downstream = table.downstream
        upstream = table.upstream
        unpaired = table.unpaired
        for flow_id in downstream:
            if (flow_id in upstream) == (flow_id in unpaired):
                raise self.violated(
                    "I1", host, f"flow {flow_id} is both offered and paired, or neither"
                )
        if len(upstream) + len(unpaired) != len(downstream):
            extra = [f for f in (*upstream, *unpaired) if f not in downstream]
            raise self.violated(
                "I1", host, f"inflows without outflow: {', '.join(str(f) for f in extra)}"
            )

    def _follow(self, data_host: SimHost, table: FlowTable, flow_id: FlowId) -> None:
        """Walk a complete flow from its data node; it must come home."""
        if flow_id.data_node != data_host.node_id:
            raise self.violated("I1", data_host, f"flow {flow_id} is another data node's")
        assert self._world is not None
        before = data_host.node_id
        node_id = table.next_hop(flow_id)
        for _ in range(len(self._world.hosts)):
            host = self._world.hosts[node_id]
            other = flow_table(host.machine) if host.reachable else None
            if other is None or other.version != table.version:
                return  # It died, or is about to leave this view: the flow is not settled.
            if node_id == flow_id.data_node:
                if other.upstream.get(flow_id) != before:
                    raise self.violated("I1", data_host, f"flow {flow_id} comes home unasked for")
                return
            if flow_id not in other.downstream:
                return  # Dropped as broken; its data node will hear of it.
            if other.upstream.get(flow_id, before) != before:
                raise self.violated("I1", host, f"flow {flow_id} has two upstreams")
            before = node_id
            node_id = other.next_hop(flow_id)
        raise self.violated("I1", data_host, f"flow {flow_id} does not come home")

    # --- I2 -----------------------------------------------------------------------------------

    def _check_once(self, host: SimHost, step: SimulatedStep, era: int) -> None:
        for microbatch, num in step.counts:
            if num != 1:
                raise self.violated("I2", host, f"microbatch {microbatch} is folded in {num} times")
        if len(step.counts) != step.weights_total:
            what = f"{len(step.counts)} microbatches divided by {step.weights_total}"
            raise self.violated("I2", host, what)
        known = self._iterations.get((era, step.iteration))
        if known is None:
            again = self._before(era, step)
            self._iterations[era, step.iteration] = _Committed(step.counts, host.name, again)
            self._refuse("I5", host, self._data.committed(step, era))
        elif known.counts != step.counts:
            missing = [str(m) for m, _ in known.counts if m not in dict(step.counts)]
            extra = [str(m) for m, _ in step.counts if m not in dict(known.counts)]
            what = f"lacks {missing} and has too much {extra}, compared with {known.first}"
            raise self.violated("I2", host, f"iteration {step.iteration} {what}")
        told = [at for at in self._announced if (at[1].era, at[1].number) == (era, step.iteration)]
        if told and self._announced[max(told)] != len(step.counts):
            what = f"{len(step.counts)} microbatches, {self._announced[max(told)]} announced"
            raise self.violated("I2", host, f"iteration {max(told)[1]} committed {what}")

    def _check_share(self, host: SimHost, step: SimulatedStep, era: int) -> None:
        place = (era, step.iteration)
        told = [at for at in self._voting if (at[1].era, at[1].number) == place]
        first = place not in self._iterations
        self._iterations.setdefault(place, _Committed((), host.name))
        if not told:
            return  # A candidate takes its stage's steps, but has no share.
        if first:
            self._check_batch(host, era, step.iteration - 1)
        wrong = self._shares.committed(host, step, self._voting[max(told)], era)
        self._refuse("I2", host, wrong)

    def _check_batch(self, host: SimHost, era: int, iteration: int) -> None:
        """Check the batch of an iteration whose nodes have all had time to step."""
        # An era may begin behind an iteration of an earlier one.
        era = max((e for e, n in self._iterations if n == iteration and e <= era), default=era)
        told = [at for at in self._announced if (at[1].era, at[1].number) == (era, iteration)]
        view = self._voting.get(max(told)) if told else None
        counts, whole, wrong = self._shares.batch(era, iteration, view)
        self._refuse("I2", host, wrong)
        if not counts or not told:
            return
        num_unknown = self._announced[max(told)] - len(counts)
        if (whole and num_unknown) or num_unknown < 0:
            what = f"{len(counts)} microbatches, {self._announced[max(told)]} announced"
            raise self.violated("I2", host, f"iteration {iteration} committed {what}")
        step = SimulatedStep(iteration, counts, len(counts), "")
        self._refuse("I5", host, self._data.committed(step, era, num_unknown=num_unknown))

    def _reported(self, host: SimHost, message: Message) -> None:
        assert isinstance(message, msg.Report)
        if message.failure:
            return  # It asks for the iteration to be repeated: nothing of this one is committed.
        # A loss changes the view, which voids earlier reports.
        key = (self._term_of(host, message.iteration), message.view_version)
        reports = self._reports.setdefault(key, {})
        if reports.setdefault(host.node_id, message.num_committed) != message.num_committed:
            raise self.violated("I2", host, f"two reports of iteration {message.iteration}")

    def _begun(self, host: SimHost, message: Message) -> None:
        assert isinstance(message, msg.BeginAggregation)
        named = message.averaging
        iteration = self._term_of(host, named.iteration)
        if (view := view_of(host.machine)) is not None and view.version == named.view_version:
            self._voting[iteration] = view
        num = self._announced.setdefault(iteration, message.num_committed)
        self._data.put_off[iteration] = message.num_deferred
        self._data.reread[iteration] = message.num_reread
        if num != message.num_committed:
            raise self.violated("I2", host, f"two batches announced for {named.iteration}")
        key = (iteration, named.view_version)
        reported = sum(self._reports.get(key, {}).values())
        if num < reported:
            what = f"{num} microbatches announced, {reported} reported"
            raise self.violated("I2", host, f"iteration {named.iteration}: {what}")

    # --- I3 -----------------------------------------------------------------------------------

    def _check_same(self, host: SimHost, step: SimulatedStep, era: int) -> None:
        known = self._iterations[era, step.iteration]
        stage = host.compute.stage_index
        first = known.hashes.setdefault(stage, (step.parameter_hash, host.name))
        known.weights.setdefault(stage, step.weights or step.parameter_hash)
        what = f"parameters of stage {stage} after iteration {step.iteration}"
        if first[0] != step.parameter_hash:
            raise self.violated("I3", host, f"{what} differ from those of {first[1]}")
        before = known.again.hashes.get(stage) if known.again is not None else None
        if before is not None and before[0] != step.parameter_hash:
            raise self.violated("I3", host, f"{what} differ from the first time, at {before[1]}")

    def _before(self, era: int, step: SimulatedStep) -> _Committed | None:
        """Return the same iteration of the previous era, if this step repeats it exactly."""
        iteration = step.iteration
        base = self._bases.get(era)
        if base is None or era in self._made_up:
            return None
        last = self._iterations.get((era, iteration - 1))
        if iteration > base + 1 and (last is None or last.again is None):
            return None
        first = self._committed_in(era - 1, iteration)
        return first if first is not None and first.counts == step.counts else None

    def _committed_in(self, era: int, iteration: int) -> _Committed | None:
        """Return an iteration as an era's members know it: from that era or an earlier one."""
        while era > 0 and iteration <= self._bases.get(era, 0):
            era -= 1
        return self._iterations.get((era, iteration))

    def _decided(self, host: SimHost, message: Message) -> None:
        assert isinstance(message, msg.Open)
        if message.committed:
            self._refuse("I3", host, self._commits.decided(host, message))
            self._check_loss(host, message)
        self._note_era(message.opening)
        before = self._places.get((host.node_id, host.life))
        place = place_of(host.machine)
        if before is None or place is None or not place.leads:
            return  # A node that does not lead only passes on the decision of a later leader.
        if message.committed or before.term == max(self._leaders):
            self._refuse("I3", host, self._decisions.decided(host.name, before.term, message))

    def _note_era(self, opening: Opening) -> None:
        origin = opening.origin
        era = opening.iteration.era
        if origin is None:
            return
        self._bases[era] = opening.committed.number
        # What hashes of another cut hash to has not been before.
        recut = opening.view.cut != self._cuts.get(era - 1, ())
        self._cuts[era] = opening.view.cut
        if origin.source is Source.NEIGHBOURS or recut or era - 1 in self._made_up:
            self._made_up.add(era)

    def _check_loss(self, host: SimHost, message: msg.Open) -> None:
        iteration = message.closed.number
        known = self._iterations.get((message.closed.era, iteration))
        again = known is not None and known.again is not None
        first = self._losses.get(iteration, message.loss)
        if again and first != message.loss:
            what = f"loss {message.loss} of iteration {iteration}, which was {first} the first time"
            raise self.violated("I3", host, what)
        self._losses[iteration] = message.loss

    # --- I4 -----------------------------------------------------------------------------------

    def _check_term(self, host: SimHost, event: Event | None) -> None:
        seen = self._whereabouts[host.node_id]
        moved = seen.moved(host.machine)
        place = seen.place
        if place is None:
            return
        if type(event) is Received and type(event.message) in _DECISIONS:
            self._refuse("I4", host, missed(host, place, event.message))
        if not moved:
            return
        before = self._places.get((host.node_id, host.life), place)
        if (place.term, place.iteration) < (before.term, before.iteration):
            was = f"{before.term}/{before.iteration}"
            now = f"{place.term}/{place.iteration}"
            raise self.violated("I4", host, f"term and iteration went back from {was} to {now}")
        self._places[host.node_id, host.life] = place
        leader = self._leaders.setdefault(place.term, host.name) if place.leads else host.name
        if leader != host.name:
            raise self.violated("I4", host, f"it leads term {place.term}, which {leader} has led")

    def _term_of(self, host: SimHost, iteration: Iteration) -> "_Term":
        place = place_of(host.machine)
        return (place.term if place is not None else 0, iteration)

    # --- I6 -----------------------------------------------------------------------------------

    def memory_bound_bytes(self, host: SimHost) -> int:
        """Return the most that a member may store, in bytes. Candidates have no bound.

        - Two activations and two gradients, in and out, per microbatch that the node holds.
        - Until the end of the iteration, the outgoing activation and gradient of each microbatch of
          the batch or ever put off. If the microbatch is shed, also its incoming activation.
        - The node's own sum, the parts that it reduces, and the reduced parts. Each is as large as
          the stage's parameters. Parts are rounded up to a byte, hence the small addition.
        - The averages on their way to followers.
        - Two copies of a stage's state: one sent or received, and one for the disk.
        - If work is audited, what one other relay got and has sent in the iteration.
        - Where stages have servers, these keep both what came and what went of all microbatches,
          and their own worker keeps what it has made. They hold the sums of all clients.
        """
        flows = 4 * self._capacities[host.node_id] * self._profile.activation_bytes
        flows += 3 * (self._batch + self._num_put_off) * self._profile.activation_bytes
        flows += 4 * self.audited * self._batch * self._profile.activation_bytes
        parts = (13 + FOLLOWERS_MAX * LAG_MAX) * self._profile.parameter_bytes
        if self.num_clients >= 0:
            flows += 3 * (self._batch + self._num_put_off) * self._profile.activation_bytes
            parts += self.num_clients * self._profile.parameter_bytes
        return flows + parts + 4 * len(self._capacities)

    def _check_memory(self, host: SimHost) -> None:
        bound_bytes = self._memory_bounds.get(host.node_id)
        if bound_bytes is None:
            bound_bytes = self._memory_bounds[host.node_id] = self.memory_bound_bytes(host)
        if host.tensors.stored_bytes > bound_bytes and stage_peers(host.machine):
            kinds = [type(content).__name__ for content in host.tensors.contents]
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted({*kinds}))
            what = f"{host.tensors.stored_bytes} bytes stored, {bound_bytes} allowed: {counts}"
            raise self.violated("I6", host, what)
        num = len(host.compute.held)
        capacity = self._capacities[host.node_id]
        if num > capacity:
            raise self.violated("I6", host, f"{num} microbatches held, the capacity is {capacity}")


def wrong_parameters(
    host: SimHost, job: Job, committed: Mapping[tuple[int, int], _Committed]
) -> str:
    """Return whether a client has computed with other parameters than its stage has, and which."""
    compute = host.compute
    place = place_of(host.machine)
    if not compute.is_client or not isinstance(job, Forward) or place is None:
        return ""
    known = committed.get((place.iteration.era, compute.iteration))
    right = known.weights.get(compute.stage_index) if known is not None else None
    if right in (None, compute.used_hash):
        return ""
    return f"it computes with other parameters than its stage has after {compute.iteration}"


def _era_of(host: SimHost, step: SimulatedStep) -> int:
    """Return the era of a step. Its node may have gone back since the vote on it."""
    place = place_of(host.machine) if host.reachable else None
    if place is None:
        return 0
    return place.iteration.era - (place.iteration.number <= step.iteration)
