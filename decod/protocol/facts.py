"""What a node's core knows, for those outside who show it or act on it. Nothing here changes it."""

from collections.abc import Collection, Mapping, Sequence

from decod.ids import NodeId
from decod.protocol.core.context import NodeState
from decod.protocol.core.era import Hashes, Mark, Origin
from decod.protocol.core.link_table import LinkTable, RemoteLinks
from decod.protocol.core.messages import NodeLoad
from decod.protocol.core.view import Member, View
from decod.protocol.flows.routing import KnownFlow
from decod.protocol.leadership.admission import Candidate
from decod.protocol.leadership.leader import UNDER_WAY, Leader, LeaderState
from decod.protocol.leadership.leadership import Handover
from decod.protocol.leadership.relay_audits import RelayAudits
from decod.protocol.leadership.stage_recovery import Rebuilt
from decod.protocol.leadership.sync_schedule import SyncSchedule
from decod.protocol.node_machine import NodeMachine
from decod.protocol.strategy.data_share import Positions
from decod.run.protocol_config import ProtocolConfig


class LeaderFacts:
    """What a leader's core knows of the run."""

    def __init__(self, leader: Leader, handover: Handover) -> None:
        self._leader = leader
        self._handover = handover

    @property
    def state(self) -> LeaderState:
        return self._leader.state

    @property
    def view(self) -> View:
        return self._leader.view

    @property
    def started(self) -> bool:
        """Whether the run has begun: until then, every stage needs as many members as it says."""
        return self._leader.started

    @property
    def lacking(self) -> tuple[NodeId, ...]:
        """Members that are gone, and without whom there is no quorum."""
        return self._leader.quorum.lacking

    def can_do_without(self, nodes: Collection[NodeId]) -> bool:
        """Return whether the other members are a quorum."""
        rest = [node for node in self._leader.view.by_id if node not in nodes]
        return self._leader.quorum.allows(rest)

    @property
    def loads(self) -> Mapping[NodeId, NodeLoad]:
        """How busy members have last said that they are."""
        return self._leader.seats.loads

    @property
    def candidates(self) -> Mapping[NodeId, Candidate]:
        return self._leader.admission.candidates

    @property
    def anchor(self) -> int:
        """The last committed iteration with an average: all of a stage share its state."""
        return self._leader.sync.anchor.number

    @property
    def committed(self) -> int:
        """The last committed iteration."""
        return self._leader.committed.number

    @property
    def loss(self) -> float | None:
        """Loss of that iteration; None if this leader has not committed it."""
        return self._leader.loss

    @property
    def hashes(self) -> Hashes:
        """What the members of each stage voted on at the last commit; none if it is not known."""
        last = self._leader.decisions.opened
        return last.hashes if last is not None else ()

    @property
    def num_lost(self) -> Mapping[int, int]:
        """By stage: microbatches whose part in the training was lost with members."""
        return self._leader.sync.learning.num_lost

    @property
    def sync(self) -> SyncSchedule:
        """When averages are due, and how they travel."""
        return self._leader.sync

    @property
    def audits(self) -> RelayAudits:
        """What has come of audits since this node leads."""
        return self._leader.audits

    @property
    def marks(self) -> Sequence[Mark]:
        return self._leader.recovery.marks

    @property
    def origin(self) -> Origin | None:
        """The beginning of the era, until its first commit."""
        return self._leader.recovery.origin

    @property
    def rebuilding(self) -> str:
        """How the rebuilding of a lost stage stands, for people; empty if none is lost."""
        recovery = self._leader.recovery
        return recovery.describe() if recovery.needed else ""

    @property
    def recut(self) -> bool:
        """Whether the model is about to be cut anew."""
        return bool(self._leader.recovery.recut.wanted)

    @property
    def recut_marked(self) -> bool:
        """Whether it is settled from which iteration: another cut can't take its place."""
        return self._leader.recovery.recut.marked is not None

    @property
    def waits_for_stage(self) -> bool:
        """Whether a stage is lost that nobody can take over."""
        return self._leader.recovery.waiting

    @property
    def rebuilt(self) -> Rebuilt | None:
        """How the last lost stage was rebuilt."""
        return self._leader.recovery.last

    @property
    def learns_apart(self) -> bool:
        """Whether members have learnt something that is lost if the run ends now."""
        leader = self._leader
        under_way = leader.state in UNDER_WAY and not self.lacking
        travels = leader.sync.travelling is not None
        apart = self.committed > self.anchor or leader.sync.learning.apart
        return under_way and (travels or apart)

    @property
    def ending_stages(self) -> Sequence[int]:
        """Relay stages whose members have all asked to leave."""
        seats = self._leader.seats
        rosters = enumerate(self.view.rosters)
        return [
            stage
            for stage, roster in rosters
            if stage and roster and all(seats.leaves(member.node_id) for member in roster)
        ]

    @property
    def can_hand_over(self) -> bool:
        """Whether another data node could lead the run."""
        return self._handover.possible(self._leader)


class NodeFacts:
    """What a node's core knows.

    Args:
        machine: The core.
    """

    def __init__(self, machine: NodeMachine) -> None:
        self._machine = machine
        self._context = machine.context
        self._work = machine.strategy.facts
        self._election = machine.leadership.election

    @property
    def node_id(self) -> NodeId:
        return self._context.node_id

    @property
    def config(self) -> ProtocolConfig:
        return self._context.run.protocol

    @property
    def state(self) -> NodeState:
        return self._machine.state

    @property
    def view(self) -> View:
        return self._context.view

    @property
    def donors(self) -> tuple[Member, ...]:
        """Members of the stage that this node is to build, if it is a candidate."""
        return self._machine.donors

    @property
    def in_view(self) -> bool:
        """Whether this node is a member."""
        return self._machine.in_view

    @property
    def own_stage(self) -> int:
        """This member's stage."""
        return self._context.member.stage_index

    @property
    def load(self) -> NodeLoad:
        """How busy this node is."""
        return self._machine.own_load()

    @property
    def deadline_s(self) -> float | None:
        """When the core must be stepped, on its caller's clock."""
        return self._machine.deadline_s

    @property
    def electing(self) -> bool:
        """Whether the leader is gone or was voted out, and no other has been elected."""
        return self._election.electing

    @property
    def unanswered(self) -> Sequence[NodeId]:
        """Members from whom this node has no word in an election."""
        return self._election.campaign.unanswered

    @property
    def leader_heard_s(self) -> float:
        """When the leader was last heard."""
        return self._election.leader_watch.heard_s

    @property
    def flows(self) -> Sequence[KnownFlow]:
        """What this node knows of the flows in use."""
        return self._work.known_flows

    @property
    def links(self) -> LinkTable:
        """What this node knows of its own links."""
        return self._context.links

    @property
    def remote_links(self) -> RemoteLinks:
        """What this node has heard of the links between others."""
        return self._context.links.remote

    @property
    def positions(self) -> Positions:
        """How much of the data the run has seen."""
        return self._work.positions

    @property
    def num_passes(self) -> int:
        """Forward and backward passes that this node's device has computed."""
        return self._context.compute.num_passes

    @property
    def why_fetching(self) -> str:
        """Why this node fetches a state, for people."""
        return self._context.why

    @property
    def leading(self) -> LeaderFacts | None:
        """What this node knows as the leader; None if it does not lead."""
        leader = self._machine.leader
        handover = self._machine.leadership.handover
        return LeaderFacts(leader, handover) if leader is not None else None
