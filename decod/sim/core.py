"""Access to the core: only this file knows the core's constructor and internals."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from decod.ids import FlowId, Iteration, NodeId
from decod.planner.graph import Route
from decod.protocol.core.bans import NO_BANS, BanList
from decod.protocol.core.context import (
    NO_PROMISE,
    Identity,
    Promise,
    RunFacts,
)
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.events import Event, Received
from decod.protocol.core.messages import FlowAnswer, FlowCost, RequestFlow, Withdraw
from decod.protocol.core.messages.routing_messages import RoutingMessage
from decod.protocol.core.view import Reach, Role, View, tree_place
from decod.protocol.flows.building import DataFlows, Granted, RelayFlow, RelayFlows
from decod.protocol.leadership.leader import LeaderState
from decod.protocol.leadership.quorum import electors_of, ids_of
from decod.protocol.node_machine import NodeMachine
from decod.protocol.strategy.data_share import Positions
from decod.protocol.strategy.pipeline import Pipeline
from decod.run.run_config import RunConfig
from decod.sim.audited_work import SimulatedProofs
from decod.sim.profile import ComputeProfile

_MANIFEST_SHA256 = "0" * 64
"""Manifest hash of every simulated run: all nodes agree on what they train."""


class Machine(Protocol):
    """The core as the simulator uses it: `NodeMachine`, or a stand-in in a test."""

    @property
    def deadline_s(self) -> float | None: ...

    def start(self, now_s: float) -> list[Effect]: ...

    def step(self, now_s: float, event: Event) -> list[Effect]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """A node that wants to join a run."""

    name: str
    node_id: NodeId
    leader: NodeId
    role: Role
    capacity: int
    stage_index: int | None
    """The stage that a relay or client insists on, if any."""
    reach: Reach = Reach.DIALLED
    """Who can connect to the host."""
    promise: Promise = NO_PROMISE
    """The vote on the host's disk."""
    bans: BanList = NO_BANS
    """The list of bans on the host's disk."""


def build_machine(
    founding: Founding, run: RunConfig, profile: ComputeProfile, *, rng: random.Random
) -> NodeMachine:
    """Return the core of one node."""
    identity = Identity(
        node_id=founding.node_id,
        address=f"{founding.name}:7700",
        role=founding.role,
        capacity=founding.capacity,
        compute_s=profile.pass_s(data=founding.role is Role.DATA),
        name=founding.name,
        reach=founding.reach,
        stage_index=None if founding.role is Role.DATA else founding.stage_index,
        bans=founding.bans,
        read_bans=read_bans,
        proofs=SimulatedProofs(),
    )
    facts = RunFacts(
        manifest_sha256=_MANIFEST_SHA256,
        activation_size_bytes=profile.activation_bytes,
        promise=founding.promise,
    )
    return NodeMachine(identity, run, facts, leader=founding.leader, rng=rng)


def read_bans(statement: bytes) -> BanList | str:
    """Return the list in a statement of `with_ban`. Nobody forges one here."""
    version, banned = json.loads(statement)
    return BanList(version, banned, statement)


def with_ban(machine: object, node: NodeId, *, banned: bool, now_s: float) -> BanList | None:
    """Return the next list of bans, with or without a node; None if the leader may not make it.

    Args:
        machine: The leader's.
        node: Another node.
        banned: Whether it is to be banned.
        now_s: The time. As in a daemon, later lists have larger versions, whoever makes them.
    """
    core = _core_of(machine)
    leader = core.leader if core is not None else None
    if core is None or leader is None or leader.quorum.lacking or node == leader.node_id:
        return None
    rest = [member for member in leader.view.by_id if member != node]
    if banned and not leader.quorum.allows(rest):
        return None
    known = core.context.bans
    now = {**known.banned, node: "banned: it lies"}
    version = max(known.version + 1, int(now_s * 1000))
    if not banned:
        del now[node]
    return BanList(version, now, json.dumps([version, now]).encode())


def without(bans: BanList, node: NodeId) -> BanList:
    """Return a later list without a node."""
    now = {other: why for other, why in bans.banned.items() if other != node}
    return BanList(bans.version + 1, now, json.dumps([bans.version + 1, now]).encode())


def _core_of(machine: object) -> NodeMachine | None:
    if type(machine) is NodeMachine:
        return machine
    # A test's wrapper around the core exposes the core under this name.
    core = getattr(machine, "wrapped", machine)
    return core if isinstance(core, NodeMachine) else None


class NodeProgress(NamedTuple):
    """A node's progress, as a checker sees it."""

    term: int
    """Term of its view."""
    iteration: Iteration
    leads: bool
    """Whether the node leads that term."""
    in_view: bool


def place_of(machine: object) -> NodeProgress | None:
    """Return a node's progress, or None for a stand-in."""
    core = _core_of(machine)
    if core is None:
        return None
    context = core.context
    leads = core.leader is not None
    return NodeProgress(context.view.term, context.iteration, leads, core.in_view)


class Whereabouts:
    """A node's progress, looked up again only if a part of its state was replaced.

    Views and iterations are immutable, so comparing identities is enough: a node that moves holds
    new objects.
    """

    __slots__ = ("_iteration", "_leader", "_machine", "_view", "place")

    def __init__(self) -> None:
        self.place: NodeProgress | None = None
        self._machine: object = None
        self._view: object = None
        self._iteration: object = None
        self._leader: object = None

    def moved(self, machine: object) -> bool:
        """Look at the machine, and return whether `place` may have changed."""
        core = _core_of(machine)
        if core is None:
            self.place = None
            return False
        context = core.context
        leader = core.leadership.leader
        if (
            context.view is self._view
            and context.iteration is self._iteration
            and leader is self._leader
            and machine is self._machine
        ):
            return False
        self._machine = machine
        self._view = context.view
        self._iteration = context.iteration
        self._leader = leader
        self.place = place_of(machine)
        return True


def ends_run(machine: object) -> bool:
    """Return whether a node leads, and would end the run if it were asked to leave."""
    core = _core_of(machine)
    if core is None or core.leader is None:
        return False
    return not core.leadership.handover.possible(core.leader)


def pipeline_of(core: NodeMachine) -> Pipeline:
    """Return the strategy of a node whose stages are organised as a pipeline."""
    assert isinstance(core.strategy, Pipeline)
    return core.strategy


def positions_of(machine: object) -> Positions | None:
    """Return a node's count of the data, or None for a stand-in."""
    core = _core_of(machine)
    return core.strategy.facts.positions if core is not None else None


def view_of(machine: object) -> View | None:
    """Return a node's view, or None for a stand-in."""
    core = _core_of(machine)
    return core.context.view if core is not None else None


def subtree_size(machine: object, fanout: int) -> int:
    """Return how many members hear the leader's announcements through a node, itself included.

    0 before it is a member.
    """
    core = _core_of(machine)
    if core is None or not core.in_view:
        return 0
    view = core.context.view
    nodes = [core.context.node_id]
    for node in nodes:
        nodes += tree_place(view, node, fanout=fanout).children
    return len(nodes)


def term_of(machine: object) -> int:
    """Return the term that a node's messages carry, or 0 for a stand-in."""
    core = _core_of(machine)
    return core.context.view.term if core is not None else 0


class FlowTable:
    """A node's flows, as a checker sees them. They are no copies and change with the machine."""

    __slots__ = ("_core", "flows", "relay")

    def __init__(self, core: NodeMachine, flows: RelayFlows | DataFlows) -> None:
        self._core = core
        self.flows = flows
        self.relay = isinstance(flows, RelayFlows)

    @property
    def version(self) -> tuple[int, int, bool]:
        """Version of the view, epoch of its settlement, and whether the flows are final.

        Only tables of equal versions fit together. The flows of a mended iteration are final; the
        next iteration finds new ones.
        """
        return (
            self._core.context.view.version,
            pipeline_of(self._core).routing.epoch,
            self.flows.final,
        )

    @property
    def downstream(self) -> Mapping[FlowId, object]:
        """Each flow's way onwards; see `next_hop`."""
        flows = self.flows
        return flows.entries if isinstance(flows, RelayFlows) else flows.complete

    @property
    def upstream(self) -> Mapping[FlowId, NodeId]:
        """The node that each flow with an inflow comes from."""
        return self.flows.outflows.paired

    @property
    def unpaired(self) -> Collection[FlowId]:
        """Outflows that wait for an inflow."""
        return self.flows.outflows.unpaired

    @property
    def num_pending(self) -> int:
        """Number of open requests, each of which may still bring a flow."""
        return self.flows.num_pending

    @property
    def num_peers(self) -> int:
        """Number of nodes in the adjacent stages that this node deals with."""
        return len(self._core.context.neighbours.previous) + len(self._core.context.neighbours.next)

    @property
    def num_data_nodes(self) -> int:
        """Data nodes in its view. A relay carries a flow of each, whatever its capacity."""
        return len(self._core.context.view.data_nodes)

    @property
    def capacity(self) -> int:
        """Number of flows that the view lets it carry; 0 while it is paused."""
        flows = self.flows
        return flows.room if isinstance(flows, RelayFlows) else self._core.context.member.capacity

    def next_hop(self, flow_id: FlowId) -> NodeId:
        """Return the node that a flow goes on to."""
        if isinstance(self.flows, RelayFlows):
            return self.flows.entries[flow_id].downstream
        return self.flows.complete[flow_id].peer


def flow_table(machine: object) -> FlowTable | None:
    """Return a node's flows, or None if it has none yet or is a stand-in."""
    core = _core_of(machine)
    if core is None or not isinstance(core.strategy, Pipeline):
        return None
    flows = core.strategy.flows
    return FlowTable(core, flows) if flows is not None else None


def members_wanted(machine: object, *, data: bool) -> int:
    """Return how many members of a stage a leader waits for; 0 if it waits for none."""
    core = _core_of(machine)
    leader = core.leader if core is not None else None
    if leader is None or leader.state is not LeaderState.GATHERING:
        return 0
    if leader.committed.number > leader.start_iteration:
        return 1
    return leader.run.protocol.min_data_nodes if data else leader.run.protocol.min_nodes_per_stage


def lost_stage(machine: object) -> int | None:
    """Return a stage for which the leader finds no new member."""
    core = _core_of(machine)
    leader = core.leader if core is not None else None
    waits = leader is not None and leader.recovery.waiting
    return leader.recovery.pending[0] if leader is not None and waits else None


def stage_peers(machine: object) -> tuple[NodeId, ...]:
    """Return all members that serve a node's stage, as it knows. Empty before it is a member."""
    core = _core_of(machine)
    if core is None or not core.in_view:
        return ()
    return tuple(m.node_id for m in core.context.view.roster(core.context.member.stage_index))


Layout = Callable[[Collection[NodeId]], Sequence[Route]]
"""Returns all flows among the members of a view."""

_FLOW_MESSAGES = (FlowCost, RequestFlow, FlowAnswer, Withdraw, RoutingMessage)


class InstalledFlows:
    """A core whose flows are laid out from outside, not found by its messages.

    With every view the core starts to look for flows. This wrapper then fills the core's tables
    with the flows of the layout. Messages about flows neither leave nor reach the core. Each member
    gets its flows in the step in which it adopts the view, so a microbatch never meets a half-built
    flow. The core itself does everything else, including CAN TAKE.

    Args:
        machine: The core.
        layout: The layout that all nodes of a run share.
        cost: Returns the cost of a path. Only the order among a data node's flows matters.
    """

    def __init__(
        self, machine: NodeMachine, layout: Layout, cost: Callable[[Sequence[NodeId]], float]
    ) -> None:
        self.wrapped = machine
        self._layout = layout
        self._cost = cost
        self._filled: RelayFlows | DataFlows | None = None

    @property
    def deadline_s(self) -> float | None:
        return self.wrapped.deadline_s

    def start(self, now_s: float) -> list[Effect]:
        return self._quietly(self.wrapped.start(now_s))

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event, unless it is a message about flows."""
        if isinstance(event, Received) and isinstance(event.message, _FLOW_MESSAGES):
            return []
        effects = self.wrapped.step(now_s, event)
        flows = pipeline_of(self.wrapped).flows
        if flows is not None and flows is not self._filled:
            self._filled = flows
            self._fill(flows)
            effects += self._look_again(now_s)
        return self._quietly(effects)

    def _quietly(self, effects: list[Effect]) -> list[Effect]:
        return [
            effect
            for effect in effects
            if not (isinstance(effect, Send) and isinstance(effect.message, _FLOW_MESSAGES))
        ]

    def _fill(self, flows: RelayFlows | DataFlows) -> None:
        me = self.wrapped.identity.node_id
        flows.outflows.unpaired.clear()
        slots: Counter[NodeId] = Counter()
        working = [m.node_id for m in self.wrapped.context.view.members if m.capacity]
        for route in self._layout(working):
            path = route.path
            flow_id = FlowId(path[0], slots[path[0]])
            slots[path[0]] += 1
            if isinstance(flows, DataFlows) and path[0] == me:
                flows.complete[flow_id] = Granted(flow_id, path[1], self._cost(path), path[1:-1])
                flows.outflows.paired[flow_id] = path[-2]
            elif isinstance(flows, RelayFlows) and me in path:
                here = path.index(me)
                cost_s = self._cost(path[here:])
                flows.entries[flow_id] = RelayFlow(flow_id, path[here + 1], cost_s)
                flows.outflows.paired[flow_id] = path[here - 1]

    def _look_again(self, now_s: float) -> list[Effect]:
        """Make the core act on its flows, by an answer to a request that it never made."""
        machine = self.wrapped
        answer = FlowAnswer(
            view_version=machine.context.view.version,
            request_id=0,
            flow_id=None,
            cost_s=math.inf,
            num_unpaired=0,
        )
        return machine.step(now_s, Received(machine.identity.node_id, answer))


class Wait(Enum):
    """The condition that a leader says it waits for."""

    NOTHING = "nothing"
    QUORUM = "a quorum"
    STAGE = "members of a stage"


@dataclass(frozen=True, slots=True)
class LeadershipPart:
    """A node's part in leadership, as a checker sees it."""

    in_view: bool
    place: tuple[int, Iteration, int]
    """The term of the node's view, its iteration and its view's version."""
    members: tuple[NodeId, ...]
    electors: tuple[NodeId, ...]
    """Electors of the last committed view."""
    needed: frozenset[NodeId]
    """Members that the run cannot go on without: the data nodes and the last worker of each stage.
    A leader adds the members that its quorum depends on."""
    room: int
    """Microbatches that fit into the stage with the least room."""
    abstains: bool
    may_stand: bool
    wait: Wait


def leadership_part_of(machine: object) -> LeadershipPart | None:
    """Return a node's part in leadership, or None for a stand-in."""
    core = _core_of(machine)
    if core is None:
        return None
    context = core.context
    election = core.leadership.election
    leader = core.leader
    opened = election.decisions.opened
    electors = () if opened is None else electors_of(opened.opening)
    needed = context.view.last_workers | {m.node_id for m in context.view.data_nodes}
    wait = Wait.NOTHING
    if leader is not None:
        electors = leader.quorum.electors
        members = set(ids_of(context.view))
        needed |= {node for node in members if not leader.quorum.allows(members - {node})}
        if leader.quorum.lacking:
            wait = Wait.QUORUM
        elif leader.state is LeaderState.GATHERING:
            wait = Wait.STAGE
    member = context.view.by_id.get(context.node_id)
    return LeadershipPart(
        in_view=core.in_view,
        place=(context.view.term, context.iteration, context.view.version),
        members=ids_of(context.view),
        electors=electors,
        needed=needed,
        room=min(
            sum(m.capacity for m in (*workers, *clients))
            for workers, clients in zip(
                context.view.workers[1:], context.view.clients[1:], strict=True
            )
        ),
        abstains=election.abstains,
        may_stand=member is not None and member.role is Role.DATA and not election.abstains,
        wait=wait,
    )
