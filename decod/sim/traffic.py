"""I8: what a node sends in an iteration, and what its core computes, is bounded by its peers.

The bounds follow from what a node has to say to its neighbours; the size of the run is in none of
them. Two things go beside them, since they are due per event and not per iteration: admission,
doubts and elections; and whole views, for those who enter or have asked for one.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

from decod.ids import AveragingId, NodeId
from decod.protocol.core import messages as msg
from decod.protocol.core.messages import Message
from decod.protocol.core.messages import routing_messages as gwtf
from decod.protocol.core.messages import routing_messages as routing
from decod.protocol.core.messages.audit_messages import OfOpinion
from decod.protocol.core.messages.decision_messages import ElectionMessage
from decod.protocol.core.messages.membership_messages import Follow, Followed
from decod.protocol.core.messages.scopes import Passed
from decod.protocol.core.residual import MAX_STEPS
from decod.protocol.core.view import View
from decod.protocol.leadership.election import BEATS_PER_TIMEOUT, DEPUTIES_MAX
from decod.protocol.links.measuring import SURVEY_INTERVAL_S
from decod.run.protocol_config import ProtocolConfig
from decod.sim.core import flow_table, place_of, subtree_size, view_of
from decod.sim.profile import wire_bytes
from decod.sim.simulated_host import SimHost

_ADMISSION = frozenset(
    (
        msg.Join,
        msg.Assign,
        msg.Refuse,
        msg.Prepared,
        Follow,
        Followed,
        msg.Suspect,
        msg.Ping,
        msg.Pong,
        Passed,
        *get_args(ElectionMessage),
    )
)
"""Messages that are due per candidate, suspect, broken link, election or wait for a silent node,
not per iteration."""

_LONG = frozenset(
    (
        routing.RequestChange,
        routing.ResidualWalk,
        routing.Claim,
        routing.Claimed,
        routing.Claims,
        routing.Routes,
        *get_args(gwtf.GwtfMessage),
    )
)
"""Messages of the search for flows that name the nodes of paths, or what passes a node."""

_MESSAGE_BYTES = 300
"""Most that a message takes that is none of the following, on the average of an iteration."""
_SPARE_BYTES = 2000
"""In an iteration with few messages, one may be longer than they are on the average."""
_STEP_BYTES = 75
"""A node on a walk, and the cost up to it."""
_STAGE_BYTES = 68
"""A stage's number and a hash."""
_MEMBER_BYTES = 250
"""A member with its address; and its id once more, as one who is no elector."""
_LOAD_BYTES = 90
"""How busy a member is."""
_AWAITED_BYTES = 56
"""A member that another waits for."""
_KEPT_BYTES = 80
"""A state on a member's disk."""
_BYWAY_BYTES = 66
"""A data node in a report on a link, and the bandwidth of its own link."""

_WORDS = 2
"""Decisions in an answer to who has missed them: an opening, and a loss since."""

_EVENT_S = 2e-3
"""Most that a step of a core takes, on the average of an iteration."""
_ITERATION_S = 0.1


_TOLD_OF_MICROBATCH = 3
_TOLD_OF_PARTS = 8
"""Messages about an audit: two tensors of each microbatch and what came of it; and on parts of the
average, to each auditor, and the result. The word that begins or closes it goes down the tree."""


@dataclass(slots=True)
class _Totals:
    """What a node has done up to a commit."""

    control: int = 0
    control_bytes: int = 0
    microbatches: int = 0
    events: int = 0
    at_s: float = 0.0
    core_s: float = 0.0


@dataclass(slots=True)
class NodeCounts:
    """The counts of one node."""

    at_commit: _Totals = field(default_factory=_Totals)
    num_beside: int = 0
    """Messages that are due per event, since its last commit."""
    bytes_beside: int = 0
    audits: Counter[tuple[AveragingId, NodeId, int]] = field(default_factory=Counter)
    """Messages about each opinion of a relay's work, since its last commit."""
    num_kept: int = 0
    """States that hosts keep, in the answers that it has passed on since its last commit."""
    num_awaited: int = 0
    """Members that others wait for, in these answers."""
    num_byways: int = 0
    """Data nodes in its reports on links since its last commit."""
    num_long: int = 0
    """Messages of the search for flows since its last commit that name the nodes of paths."""
    num_words: int = 0
    """Openings and losses that it has passed on since its last commit."""
    view: View | None = None
    """At its last commit."""
    num_changed: int = 0
    """Members that came, went or changed between its last two commits."""
    life: int = 0
    """Of the node's host, at its last commit."""
    asked: Counter[NodeId] = field(default_factory=Counter)
    """Who has asked it for what it has missed, and for how many views that is good."""
    control_per_iteration: list[int] = field(default_factory=list)


class Traffic:
    """Counts what the nodes of a run send, and says what is too much.

    Args:
        config: The protocol's parameters.
        capacity_max: The largest capacity of any host.
        batch: Number of microbatches in an iteration.
    """

    def __init__(self, config: ProtocolConfig, *, capacity_max: int, batch: int) -> None:
        self._config = config
        self._capacity_max = capacity_max
        self._batch = batch
        self.nodes: dict[str, NodeCounts] = {}

    def sent(self, host: SimHost, to: NodeId, message: Message) -> None:
        """Take in a message that a node sends."""
        counts = self._counts(host)
        counts.num_long += type(message) in _LONG
        if isinstance(message, msg.UtilisationAnswer):
            counts.num_kept += sum(len(load.kept) for load in message.loads)
            counts.num_awaited += sum(len(load.awaited) for load in message.loads)
        elif isinstance(message, msg.LinkReport):
            counts.num_byways += len(message.byways)
        elif isinstance(message, (msg.Open, msg.Mend)):
            if self._due(host, counts, to, message):
                counts.bytes_beside += wire_bytes(message)
            counts.num_words += 1
        elif isinstance(message, (msg.Audit, OfOpinion)):
            counts.num_beside += 1
            counts.bytes_beside += wire_bytes(message)
            about = message.cases if isinstance(message, msg.Audit) else (message,)
            of = message.averaging
            counts.audits.update((of, each.relay, each.opinion) for each in about)
        elif type(message) in _ADMISSION:
            counts.num_beside += 1
            counts.bytes_beside += wire_bytes(message)
        elif isinstance(message, msg.CatchUp) and (asked := host.peer(to)) is not None:
            self._counts(asked).asked[host.node_id] += _WORDS

    def _due(
        self, host: SimHost, counts: NodeCounts, to: NodeId, message: msg.Open | msg.Mend
    ) -> bool:
        """Return whether a node needs the whole view that it is sent."""
        if message.change is not None:
            return False
        receiver = host.peer(to)
        there = receiver is not None and receiver.reachable
        known = view_of(receiver.machine) if receiver is not None and there else None
        enters = known is None or to not in known
        # A node that has just entered does not know what the others knew before.
        if enters or counts.life != host.life:
            return True
        counts.asked[to] -= 1
        return counts.asked[to] >= 0

    def committed(self, host: SimHost, now_s: float) -> str:
        """Take in that a node has committed an iteration. Return what is too much, or nothing."""
        counts = self._counts(host)
        view = view_of(host.machine) if host.reachable else counts.view
        before = counts.at_commit
        now = _totals_of(host, now_s)
        num_views = 1
        changed = counts.num_changed
        if view is not None and counts.view is not None:
            num_views = max(1, view.version - counts.view.version)
            counts.num_changed = _num_changed(counts.view, view)
        changed += counts.num_changed
        spent = _Totals(
            control=now.control - before.control - counts.num_beside,
            control_bytes=now.control_bytes - before.control_bytes - counts.bytes_beside,
            microbatches=now.microbatches - before.microbatches,
            events=now.events - before.events,
            at_s=now.at_s - before.at_s,
            core_s=now.core_s - before.core_s,
        )
        bound = self.bound(host, spent, num_views=num_views)
        bytes_bound = self.bytes_bound(host, spent, counts, changed)
        counts.control_per_iteration.append(spent.control)
        counts.at_commit = now
        counts.view = view
        counts.life = host.life
        counts.num_beside = counts.bytes_beside = counts.num_kept = counts.num_byways = 0
        counts.num_long = counts.num_words = counts.num_awaited = 0
        of_an_audit = max(counts.audits.values(), default=0)
        counts.audits.clear()
        told = self._batch * _TOLD_OF_MICROBATCH + _TOLD_OF_PARTS + 2 * self._config.tree_fanout
        if of_an_audit > told:
            return f"{of_an_audit} messages about an opinion of a relay's work sent"
        if spent.control > bound:
            return f"{spent.control} control messages sent, {bound} allowed"
        if spent.control_bytes > bytes_bound:
            return f"{spent.control_bytes} bytes of control sent, {bytes_bound} allowed"
        core_s = _ITERATION_S + _EVENT_S * spent.events
        if spent.core_s > core_s:
            return f"its core has computed for {spent.core_s:.3f} s, {core_s:.3f} s are allowed"
        return ""

    def _counts(self, host: SimHost) -> NodeCounts:
        return self.nodes.setdefault(host.name, NodeCounts())

    # --- bounds -------------------------------------------------------------------------------

    def bound(self, host: SimHost, spent: "_Totals", *, num_views: int = 1) -> int:
        """Return how many control messages a node may send in an iteration.

        - By the clock: heartbeats to watchers and deputies, and link reports to adjacent stages.
        - Announcements, reports and the leader's queries, to neighbours in the tree.
        - Offers, requests and answers to peers of the adjacent stages, per slot that changes hands
          on either side, and repeats by the clock.
        - News of two unchanged walks to each neighbour and data node, every other search round.
        - One or two acknowledgements per pass of a microbatch.
        - With each further view, new link reports, new walks and new paths of microbatches.
        """
        config = self._config
        duration_s = spent.at_s
        table = flow_table(host.machine) if host.reachable else None
        num_peers = 2 * config.max_peers_per_stage if table is None else table.num_peers
        beats = config.num_watchers * (duration_s / config.heartbeat_interval_s + 2)
        place = place_of(host.machine) if host.reachable else None
        if place is not None and place.leads:
            beat_s = config.election_timeout_s / BEATS_PER_TIMEOUT
            beats += DEPUTIES_MAX * (duration_s / beat_s + 2)
        repeats = duration_s / config.answer_timeout_s + 2
        tree = (2 * config.tree_fanout + 1) * (8 + self._queries(spent))
        flows = num_peers * (4 * self._capacity_max + repeats)
        reports = num_peers * (duration_s / SURVEY_INTERVAL_S + 2 * num_views)
        search = self._walks(num_peers, spent, num_views)
        search += 3 * self._batch * (num_views - 1)
        return int(beats + reports + search + tree + flows + 2 * spent.microbatches + repeats) + 16

    def bytes_bound(
        self, host: SimHost, spent: "_Totals", counts: NodeCounts, num_changed: int
    ) -> int:
        """Return how many bytes the messages may take that a node has sent in an iteration.

        - So many for each message.
        - Paths in messages of the search, there and back, with what the links of each node cost; a
          walk may be as long as a message allows.
        - In openings, a hash for each stage now and at two marks, and what changes in the view.
        - Answers to the leader's queries, with all below the node in the tree.
        - In reports on slow links, data nodes that could pass tensors on.
        """
        config = self._config
        view = view_of(host.machine) if host.reachable else counts.view
        num_stages = 1 if view is None else view.num_stages
        num_steps = max(MAX_STEPS, 2 * num_stages * config.max_peers_per_stage)
        paths = counts.num_long * num_steps * _STEP_BYTES
        opened = 3 * _STAGE_BYTES * num_stages + _MEMBER_BYTES * num_changed
        place = place_of(host.machine) if host.reachable else None
        answers = place is not None and not place.leads
        below = subtree_size(host.machine, config.tree_fanout) if answers else 0
        told = self._queries(spent) * below * _LOAD_BYTES + counts.num_kept * _KEPT_BYTES
        told += counts.num_awaited * _AWAITED_BYTES + counts.num_byways * _BYWAY_BYTES
        usual = _MESSAGE_BYTES * spent.control + _SPARE_BYTES
        return int(usual + paths + counts.num_words * opened + told)

    def _queries(self, spent: "_Totals") -> float:
        return spent.at_s / self._config.utilisation_interval_s + 2

    def _walks(self, num_peers: int, spent: "_Totals", num_views: int) -> float:
        walks = 2 * (num_peers + self._config.max_peers_per_stage)
        rounds = spent.at_s / self._config.negotiation_interval_s / 2
        return walks * (rounds + 2 * num_views)


def _totals_of(host: SimHost, now_s: float) -> _Totals:
    return _Totals(
        # What a node passes on is bounded where it comes from.
        control=host.num_control_sent - host.num_passed_on,
        control_bytes=host.control_bytes_sent - host.bytes_passed_on,
        microbatches=host.device.num_microbatch_jobs,
        events=host.num_events,
        at_s=now_s,
        core_s=host.core_s,
    )


def _num_changed(before: View, view: View) -> int:
    """Return how many members differ between two views, those of one of them included."""
    if before is view:
        return 0
    return len({*before.members} ^ {*view.members})
