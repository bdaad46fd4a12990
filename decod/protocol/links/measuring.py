"""Keeps the costs of links true: reports what has changed, and probes what nobody has measured.

By the clock, every `SURVEY_INTERVAL_S`, so that its messages are bounded by neighbours and time
whatever happens (I8):

- Each neighbour, upstream and downstream, is told what this node has measured of its end of their
  link, if it has not been told in this view, or if that has changed by more than a tenth.
- A neighbour is told at once, and not by the clock, when transfers to it take twice or half as long
  as it believes: flows should leave a link that has broken down soon. Such reports are at least
  `URGENT_INTERVAL_S` apart, and come seldom: each needs three transfers that say the same.
- At most one link is probed at a time, and none for `PROBE_PAUSE_RATIO` times as long as the last
  probe took: one whose bandwidth no transfer has shown, or none lately, and which could matter. It
  could not if even an endless bandwidth left it more expensive than every neighbour of that stage
  that was measured, or if the bytes of an activation hardly count in its cost. Links in use are
  never probed: what they carry measures them. One that has lost all flows because it was slow is
  looked at again after a few seconds, so nothing is banned for having been slow.

    idle --tick, a link worth it--> probing --LinkMeasured with a bandwidth, or with nothing--> idle
                                    probing --_PROBE_TIMEOUT_S--> idle

A report that was not delivered is repeated with the next tick, with the values of that time, and
not by the outbox: an old report must not overtake a newer one.

Deviation: GWTF takes all costs as known.
"""

from decod.ids import NodeId
from decod.planner.cost import Link
from decod.protocol.core.context import Context
from decod.protocol.core.durations import STALE_S
from decod.protocol.core.effects import ProbeLink
from decod.protocol.core.events import LinkMeasured, SendFailed, TensorSent
from decod.protocol.core.link_table import TRANSFER_SIZE_MIN_BYTES, Terms
from decod.protocol.core.messages import FlowCost, LinkReport, Message
from decod.protocol.core.view import passed_peers

SURVEY_INTERVAL_S = 2.0
"""Least time between two reports to one neighbour, and between two probes."""

URGENT_INTERVAL_S = 0.5
"""Least time between two reports to one neighbour of which the later is urgent."""

PROBE_PAUSE_RATIO = 19
"""Probes take at most a twentieth of the time that a node's link has, however slow it is."""

PROBE_SIZE_MAX_BYTES = 1 << 20
"""Most bytes of a probe. Larger activations are taken to travel as fast."""

_SETTLE_S = 0.5
"""From a new view to the first reports: the messages that build flows measure latencies first."""

_PROBE_TIMEOUT_S = 60.0
"""A probe of which nothing was heard for so long is given up."""

_TRANSFER_SHARE_MIN = 0.01
"""Share of a link's cost below which the time of its bytes is not worth a probe."""


class LinkMeasuring:
    """One member's reports and probes.

    Inputs: new views and iterations, what neighbours say, measurements, failed sends, deadlines.
    Effects: `Send(LinkReport)`, `ProbeLink`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._out = context.out
        self.deadline_s: float | None = None
        """When it is time to report and to probe."""
        self._owed: set[NodeId] = set()
        """Neighbours that must be told, whether or not anything has changed."""
        self._probing: tuple[NodeId, float] | None = None
        """The link that is being probed, and since when."""
        self._probe_s = 0.0
        """Before this no further link is probed."""
        self._tried_s: dict[NodeId, float] = {}
        """When each link was last probed, with whatever result."""
        self._told_s: dict[NodeId, float] = {}
        """When each neighbour was last told something."""

    def opened(self, now_s: float, *, renewed: bool) -> None:
        """An iteration begins; `renewed` if the context's view is a new one."""
        if renewed:
            self._adopt(now_s)

    def _adopt(self, now_s: float) -> None:
        context = self._context
        self._owed = set(self._context.neighbours.nodes)
        self.deadline_s = now_s + _SETTLE_S
        members = frozenset(context.view.by_id)
        context.links.forget_others(members, passed_peers(context.view, context.node_id))
        context.links.remote.forget_others(members)
        context.detours.forget_others(members)
        self._tried_s = {node: at_s for node, at_s in self._tried_s.items() if node in members}
        self._told_s.clear()

    def heard(self, sender: NodeId, message: Message) -> None:
        """Take in what a member of the view says of its end of a link, with an offer or alone."""
        if sender not in self._context.view:
            return
        match message:
            case LinkReport(_, latency_s, bandwidth, compute_s, byways):
                terms = Terms(Link(latency_s, bandwidth), compute_s)
                self._context.links.reported(sender, terms)
                self._context.detours.reported(sender, byways)
            case FlowCost():
                self._context.links.offered(sender, message.compute_s)

    def sent(self, now_s: float, event: TensorSent) -> None:
        """Take in how long a tensor took; say so at once if that changes much."""
        links = self._context.links
        node = event.to
        self._context.detours.sent(event)
        links.transferred(
            now_s,
            node,
            size_bytes=event.size_bytes,
            duration_s=event.duration_s,
            share=event.share,
        )
        if node not in self._context.neighbours.nodes:
            return
        if now_s - self._told_s.get(node, now_s) >= URGENT_INTERVAL_S and links.moved_far(node):
            self._tell(now_s, node)

    def measured(self, now_s: float, event: LinkMeasured) -> None:
        """Take in a timed exchange, or the end of a probe."""
        peer = event.peer
        latency_s = event.latency_s
        bandwidth = event.bandwidth_bytes_per_s
        self._context.links.measured(
            peer, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, now_s=now_s
        )
        ended = bandwidth is not None or latency_s is None
        if ended and self._probing is not None and self._probing[0] == peer:
            self._end_probe(now_s)

    def _end_probe(self, now_s: float) -> None:
        assert self._probing is not None
        self._probe_s = now_s + min(PROBE_PAUSE_RATIO * (now_s - self._probing[1]), STALE_S)
        self._probing = None

    def undelivered(self, event: SendFailed) -> None:
        """If a report did not arrive, another is owed."""
        if isinstance(event.message, LinkReport) and event.to in self._context.neighbours.nodes:
            self._owed.add(event.to)

    def overdue(self, now_s: float) -> None:
        """Report and probe, if it is time."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return
        # Counted from now: after a long stall one round of reports is owed, not a burst.
        self.deadline_s = now_s + SURVEY_INTERVAL_S
        self._report(now_s)
        self._probe(now_s)

    def _report(self, now_s: float) -> None:
        context = self._context
        due = [
            node
            for node in context.neighbours.nodes
            if node in self._owed
            or context.links.moved(node)
            or context.detours.news(node, context.neighbours.byways)
        ]
        self._owed.clear()
        for node in due:
            self._tell(now_s, node)

    def _tell(self, now_s: float, node: NodeId) -> None:
        self._told_s[node] = now_s
        told = self._context.links.tell(node)
        report = LinkReport(
            view_version=self._context.view.version,
            latency_s=told.link.latency_s,
            bandwidth_bytes_per_s=told.link.bandwidth_bytes_per_s,
            compute_s=told.compute_s,
            byways=self._context.detours.tell(node, self._context.neighbours.byways),
        )
        self._out.send(node, report)

    def _probe(self, now_s: float) -> None:
        if self._probing is not None and now_s >= self._probing[1] + _PROBE_TIMEOUT_S:
            self._end_probe(now_s)
        if self._probing is not None or now_s < self._probe_s:
            return
        links = self._context.links
        worth = {
            node
            for side in (self._context.neighbours.previous, self._context.neighbours.next)
            for node in self._worth_probing(now_s, side)
        } or self._byways_worth_probing(now_s)
        if not worth:
            return
        # Those nobody knows before those that are known from long ago, then the most promising.
        node = min(worth, key=lambda n: (links.bandwidth_measured(n), links.floor_s(n), n))
        self._tried_s[node] = now_s
        self._probing = (node, now_s)
        size_bytes = max(links.activation_size_bytes, TRANSFER_SIZE_MIN_BYTES)
        if links.stale_after_s(node) < STALE_S:
            # Most likely it still is slow: a large probe would keep others from being made.
            size_bytes = TRANSFER_SIZE_MIN_BYTES
        self._out.put(ProbeLink(node, min(size_bytes, PROBE_SIZE_MAX_BYTES)))

    def _byways_worth_probing(self, now_s: float) -> set[NodeId]:
        """Return data nodes by way of which something might come that has only a slow link."""
        context = self._context
        if not any(map(context.detours.is_slow, context.neighbours.nodes)):
            return set()
        return {
            node
            for node in context.neighbours.byways
            if context.links.bandwidth_stale(now_s, node)
            and now_s - self._tried_s.get(node, -STALE_S) >= STALE_S
        }

    def _worth_probing(self, now_s: float, side: tuple[NodeId, ...]) -> list[NodeId]:
        links = self._context.links
        stale = [node for node in side if links.bandwidth_stale(now_s, node)]
        fresh_costs_s = [links.cost_s(node) for node in side if node not in stale]
        limit_s = max(fresh_costs_s, default=None)
        return [
            node
            for node in stale
            if node != self._context.node_id
            and now_s - self._tried_s.get(node, -STALE_S) >= links.stale_after_s(node)
            and (limit_s is None or links.floor_s(node) < limit_s)
            and links.transfer_s(node) > _TRANSFER_SHARE_MIN * links.floor_s(node)
        ]
