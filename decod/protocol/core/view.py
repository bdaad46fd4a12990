"""Who takes part: the membership of a run at one version, and everything that follows from it.

A `View` is decided by the leader alone and changes only between iterations, so all that is derived
from it here (rosters, trees, watchers, neighbours, quotas) is the same on every node without a
message. The functions are pure; nothing here is stored twice.

Trees: announcements of the leader go down one tree over all members, reports come back up it. The
stage's first members form a heap with `fanout` children each, and so do the members of every stage
under their first. A node therefore deals with at most `2 * fanout + 1` others, whatever the size of
the run (invariant I8).
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, NamedTuple, TypeVar

from decod.ids import Iteration, NodeId, NodeIds
from decod.limits import (
    MEMBERS_MAX,
    Address,
    AtMost,
    DataNodeIndex,
    NodeName,
    Number,
    NumFlows,
    NumStages,
    Ordinal,
    Sha256,
    StageBlocks,
    StageIndex,
    malformed,
    unique,
)
from decod.protocol.core.average_spec import WHOLE, AverageSpec, SlowShares, StageVersions
from decod.protocol.core.era import MARKS_MAX, Mark, Origin

T = TypeVar("T")


class Role(StrEnum):
    """Which part a node plays."""

    DATA = "data"
    """Holds data; runs stage 0; source and sink of its flows."""
    RELAY = "relay"
    """Runs one inner stage, and keeps its whole state."""
    CLIENT = "client"
    """Works for the servers of one inner stage. It holds that stage's parameters, and no more of
    its state. Only in runs whose stages are organised as servers."""


class Duty(StrEnum):
    """What a relay does for its stage's clients, where stages are organised as servers."""

    NONE = ""
    """It is no server, or its stage decides."""
    FRONTAL = "frontal"
    """It takes activations from the stage before, and has its stage compute forward passes."""
    BACKWARD = "backward"
    """It takes gradients from the stage behind, and has its stage compute backward passes."""


class Reach(StrEnum):
    """Who can connect to a member, and whether others' traffic may pass through it."""

    DIALLED = "dialled"
    """Others dial it."""
    PASSES_ON = "passes_on"
    """Others dial it, and it passes on connections to members that nobody can dial."""
    OUTBOUND = "outbound"
    """Nobody can dial it. Others' connections travel over calls that it keeps open."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node that takes part in the run."""

    node_id: NodeId
    address: Address
    """`host:port` of its gRPC (TCP) and DHT (UDP) sockets."""
    role: Role
    stage_index: StageIndex
    """0 for data nodes."""
    capacity: NumFlows
    """Microbatches that it can hold at a time. 0: a relay that its operator has paused; it keeps
    its stage's state in step, and takes no microbatches."""
    data_node_index: DataNodeIndex = -1
    """Ordinal of a data node, which decides its share of the data; -1 for relays."""
    since_iteration: Ordinal = 0
    """Last committed iteration when it was admitted. A member admitted after an iteration t of
    this run first loads the stage's state of t from an older member."""
    name: NodeName = ""
    """For people. Never used to find or trust a node."""
    duty: Duty = Duty.NONE
    """Of a server."""
    reach: Reach = Reach.DIALLED
    """Never `OUTBOUND` for data nodes: strangers dial them to join."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if its role does not allow the rest."""
        if (self.role is Role.DATA) != (self.stage_index == 0):
            allowed = "0 for data nodes and only for them"
            raise malformed("stage_index", self.stage_index, allowed=allowed)
        if (self.role is Role.DATA) != (self.data_node_index >= 0):
            allowed = "-1 for relays and only for them"
            raise malformed("data_node_index", self.data_node_index, allowed=allowed)
        if self.duty is not Duty.NONE and self.role is not Role.RELAY:
            raise malformed("duty", self.duty.value, allowed="none but for relays")
        if self.outbound and self.role is Role.DATA:
            raise malformed("reach", self.reach.value, allowed="not for data nodes")

    @property
    def outbound(self) -> bool:
        """Whether nobody can dial it."""
        return self.reach is Reach.OUTBOUND

    @property
    def label(self) -> str:
        """What people are told: its name, or else the beginning of its id."""
        return self.name or self.node_id[:8]


@dataclass(frozen=True)
class View:
    """The members of a run between two membership changes. Immutable; versions only grow."""

    version: Ordinal
    """Grows with every change."""
    leader: NodeId
    """A member at stage 0."""
    term: Ordinal
    """Election number of the leader."""
    num_stages: NumStages
    """Stage 0 and all relay stages, also those that have no member at present."""
    members: Annotated[tuple[Member, ...], AtMost(MEMBERS_MAX)]
    """In order of (stage, leader first, node id): the same on every node."""
    cut: StageBlocks = ()
    """How the model is cut. None: as the run file says."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if it breaks a rule of views, unless it has no members: a
        change goes with such a one."""
        if self.cut and len(self.cut) != self.num_stages - 1:
            raise malformed("cut", self.cut, allowed="of each relay stage, or none")
        if self.members and (fault := fault_of(self)) is not None:
            raise malformed(fault.field, fault.value, allowed=fault.allowed)

    @staticmethod
    def of(
        members: Iterable[Member],
        *,
        version: int,
        leader: NodeId,
        term: int,
        num_stages: int,
        cut: StageBlocks = (),
    ) -> "View":
        """Return a view with its members in the canonical order."""
        ordered = sorted(members, key=lambda m: (m.stage_index, m.node_id != leader, m.node_id))
        return View(
            version=version,
            leader=leader,
            term=term,
            num_stages=num_stages,
            members=tuple(ordered),
            cut=cut,
        )

    def successor(
        self, members: Iterable[Member], *, leader: NodeId, cut: StageBlocks = ()
    ) -> "View":
        """Return the view of the next version, with these members.

        Args:
            members: All.
            leader: One of them.
            cut: Another cut. None: the same.
        """
        return View.of(
            members,
            version=self.version + 1,
            leader=leader,
            term=self.term,
            num_stages=len(cut) + 1 if cut else self.num_stages,
            cut=cut or self.cut,
        )

    @cached_property
    def by_id(self) -> dict[NodeId, Member]:
        return {member.node_id: member for member in self.members}

    @cached_property
    def rosters(self) -> tuple[tuple[Member, ...], ...]:
        """Members of every stage that keep its state, index 0 first.

        A stage without any is an empty tuple.
        """
        return self._by_stage(lambda member: member.role is not Role.CLIENT)

    @cached_property
    def clients(self) -> tuple[tuple[Member, ...], ...]:
        """Clients of every stage, index 0 first."""
        return self._by_stage(lambda member: member.role is Role.CLIENT)

    def _by_stage(self, wanted: Callable[[Member], bool]) -> tuple[tuple[Member, ...], ...]:
        result: list[list[Member]] = [[] for _ in range(self.num_stages)]
        for member in self.members:
            if wanted(member):
                result[member.stage_index].append(member)
        return tuple(tuple(stage) for stage in result)

    @cached_property
    def keepers(self) -> tuple[NodeId, ...]:
        """All members but the clients, in the view's order: its leader first."""
        return tuple(member.node_id for member in self.members if member.role is not Role.CLIENT)

    def roster(self, stage_index: int) -> tuple[Member, ...]:
        return self.rosters[stage_index]

    @property
    def empty_stages(self) -> tuple[int, ...]:
        return tuple(index for index, roster in enumerate(self.rosters) if not roster)

    @cached_property
    def workers(self) -> tuple[tuple[Member, ...], ...]:
        """Members of every stage that keep its state and take microbatches: all but the paused."""
        return tuple(tuple(m for m in roster if m.capacity) for roster in self.rosters)

    @cached_property
    def worker_places(self) -> dict[NodeId, int]:
        """Each worker's position among those of its stage."""
        return {m.node_id: index for stage in self.workers for index, m in enumerate(stage)}

    @property
    def idle_stages(self) -> tuple[int, ...]:
        """Stages that nobody works on: nobody keeps their state, or all of theirs are paused."""
        working = [any(client.capacity for client in stage) for stage in self.clients]
        return tuple(
            index
            for index, (roster, workers) in enumerate(zip(self.rosters, self.workers, strict=True))
            if not (workers or (roster and working[index]))
        )

    @cached_property
    def last_workers(self) -> frozenset[NodeId]:
        """Those without whom nobody would work on their stage."""
        return frozenset(workers[0].node_id for workers in self.workers if len(workers) == 1)

    @cached_property
    def data_nodes(self) -> tuple[Member, ...]:
        return self.roster(0)

    @cached_property
    def ranks(self) -> dict[NodeId, int]:
        """The data nodes but the leader, in the order in which they stand if it is lost; from 0."""
        others = [m.node_id for m in self.data_nodes if m.node_id != self.leader]
        return {node_id: rank for rank, node_id in enumerate(others)}

    def __contains__(self, node_id: object) -> bool:
        return node_id in self.by_id

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything in the view, in hexadecimal digits."""
        head = f"{self.version} {self.term} {self.num_stages} {self.leader} {self.cut}"
        text = "\n".join((head, *map(_line_of, self.members)))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def outline(self) -> "View":
        """The view without its members."""
        return replace(self, members=()) if self.members else self

    @cached_property
    def places(self) -> dict[NodeId, int]:
        """Each member's position in its stage's roster."""
        return {m.node_id: index for roster in self.rosters for index, m in enumerate(roster)}

    @cached_property
    def ring(self) -> tuple[NodeId, ...]:
        """All members in the order of their ids."""
        return tuple(sorted(self.by_id))


def _line_of(m: Member) -> str:
    # No field can hold a line's end; only the name may be empty, and it stands last.
    return (
        f"{m.node_id} {m.address} {m.role.value} {m.stage_index} {m.capacity} "
        f"{m.data_node_index} {m.since_iteration} {m.duty.value} {m.reach.name} {m.name}"
    )


class ViewFault(NamedTuple):
    """A rule of views that one breaks."""

    field: str
    value: object
    allowed: str


def fault_of(view: View) -> ViewFault | None:
    """Return the first rule that a view breaks: those by which a node finds its place in it."""
    if len(view.by_id) != len(view.members):
        return ViewFault("members", "a node twice", "each node once")
    leader = view.by_id.get(view.leader)
    if leader is None or leader.stage_index != 0:
        return ViewFault("leader", view.leader, "a member at stage 0")
    stage_index_max = max(member.stage_index for member in view.members)
    if stage_index_max >= view.num_stages:
        allowed = f"less than num_stages, which is {view.num_stages}"
        return ViewFault("stage_index", stage_index_max, allowed)
    data_node_indexes = [m.data_node_index for m in view.members if m.role is Role.DATA]
    if len(set(data_node_indexes)) != len(data_node_indexes):
        return ViewFault("data_node_index", "given twice", "each given once")
    ordered = View.of(
        view.members, version=0, leader=view.leader, term=0, num_stages=view.num_stages
    )
    if view.members != ordered.members:
        return ViewFault("members", "unordered", "by stage, leader first, node id")
    return None


@dataclass(frozen=True, slots=True)
class Opening:
    """The iteration that begins, and who takes part in it."""

    iteration: Iteration
    """The next iteration."""
    committed: Iteration
    """The last iteration whose step is final; before the first the iteration that the run starts
    from, 0 if it begins anew, with attempt 0."""
    view: View
    """Who takes part in it."""
    paused: bool = False
    """Nothing is injected: all iterations are done, and members keep their state until released."""
    epoch: Number = 0
    """The settlement whose flows are used from this iteration on; 0: those that Request Flow
    built."""
    electors: NodeIds = ()
    """Members of the last committed view, its leader first: see `protocol.leadership.quorum`. None:
    they are the members of `view`."""
    marks: Annotated[tuple[Mark, ...], AtMost(MARKS_MAX)] = ()
    """The newest iterations whose states are kept, oldest first."""
    origin: Origin | None = None
    """How the iteration's era began, until the era's first commit; None in the first."""
    averaged: Iteration | None = None
    """The last committed iteration that ended a local phase, or with an average that had travelled,
    if that is not `committed`."""
    due: Ordinal = 0
    """The iteration that ends the local phase, if that is a later one. Until then each member steps
    from its own gradients."""
    spec: AverageSpec = WHOLE
    """Of the average that the local phase ends with."""
    travelling: AverageSpec | None = None
    """Of the average that travels while members train on. It is of what they had learnt by the
    anchor. None: none does."""
    slow: SlowShares = ()
    """Members that send slowly, and their shares of averages that begin now. Others have
    `SHARE_FULL`."""
    travelled: StageVersions = ()
    """(stage index, version) of averages that have travelled to all members of their stages. These
    keep them, whoever is lost."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if the marks are not in order."""
        iterations = [mark.iteration for mark in self.marks]
        if iterations != sorted(set(iterations)):
            raise malformed("marks", iterations, allowed="in order, each iteration once")

    @property
    def local(self) -> bool:
        """Whether the local phase goes on behind the iteration: its own average is not made yet."""
        return self.iteration.number < self.due

    @property
    def arrival(self) -> bool:
        """Whether the iteration ends with the average that has travelled, amid a local phase.

        It does as soon as all members of all stages have it.
        """
        return self.local and len(self.travelled) == len(self.view.rosters)

    @property
    def anchor(self) -> Iteration:
        """The iteration whose state the members of a stage have in common."""
        return self.committed if self.averaged is None else self.averaged

    def mark_of(self, iteration: int) -> Mark | None:
        """Return the mark of an iteration, if its states are kept."""
        return next((mark for mark in self.marks if mark.iteration == iteration), None)

    def marked_hash(self, iteration: int, stage_index: int) -> str:
        """Return what a stage's parameters were at a mark in the cut of the view; empty if that is
        not known."""
        mark = self.mark_of(iteration)
        same = mark is not None and mark.cut == self.view.cut
        return mark.hash_of(stage_index) if mark is not None and same else ""


def _heap_children(items: Sequence[T], index: int, fanout: int) -> Sequence[T]:
    return items[index * fanout + 1 : index * fanout + 1 + fanout]


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A node's neighbours in the announcement tree."""

    parent: NodeId | None
    children: tuple[NodeId, ...]


def tree_place(view: View, node_id: NodeId, *, fanout: int) -> TreePlace:
    """Return whom `node_id` hears announcements from and passes them on to.

    Clients are leaves. Those of a stage are dealt out among its servers, or hang under the leader
    if it has none.
    """
    member = view.by_id[node_id]
    roster = view.roster(member.stage_index)
    clients = view.clients[member.stage_index]
    if member.role is Role.CLIENT:
        served_by = roster[clients.index(member) % len(roster)] if roster else view.members[0]
        return TreePlace(served_by.node_id, ())
    index = view.places[node_id]
    children = [m.node_id for m in _heap_children(roster, index, fanout)]
    children += [m.node_id for m in clients[index :: len(roster)]]
    if node_id == view.leader:
        deserted = [view.clients[stage] for stage in view.empty_stages]
        children += [client.node_id for stage in deserted for client in stage]
    if index:
        return TreePlace(roster[(index - 1) // fanout].node_id, tuple(children))
    heads = [stage[0].node_id for stage in view.rosters if stage]
    head_index = heads.index(node_id)
    children += _heap_children(heads, head_index, fanout)
    parent = heads[(head_index - 1) // fanout] if head_index else None
    return TreePlace(parent, tuple(children))


def orphans(view: View, gone: Sequence[NodeId], *, fanout: int) -> list[NodeId]:
    """Return who hears announcements from nodes that are gone, and is not gone too."""
    children = {c for node in gone for c in tree_place(view, node, fanout=fanout).children}
    return sorted(children.difference(gone))


def watchers(view: View, node_id: NodeId, *, num_watchers: int) -> tuple[NodeId, ...]:
    """Return the nodes that listen for `node_id`'s heartbeat: its successors on a ring of ids."""
    return _ring(view, node_id, range(1, num_watchers + 1))


def watched(view: View, node_id: NodeId, *, num_watchers: int) -> tuple[NodeId, ...]:
    """Return the nodes whose heartbeat `node_id` listens for; the inverse of `watchers`."""
    return _ring(view, node_id, range(-1, -num_watchers - 1, -1))


def _ring(view: View, node_id: NodeId, offsets: Iterable[int]) -> tuple[NodeId, ...]:
    ring = view.ring
    start = bisect_left(ring, node_id)
    found = (ring[(start + offset) % len(ring)] for offset in offsets)
    return tuple(other for other in dict.fromkeys(found) if other != node_id)


def next_peers(view: View, node_id: NodeId, *, max_peers: int) -> tuple[NodeId, ...]:
    """Return the nodes of the next stage that `node_id` may send microbatches to.

    Data nodes know all of the first stage and all of the last: a flow must end where it began, and
    may begin anywhere. Elsewhere every node of the next stage is known to somebody: two stages
    larger than `max_peers` are laid along each other, and each node knows those nearest to its own
    place. Paused nodes neither know nor are known.
    """
    member = view.by_id[node_id]
    if not member.capacity or member.role is Role.CLIENT:
        return ()
    stage = member.stage_index
    here = view.workers[stage]
    there = view.workers[(stage + 1) % view.num_stages]
    if stage in (0, view.num_stages - 1) or len(there) <= max_peers:
        return tuple(m.node_id for m in there)
    index = view.worker_places[node_id]
    num = max(max_peers, -(-len(there) // len(here)))
    start = index * len(there) // len(here)
    return tuple(there[(start + k) % len(there)].node_id for k in range(num))


def previous_peers(view: View, node_id: NodeId, *, max_peers: int) -> tuple[NodeId, ...]:
    """Return the nodes that may send microbatches to `node_id`; the inverse of `next_peers`."""
    stage = view.by_id[node_id].stage_index
    before = view.workers[stage - 1 if stage else view.num_stages - 1]
    return tuple(
        m.node_id for m in before if node_id in next_peers(view, m.node_id, max_peers=max_peers)
    )


def stage_peers(view: View, node_id: NodeId, *, max_peers: int) -> tuple[NodeId, ...]:
    """Return the other nodes of its stage that `node_id` may exchange parts of flows with.

    In a large stage those nearest to it on a ring, so that whom it knows knows it too.
    """
    stage = [m.node_id for m in view.workers[view.by_id[node_id].stage_index]]
    if node_id not in stage:
        return ()
    here = stage.index(node_id)
    reach = max(1, max_peers // 2)
    offsets = range(-reach, reach + 1) if 2 * reach + 1 < len(stage) else range(len(stage))
    found = dict.fromkeys(stage[(here + offset) % len(stage)] for offset in offsets)
    return tuple(other for other in found if other != node_id)


def flow_quota(view: View, node_id: NodeId) -> dict[NodeId, int]:
    """Return how many flows of each data node a relay should carry; at most its room in all.

    The stage's room and the data nodes' slots are laid along each other, each in roster order
    and stretched to the same length, and paired one by one. So a stage shares the work in
    proportion to capacity, no data node is left without flows because another asked first, every
    relay computes the same, and neighbours along the pipeline serve the same data nodes. (GWTF
    leaves both questions open; with plain first come, first served, one of two equal relays may
    take all flows and the other idle.)
    """
    capacities = _positions(view, view.roster(view.by_id[node_id].stage_index))
    slots = _positions(view, view.data_nodes)
    num_pairs = min(len(capacities), len(slots))
    quota: dict[NodeId, int] = {}
    for pair in range(num_pairs):
        if capacities[pair * len(capacities) // num_pairs] == node_id:
            data_node = slots[pair * len(slots) // num_pairs]
            quota[data_node] = quota.get(data_node, 0) + 1
    return quota


def flow_room(view: View, node_id: NodeId) -> int:
    """Return how many flows a member may carry: its capacity, or more if its stage has too little.

    A stage with room for fewer microbatches than there are data nodes carries a flow of each, or
    some would have no way through; what a relay can't hold waits there, or is shed
    (`relay_microbatches`). Deviation from GWTF, where such a data node's batch is put off.
    """
    member = view.by_id[node_id]
    roster = view.roster(member.stage_index)
    total = sum(m.capacity for m in roster)
    num = len(view.data_nodes)
    if total >= num or not member.capacity:
        return member.capacity
    before = sum(m.capacity for m in roster[: roster.index(member)])
    return (before + member.capacity) * num // total - before * num // total


def _positions(view: View, members: Sequence[Member]) -> list[NodeId]:
    """Return each member as often as it has room for flows."""
    return [m.node_id for m in members for _ in range(flow_room(view, m.node_id))]


@dataclass(frozen=True, slots=True)
class ElectorChange:
    """The electors of an opening, as the difference from the members of its view."""

    first: NodeId
    """The leader of the last committed view. It is an elector."""
    without_vote: NodeIds = ()
    """Members that are no electors."""
    former: NodeIds = ()
    """Electors that are no members."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if a node is an elector and none."""
        unique("former", (*self.without_vote, *self.former))
        if self.first in self.without_vote:
            raise malformed("first", self.first, allowed="an elector")


@dataclass(frozen=True, slots=True)
class ViewChange:
    """What turns one view into another. The other's version, term and leader stand beside it."""

    base: Sha256
    """Hash of the view that it changes."""
    result: Sha256
    """Hash of the view that it makes. As `base`, if nothing changes."""
    gone: NodeIds = ()
    """Members of the base that are no members any more."""
    changed: Annotated[tuple[Member, ...], AtMost(MEMBERS_MAX)] = ()
    """Members that are new, or differ from the base's. Each node once, and not among the gone."""
    electors: ElectorChange | None = None
    """None: the electors are the members."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if the change contradicts itself."""
        nodes = [*self.gone, *(member.node_id for member in self.changed)]
        if len(set(nodes)) != len(nodes):
            raise malformed("changed", "a node twice", allowed="each node once, gone or changed")
        if self.base == self.result and nodes:
            raise malformed("result", self.result, allowed="another hash than base's")


def verify_told(view: View, change: ViewChange | None) -> None:
    """Raise `MalformedMessageError` unless a view is told whole or as a change, and not both."""
    if view.members and change is not None:
        raise malformed("members", "given", allowed="none beside a change of the view")
    if not view.members and change is None:
        raise malformed("members", "0 entries", allowed="1 entry or a change of the view")


def change_between(base: View, view: View, electors: Sequence[NodeId] = ()) -> ViewChange:
    """Return what turns `base` into `view`, and the electors of an opening into its members."""
    told = _elector_change(view, electors) if electors else None
    if base is view:
        return ViewChange(view.hash, view.hash, electors=told)
    before = base.by_id
    after = view.by_id
    gone = tuple(member.node_id for member in base.members if member.node_id not in after)
    changed = tuple(m for m in view.members if before.get(m.node_id) != m)
    return ViewChange(base.hash, view.hash, gone, changed, told)


def changed_view(base: View, outline: View, change: ViewChange) -> View | None:
    """Return the view that a change makes of its base, if it is the one that its sender has.

    Args:
        base: A view that this node knows.
        outline: The new view without its members.
        change: What the sender says.

    Returns:
        None if the hash of the base or of the result is another, or the result breaks a rule of
        views.
    """
    if base.hash != change.base:
        return None
    if change.base == change.result and not (change.gone or change.changed):
        return base if base.outline == outline else None
    dropped = {*change.gone, *(member.node_id for member in change.changed)}
    kept = (member for member in base.members if member.node_id not in dropped)
    view = View.of(
        (*kept, *change.changed),
        version=outline.version,
        leader=outline.leader,
        term=outline.term,
        num_stages=outline.num_stages,
        cut=outline.cut,
    )
    return view if view.hash == change.result and fault_of(view) is None else None


def changed_electors(view: View, change: ElectorChange | None) -> tuple[NodeId, ...]:
    """Return the electors of an opening: none if they are its members."""
    if change is None:
        return ()
    lacking = {*change.without_vote, change.first}
    members = (m.node_id for m in view.members if m.node_id not in lacking)
    return tuple(dict.fromkeys((change.first, *members, *change.former)))


def _elector_change(view: View, electors: Sequence[NodeId]) -> ElectorChange:
    chosen = set(electors)
    return ElectorChange(
        electors[0],
        tuple(m.node_id for m in view.members if m.node_id not in chosen),
        tuple(node for node in electors if node not in view.by_id),
    )


HOSTS_BETWEEN = 4
"""Hosts at which a member that nobody can dial keeps a call open for others, beside the leader. If
one is lost, the next takes over."""


def hosts_between(members: Iterable[Member], leader: NodeId, goal: NodeId) -> list[Member]:
    """Return the members that pass on connections to another one, the first choice first.

    Each goal has other hosts, so that the traffic spreads. The leader comes last, because each
    candidate keeps a call open there, too, and a candidate may know no other member yet.

    Members dial each other, and a member that nobody can dial dials all others. So a host in
    between is needed only between two members that nobody can dial, or where the one that can be
    dialled begins. Both ends find the same hosts from the view, without a message.

    Args:
        members: Those that the node that asks knows of: its view's.
        leader: The leader.
        goal: A member, or a candidate.
    """
    able = [m for m in members if m.reach is Reach.PASSES_ON and m.node_id != goal]
    ranked = sorted(able, key=lambda m: hashlib.sha256(f"{goal}/{m.node_id}".encode()).digest())
    chosen = [m for m in ranked if m.node_id != leader][:HOSTS_BETWEEN]
    return [*chosen, *(m for m in able if m.node_id == leader)]


def passed_peers(view: View, node: NodeId) -> frozenset[NodeId]:
    """Return the members whose traffic with a member passes through another host."""
    own = view.by_id.get(node)
    if own is None or not own.outbound:
        return frozenset()
    return frozenset(m.node_id for m in view.members if m.outbound and m.node_id != node)
