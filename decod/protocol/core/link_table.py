"""What this node knows of its links, and of its own speed and its peers': costs by equation (1).

Every value is measured by the node that it belongs to, and told to the neighbours in LinkReports:

- *latency* is half of a timed round trip. What equation (1) averages, (lambda_ij + lambda_ji) / 2,
  is exactly that, whichever end measures, so one way needs no synchronized clocks. The least of the
  last five counts: queues and busy receivers only ever add to a round trip.
- *bandwidth* is what transfers of `TRANSFER_SIZE_MIN_BYTES` or more show once the latency is taken
  off. The median of the last five counts. Transfers to one peer that overlap share the link; their
  times are corrected for that. Transfers to other peers, or from them, through the same uplink are
  not: they lower the estimate, as they delay a microbatch.
- *compute time* is half of what the passes of one microbatch take, each kind of pass by the median
  of its last five.

A link that was not measured is taken for the median of those that were; if none was, for one of
the internet. Each end estimates the direction that it sends in, so the peer learns that as well.

Both ends of a link come to the same cost: a node reckons with the values of its own that it has
*told* the peer, though it may know newer ones, which differ by less than what is worth a report.

Source: GWTF, section IV, equation (1). How the values come about is left open there.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from statistics import median

from decod.ids import NodeId
from decod.planner.cost import (
    BANDWIDTH_MIN_BYTES_PER_S,
    LATENCY_MAX_S,
    Link,
    link_cost_s,
    sane_compute_s,
    sane_link,
    transfer_rate,
)
from decod.protocol.core import jobs
from decod.protocol.core.durations import STALE_S, Recent
from decod.protocol.core.messages.routing_messages import Hop

TRANSFER_SIZE_MIN_BYTES = 1 << 16
"""Less is over before the time of its bytes stands out from that of its latency."""

_UNMEASURED = Link(latency_s=0.05, bandwidth_bytes_per_s=12.5e6)
"""A link of the internet where nothing was ever timed: 50 ms and 100 Mbit/s."""

_BROKEN = Link(LATENCY_MAX_S, BANDWIDTH_MIN_BYTES_PER_S)
"""What a link is reckoned with that carries nothing."""

_MOVED_RATIO = 0.1
"""A term of equation (1) that is off by more than this share is told anew."""

_OTHERWISE_FACTOR = 2.0
"""A transfer that takes so many times as long as was told, or as short, is another link's."""

_SLOW_RATIO = 0.5
"""A link with less than this share of the usual bandwidth may be disturbed rather than slow."""

_SLOW_STALE_S = 10.0
"""How long what is known of such a link counts, if nothing uses it."""

_NEGLIGIBLE_RATIO = 0.01
"""Changes by less than this share of the whole cost are not worth a message."""

_TRANSFER_SHARE_MIN = 0.1
"""Share of the whole cost below which a transfer's time is nobody's reason to hurry."""

_PASSES = (
    (jobs.Forward, jobs.Backward),
    (jobs.Embed, jobs.Head, jobs.EmbedBackward),
)
"""What one microbatch costs a relay, and a data node, whose head goes both ways in one job."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One end's share of equation (1): its direction of the link, and its compute time."""

    link: Link
    compute_s: float


@dataclass(slots=True)
class _Peer:
    """What is known of the link to one peer."""

    latency_s: Recent = field(default_factory=Recent)
    bandwidth_bytes_per_s: Recent = field(default_factory=Recent)
    told: Terms | None = None
    """What this node has said of its end."""
    theirs: Terms | None = None
    """What the peer has said of its own."""
    compute_s: float | None = None
    """The peer's compute time as it came with an offer, for as long as `theirs` is missing."""
    link: Link | None = None
    """The link, if all of it was measured; None: something was measured since."""
    terms: Terms | None = None
    """This node's end as it knows it now, likewise."""


@dataclass(slots=True)
class RemoteLinks:
    """Costs of links by equation (1), as last heard, and how long nodes take for a pass.

    Claims that come home gather what the links on their ways cost, and how fast the relays there
    are (`flows.negotiation.settling`). That is kept beyond the view in which it was heard: whoever
    has to choose at once who takes a lost relay's place knows then which of them has good links.
    """

    _costs_s: dict[tuple[NodeId, NodeId], float] = field(default_factory=dict)
    _compute_s: dict[NodeId, float] = field(default_factory=dict)

    def heard(self, hops: Iterable[Hop]) -> None:
        """Take in what a claim has gathered."""
        for hop in hops:
            self._compute_s[hop.node_id] = hop.compute_s
            self._costs_s.update({(hop.node_id, peer): cost for peer, cost in hop.costs})
            self._costs_s.update({(peer, hop.node_id): cost for peer, cost in hop.inward})

    def forget_others(self, members: Container[NodeId]) -> None:
        """Forget all links but those between these nodes."""
        costs_s = self._costs_s.items()
        self._costs_s = {(a, b): cost for (a, b), cost in costs_s if a in members and b in members}
        self._compute_s = {k: v for k, v in self._compute_s.items() if k in members}

    def cost_s(self, begin: NodeId, end: NodeId) -> float | None:
        """Return d(i, j); None: nothing was heard of that link."""
        return self._costs_s.get((begin, end))

    def compute_s(self, node_id: NodeId) -> float | None:
        """Return a node's mean time for a pass; None: nothing was heard of it."""
        return self._compute_s.get(node_id)


class LinkTable:
    """Costs of this node's links by equation (1).

    Args:
        activation_size_bytes: Of what travels; its gradient has the same size.
        compute_s: c_i as measured before the first microbatch.
    """

    def __init__(self, *, activation_size_bytes: int, compute_s: float) -> None:
        self.activation_size_bytes = activation_size_bytes
        self._initial_compute_s = compute_s
        self._passes: dict[type, Recent] = {}
        self._peers: dict[NodeId, _Peer] = {}
        self._typical: Link | None = None
        self._compute_s: float | None = sane_compute_s(compute_s)
        """None: a pass was measured since."""
        self.broken: set[NodeId] = set()
        """Peers to whom this node's link carries nothing (`decod.protocol.links.forwarding`)."""
        self.remote = RemoteLinks()
        """What it has heard of the links between others."""
        self._passed: frozenset[NodeId] = frozenset()

    # --- what is measured here ----------------------------------------------------------------

    def measured(
        self,
        peer: NodeId,
        *,
        latency_s: float | None,
        bandwidth_bytes_per_s: float | None,
        now_s: float = 0.0,
    ) -> None:
        """Take in what a timed exchange with `peer` said; None leaves a part as it is."""
        known = self._known(peer)
        if latency_s is not None:
            known.latency_s.add(now_s, latency_s)
        if bandwidth_bytes_per_s is not None:
            # Told by a probe, so nothing has used the link for a while.
            known.bandwidth_bytes_per_s.add(now_s, bandwidth_bytes_per_s, stale_s=_SLOW_STALE_S)
        self._changed(known)

    def transferred(
        self,
        now_s: float,
        peer: NodeId,
        *,
        size_bytes: int,
        duration_s: float,
        share: float = 1.0,
    ) -> None:
        """Take in how long a tensor took to `peer`, acknowledgement included; ignore small ones."""
        if size_bytes < TRANSFER_SIZE_MIN_BYTES or duration_s <= 0:
            return
        known = self._known(peer)
        # Without a measured latency nothing is taken off: a guess might be more than the whole.
        latency_s = known.latency_s.least if known.latency_s else 0.0
        rate = transfer_rate(size_bytes, duration_s=duration_s, latency_s=latency_s, share=share)
        known.bandwidth_bytes_per_s.add(now_s, rate)
        self._changed(known)

    def computed(self, job: jobs.Job, duration_s: float) -> None:
        """Take in how long this node's device took for one pass of a microbatch."""
        # Of one age: a device that was idle for long is still the same device.
        if (passes := self._passes.get(type(job))) is None:
            passes = self._passes[type(job)] = Recent()
        passes.add(0.0, duration_s)
        self._compute_s = None

    def measured_anew(self, measured: jobs.Measured) -> None:
        """Take in how long passes take now, on a device that has had none for a while."""
        durations_s = {jobs.Forward: measured.forward_s, jobs.Backward: measured.backward_s}
        for kind, duration_s in durations_s.items():
            self._passes[kind] = passes = Recent()
            passes.add(0.0, duration_s)
        self._compute_s = None

    def rebuilt(self) -> None:
        """This node's stage has other blocks now: how long passes took says nothing any more."""
        self._passes.clear()
        self._compute_s = None

    # --- what peers say -----------------------------------------------------------------------

    def reported(self, peer: NodeId, terms: Terms) -> None:
        """Take in what a peer has measured at its end, brought into sane bounds."""
        sane = Terms(sane_link(terms.link), sane_compute_s(terms.compute_s))
        self._known(peer).theirs = sane

    def offered(self, peer: NodeId, compute_s: float) -> None:
        """Take in a compute time that came with an offer; a report counts more."""
        self._known(peer).compute_s = sane_compute_s(compute_s)

    def forget_others(
        self, members: frozenset[NodeId], passed: frozenset[NodeId] = frozenset()
    ) -> None:
        """Forget all nodes but these.

        Args:
            members: Those that stay.
            passed: Those of them with whom traffic passes through another host.
        """
        self._peers = {peer: known for peer, known in self._peers.items() if peer in members}
        self._typical = None
        for peer in (self._passed ^ passed) & self._peers.keys():
            self._changed(self._peers[peer])
        self._passed = passed

    # --- what follows -------------------------------------------------------------------------

    @property
    def compute_s(self) -> float:
        """c_i: this node's mean time for a forward or backward pass of one microbatch.

        What was measured at the start, until a microbatch has been through whole.
        """
        if self._compute_s is None:
            self._compute_s = sane_compute_s(self._measured_compute_s())
        return self._compute_s

    def _measured_compute_s(self) -> float:
        for kinds in _PASSES:
            if all(kind in self._passes for kind in kinds):
                return sum(self._passes[kind].median for kind in kinds) / 2
        return self._initial_compute_s

    def link(self, peer: NodeId) -> Link:
        """Return the link to a peer: each part measured, or else estimated."""
        if peer in self.broken:
            return _BROKEN
        if peer not in self._passed:
            return self._direct_link(peer)
        link = self._direct_link(peer)
        known = self._peers.get(peer)
        # The host in between takes each byte twice, in and out, at the expense of its own traffic.
        # A measurement contains both links, but not that.
        trips = 1 if known is not None and known.latency_s else 2
        return sane_link(Link(link.latency_s * trips, link.bandwidth_bytes_per_s / 2))

    def _direct_link(self, peer: NodeId) -> Link:
        known = self._peers.get(peer)
        if known is None:
            return self.typical_link()
        if known.link is not None:
            return known.link
        latency = known.latency_s
        bandwidth = known.bandwidth_bytes_per_s
        if latency and bandwidth:
            known.link = sane_link(Link(latency.least, bandwidth.median))
            return known.link
        typical = self.typical_link()
        return sane_link(
            Link(
                latency.least if latency else typical.latency_s,
                bandwidth.median if bandwidth else typical.bandwidth_bytes_per_s,
            )
        )

    def typical_link(self) -> Link:
        """Return the median of the links that were measured from here, or a guess."""
        if self._typical is None:
            known = self._peers.values()
            latencies = [p.latency_s.least for p in known if p.latency_s]
            rates = [p.bandwidth_bytes_per_s.median for p in known if p.bandwidth_bytes_per_s]
            self._typical = sane_link(
                Link(
                    median(latencies) if latencies else _UNMEASURED.latency_s,
                    median(rates) if rates else _UNMEASURED.bandwidth_bytes_per_s,
                )
            )
        return self._typical

    def measured_link(self, peer: NodeId) -> Link | None:
        """Return the link to a peer if both its parts were measured."""
        known = self._peers.get(peer)
        if known is None or not (known.latency_s and known.bandwidth_bytes_per_s):
            return None
        return self.link(peer)

    def told_by(self, peer: NodeId) -> Terms | None:
        """Return a peer's end of the link, as it has last said."""
        known = self._peers.get(peer)
        return known.theirs if known is not None else None

    def cost_s(self, peer: NodeId, *, peer_compute_s: float | None = None) -> float:
        """Return d(i, j) to a peer: finite, at least 0, and the same at both ends.

        Until the peer has reported, its end is taken to be like this one.

        Args:
            peer: Node j.
            peer_compute_s: c_j for as long as the peer has not reported it.
        """
        known = self._peers.get(peer)
        told = known.told if known is not None and peer not in self.broken else None
        here = told or self.terms(peer)
        there = known.theirs if known is not None else None
        if there is None:
            guessed_s = peer_compute_s
            if guessed_s is None and known is not None:
                guessed_s = known.compute_s
            there = Terms(here.link, here.compute_s if guessed_s is None else guessed_s)
        return self._cost_s(here, there, size_bytes=self.activation_size_bytes)

    def floor_s(self, peer: NodeId) -> float:
        """Return what the cost to a peer would be at least, if its bandwidth had no end."""
        here = self.terms(peer)
        known = self._peers.get(peer)
        there = (known.theirs if known is not None else None) or here
        return self._cost_s(here, there, size_bytes=0)

    def transfer_s(self, peer: NodeId) -> float:
        """Return how long an activation is believed to take to a peer, without the latency."""
        return self.activation_size_bytes / self.link(peer).bandwidth_bytes_per_s

    def bandwidth_measured(self, peer: NodeId) -> bool:
        """Whether a transfer to this peer was ever timed."""
        known = self._peers.get(peer)
        return known is not None and bool(known.bandwidth_bytes_per_s)

    def bandwidth_stale(self, now_s: float, peer: NodeId) -> bool:
        """Whether no transfer to this peer was timed lately; a slow link's is soon long ago."""
        known = self._peers.get(peer)
        after_s = self.stale_after_s(peer)
        return known is None or known.bandwidth_bytes_per_s.stale(now_s, after_s=after_s)

    def stale_after_s(self, peer: NodeId) -> float:
        """How long what is known of a link counts: less if it was much slower than others."""
        known = self._peers.get(peer)
        if known is None or not known.bandwidth_bytes_per_s:
            return STALE_S
        usual = self.typical_link().bandwidth_bytes_per_s
        slow = known.bandwidth_bytes_per_s.median < _SLOW_RATIO * usual
        return _SLOW_STALE_S if slow else STALE_S

    # --- reports ------------------------------------------------------------------------------

    def terms(self, peer: NodeId) -> Terms:
        """Return this node's end of the link to a peer, as it knows it now."""
        known = self._peers.get(peer)
        compute_s = self.compute_s
        if known is None or peer in self.broken:
            return Terms(self.link(peer), compute_s)
        if known.terms is None or known.terms.compute_s != compute_s:
            terms = Terms(self.link(peer), compute_s)
            if known.link is None:
                return terms  # In part that of other links, which change too.
            known.terms = terms
        return known.terms

    def moved(self, peer: NodeId) -> bool:
        """Whether the peer would reckon with a value that is off by more than a tenth."""
        known = self._peers.get(peer)
        if known is None or known.told is None:
            return True
        old = self._shares_s(known.told)
        new = self._shares_s(self.terms(peer))
        negligible_s = _NEGLIGIBLE_RATIO * min(sum(old), sum(new))
        return any(
            abs(now - then) > max(_MOVED_RATIO * then, negligible_s)
            for then, now in zip(old, new, strict=True)
        )

    def moved_far(self, peer: NodeId) -> bool:
        """Whether transfers to the peer take at least twice or at most half as long as was told."""
        known = self._peers.get(peer)
        if known is None or known.told is None:
            return False
        old = self._shares_s(known.told)
        new = self._shares_s(self.terms(peer))
        short_s, long_s = sorted((old[-1], new[-1]))
        otherwise = long_s >= _OTHERWISE_FACTOR * short_s
        return otherwise and long_s > _TRANSFER_SHARE_MIN * min(sum(old), sum(new))

    def tell(self, peer: NodeId) -> Terms:
        """Return what to report to a peer, and reckon with that from now on."""
        told = self.terms(peer)
        self._known(peer).told = told
        return told

    # --- inside -------------------------------------------------------------------------------

    def _known(self, peer: NodeId) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer()
        return known

    def _changed(self, known: _Peer) -> None:
        """Something was measured on the link to a peer."""
        known.link = known.terms = self._typical = None

    @staticmethod
    def _cost_s(here: Terms, there: Terms, *, size_bytes: int) -> float:
        return link_cost_s(
            compute_here_s=here.compute_s,
            compute_there_s=there.compute_s,
            forth=here.link,
            back=there.link,
            size_bytes=size_bytes,
        )

    def _shares_s(self, terms: Terms) -> tuple[float, float, float]:
        transfer_s = self.activation_size_bytes / terms.link.bandwidth_bytes_per_s
        return terms.compute_s, terms.link.latency_s, transfer_s
