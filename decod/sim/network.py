"""Simulated links and their measurement: latency, bandwidth and order; on request also faults.

The network keeps the real transport's promises. Control messages of one ordered pair keep their
order. So do its tensors, which share the pair's bandwidth one after another. Control messages and
tensors do not wait for each other. Every send ends in exactly one way: it is delivered (once or,
under faults, twice), or it is reported as failed. Only a dead sender gets no report.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

from decod.ids import NodeId
from decod.planner.cost import transfer_rate
from decod.protocol.core.effects import ProbeLink
from decod.protocol.core.events import Fault, LinkMeasured
from decod.sim.kernel import Kernel, seeded

_SETTLE_S = 1e-3


@dataclass(eq=False, slots=True)
class _Line:
    """One direction of a site's connection."""

    rate_bytes_per_s: float
    loads: "dict[_Load, None]" = field(default_factory=dict)

    @property
    def share_bytes_per_s(self) -> float:
        return self.rate_bytes_per_s / len(self.loads)


@dataclass(eq=False, slots=True)
class _Load:
    """A tensor on its way."""

    lines: tuple[_Line, ...]
    left_bytes: float
    rate_max_bytes_per_s: float
    since_s: float
    """When `left_bytes` was true."""
    sent: Callable[[], None]
    late: Callable[[], None]
    rate_bytes_per_s: float = 0.0
    num_plans: int = 0
    """Grows with every change of the rate, which voids the end that was planned before."""
    ended: bool = False


class SharedLines:
    """Carries tensors between sites in virtual time.

    A sender that dies occupies its line until its tensors would have been sent.

    A tensor between two sites goes out by the one connection and in by the other. It travels at the
    lower of its two shares. What a tensor does not use of a share is not given to others, so rates
    are never too high. Rates settle a moment after tensors begin and end, because many do so
    together.
    """

    def __init__(self, kernel: Kernel, sites: "Iterable[Site]") -> None:
        self._kernel = kernel
        self._lines: dict[str, tuple[_Line, _Line]] = {}
        """Up and down, by host."""
        for site in sites:
            lines = _Line(site.up_bytes_per_s), _Line(site.down_bytes_per_s)
            self._lines.update(dict.fromkeys(site.hosts, lines))
        self._changed: dict[_Line, None] = {}

    def between(self, sender: str, receiver: str) -> tuple[_Line, ...]:
        """Return the lines that a tensor takes. Empty: it uses no shared line."""
        here = self._lines.get(sender)
        there = self._lines.get(receiver)
        if here is there:
            return ()
        up = () if here is None else here[:1]
        down = () if there is None else there[1:]
        return (*up, *down)

    def carry(
        self,
        lines: tuple[_Line, ...],
        size_bytes: int,
        *,
        least_s: float,
        limit_s: float,
        sent: Callable[[], None],
        late: Callable[[], None],
    ) -> None:
        """Carry a tensor.

        Args:
            lines: That it takes.
            size_bytes: Its size.
            least_s: What it would take if it shared no line.
            limit_s: After which it is given up.
            sent: Called when its last byte has left.
            late: Called instead if it is given up.
        """
        load = _Load(lines, size_bytes, size_bytes / least_s, self._kernel.now_s, sent, late)
        for line in lines:
            line.loads[load] = None
        self._change(lines)
        self._kernel.after(limit_s, self._give_up, load)

    def _change(self, lines: tuple[_Line, ...]) -> None:
        if not self._changed:
            self._kernel.after(_SETTLE_S, self._settle)
        self._changed.update(dict.fromkeys(lines))

    def _settle(self) -> None:
        """Give every tensor on a line that has changed its new rate."""
        loads = dict.fromkeys(load for line in self._changed for load in line.loads)
        self._changed.clear()
        now_s = self._kernel.now_s
        for load in loads:
            shares = [line.share_bytes_per_s for line in load.lines]
            rate = min(load.rate_max_bytes_per_s, *shares)
            if rate != load.rate_bytes_per_s:
                load.left_bytes -= load.rate_bytes_per_s * (now_s - load.since_s)
                load.rate_bytes_per_s = rate
                load.since_s = now_s
                load.num_plans += 1
                left_s = max(load.left_bytes, 0.0) / rate
                self._kernel.after(left_s, self._through, load, load.num_plans)

    def _through(self, load: _Load, plan: int) -> None:
        if plan == load.num_plans and not load.ended:
            self._end(load)
            load.sent()

    def _give_up(self, load: _Load) -> None:
        if not load.ended:
            self._end(load)
            load.late()

    def _end(self, load: _Load) -> None:
        load.ended = True
        for line in load.lines:
            del line.loads[load]
        self._change(load.lines)


CONTROL_MESSAGE_SIZE_BYTES = 200
"""Size of a control message on a link. It is small against every tensor; only its order matters."""


_RATE_MIN_BYTES_PER_S = 64.0 * 1024
_RATE_GRACE_S = 5.0
_FRAME_BYTES = 1 << 20


def give_up_after_s(size_bytes: int) -> float:
    """Return the seconds after which the transport gives a tensor up."""
    counted_bytes = min(size_bytes, _FRAME_BYTES) + size_bytes
    return _RATE_GRACE_S + counted_bytes / _RATE_MIN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One direction between two hosts."""

    latency_s: float = 0.02
    """One-way latency."""
    bandwidth_bytes_per_s: float = 12_500_000.0
    """Bandwidth for all tensors of this ordered pair, which take turns."""


@dataclass(frozen=True, slots=True)
class Site:
    """Hosts in one place, which share one connection to all others."""

    hosts: tuple[str, ...]
    inside: LinkSpec
    """Of each pair of them."""
    up_bytes_per_s: float
    down_bytes_per_s: float


_LOOPBACK = LinkSpec(latency_s=0.0, bandwidth_bytes_per_s=1e12)
"""A host's link to itself. It takes no time, but a message is still an event of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """Faults that may strike every link. All ratios are per message; 0 switches a fault off."""

    loss_ratio: float = 0.0
    """Share of messages that get lost. The sender hears of it after `retry_timeout_s`."""
    duplicate_ratio: float = 0.0
    """Share of control messages that arrive twice."""
    delay_ratio: float = 0.0
    """Share of messages that are late by up to `delay_max_s`. Messages behind them wait."""
    delay_max_s: float = 1.0
    reorder_ratio: float = 0.0
    """Share of control messages that are late by up to `delay_max_s`, and overtaken meanwhile."""
    corrupt_ratio: float = 0.0
    """Share of tensors that arrive with a wrong checksum. The receiver refuses them."""
    until_s: float = math.inf
    """No faults from this instant on."""
    retry_timeout_s: float = 3.0
    """How long the transport tries before it gives a message up."""


@dataclass(frozen=True)
class Links:
    """Finds the link of two hosts.

    By the names of sender and receiver, else the one inside their site, else the default.
    """

    default: LinkSpec = field(default_factory=LinkSpec)
    overrides: Mapping[tuple[str, str], LinkSpec] = field(default_factory=dict)
    spread_ratio: float = 0.0
    """Largest deviation of each pair's latency and bandwidth from the default, as a share."""
    sites: tuple[Site, ...] = ()
    """Places of hosts. A pair's own link also limits its tensors."""

    @cached_property
    def _places(self) -> Mapping[str, Site]:
        return {host: site for site in self.sites for host in site.hosts}

    def between(self, sender: str, receiver: str, *, seed: int) -> LinkSpec:
        """Return the link of an ordered pair. It is the same for the same seed."""
        if sender == receiver:
            return _LOOPBACK
        spec = self.overrides.get((sender, receiver))
        if spec is not None:
            return spec
        site = self._places.get(sender)
        if site is not None and site is self._places.get(receiver):
            return site.inside
        if not self.spread_ratio:
            return self.default
        rng = seeded(seed, "link", sender, receiver)
        low = 1 - self.spread_ratio
        high = 1 + self.spread_ratio
        return LinkSpec(
            self.default.latency_s * rng.uniform(low, high),
            self.default.bandwidth_bytes_per_s * rng.uniform(low, high),
        )


class Endpoint(Protocol):
    """A host, as the network sees it."""

    name: str
    reachable: bool
    """False once the host has stopped or died."""
    refuses: bool
    """While unreachable: whether its machine still refuses connections."""
    frozen_until_s: float
    """The host takes nothing in before this instant, but its machine keeps what arrives."""


@dataclass(slots=True)
class _Pair:
    """State of one ordered pair."""

    spec: LinkSpec
    rng: random.Random
    control_free_s: float = 0.0
    bulk_free_s: float = 0.0
    waiting: "deque[InFlight]" = field(default_factory=deque)
    """Tensors that take turns on a shared line. The first is on its way."""


@dataclass(eq=False, slots=True)
class InFlight:
    """One message on its way, and the callbacks for its end."""

    sender: Endpoint
    receiver: Endpoint | None
    """None: no node has this id."""
    size_bytes: int
    """Size of its tensor; 0 for control messages."""
    delivered: Callable[[], None]
    """Called at the receiver."""
    sent: Callable[[float], None] | None
    """Called at the sender, with the seconds that the transfer took. None: not called."""
    failed: Callable[[str, Fault], None]
    """Called at the sender, with the reason."""
    late: Callable[[], None] | None = None
    """Called at the receiver of a tensor that comes too slowly."""
    shunned: Callable[[], bool] | None = None
    """Returns whether one end knows that the other is banned, so it is refused. None: none is."""


class Network:
    """Carries transfers between endpoints in virtual time."""

    def __init__(self, kernel: Kernel, links: Links, faults: LinkFaults, *, seed: int) -> None:
        self._kernel = kernel
        self._links = links
        self._faults = faults
        self._seed = seed
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._lines = SharedLines(kernel, links.sites)
        self._cut: dict[tuple[str, str], float] = {}
        self._hidden: frozenset[str] = frozenset()
        """Hosts that nobody can dial."""
        self._between: tuple[Endpoint, ...] = ()
        """Hosts by way of which two of them talk."""
        self._slowed: dict[tuple[str, str], tuple[float, float]] = {}
        """Rate of tensors in bytes per second, and until when."""
        ratios = [faults.loss_ratio, faults.duplicate_ratio, faults.delay_ratio]
        ratios += [faults.reorder_ratio, faults.corrupt_ratio]
        self._faults_until_s = faults.until_s if any(ratios) else -math.inf

    def cut(self, sender: str, receiver: str, *, until_s: float) -> None:
        """Let nothing through in this direction until an instant. Sends fail meanwhile."""
        self._cut[sender, receiver] = max(until_s, self._cut.get((sender, receiver), 0.0))

    def hide(self, hosts: Collection[str], between: Sequence[Endpoint]) -> None:
        """Let two of these hosts talk only by way of another, as if nobody could dial them.

        Args:
            hosts: The names of those that nobody can dial.
            between: Hosts that pass on connections. One that lives is enough.
        """
        self._hidden = frozenset(hosts)
        self._between = tuple(between)

    def slow(self, sender: str, receiver: str, *, rate: float, until_s: float) -> None:
        """Let tensors through in this direction at `rate` bytes a second until an instant."""
        self._slowed[sender, receiver] = (rate, until_s)

    def change(self, sender: Endpoint, receiver: Endpoint, spec: LinkSpec) -> None:
        """Change the link of an ordered pair. Messages on their way keep their times."""
        self._pair(sender, receiver).spec = spec

    def spec(self, sender: Endpoint, receiver: Endpoint) -> LinkSpec:
        """Return the link of an ordered pair."""
        return self._pair(sender, receiver).spec

    def send_control(self, transfer: InFlight) -> None:
        """Carry a control message: it takes the latency, plus the small time of its bytes."""
        if transfer.receiver is None:
            self._kernel.after(0.0, self._fail, transfer, "no such node")
            return
        pair = self._pair(transfer.sender, transfer.receiver)
        spec = pair.spec
        now_s = self._kernel.now_s
        calm = now_s >= self._faults_until_s
        arrival_s = now_s + spec.latency_s + (0.0 if calm else self._drawn_delay(pair))
        arrival_s += CONTROL_MESSAGE_SIZE_BYTES / spec.bandwidth_bytes_per_s
        arrival_s = max(arrival_s, pair.control_free_s)
        if calm:
            pair.control_free_s = arrival_s
            self._kernel.at(arrival_s, self._arrive, transfer, now_s)
            return
        if self._drawn(pair, self._faults.reorder_ratio):
            arrival_s += pair.rng.uniform(0.0, self._faults.delay_max_s)
        else:
            pair.control_free_s = arrival_s
        if self._drawn(pair, self._faults.loss_ratio):
            self._kernel.after(self._faults.retry_timeout_s, self._fail, transfer, "lost")
            return
        self._kernel.at(arrival_s, self._arrive, transfer, now_s)
        if self._drawn(pair, self._faults.duplicate_ratio):
            self._kernel.at(arrival_s, self._repeat, transfer)

    def send_tensor(self, transfer: InFlight) -> None:
        """Carry a tensor: it waits for earlier ones, then takes transfer time and latency."""
        if transfer.receiver is None:
            self._kernel.after(0.0, self._fail, transfer, "no such node")
            return
        pair = self._pair(transfer.sender, transfer.receiver)
        if self._lines.between(transfer.sender.name, transfer.receiver.name):
            assert transfer.size_bytes > 0, f"a tensor without bytes: {transfer}"
            pair.waiting.append(transfer)
            if len(pair.waiting) == 1:
                self._share_line(pair)
            return
        start_s = max(self._kernel.now_s, pair.bulk_free_s)
        wire_s = self._wire_s(transfer, pair, start_s) + self._drawn_delay(pair)
        limit_s = give_up_after_s(transfer.size_bytes)
        pair.bulk_free_s = start_s + min(wire_s, limit_s)
        if wire_s > limit_s:
            self._kernel.at(pair.bulk_free_s, self._give_up, transfer)
        else:
            self._land(transfer, pair, start_s)

    def _share_line(self, pair: _Pair) -> None:
        """Begin to send the pair's next tensor over a line that it shares with others."""
        transfer = pair.waiting[0]
        start_s = self._kernel.now_s
        assert transfer.receiver is not None
        self._lines.carry(
            self._lines.between(transfer.sender.name, transfer.receiver.name),
            transfer.size_bytes,
            least_s=self._wire_s(transfer, pair, start_s) + self._drawn_delay(pair),
            limit_s=give_up_after_s(transfer.size_bytes),
            sent=partial(self._leave_line, pair, partial(self._land, transfer, pair, start_s)),
            late=partial(self._leave_line, pair, partial(self._give_up, transfer)),
        )

    def _leave_line(self, pair: _Pair, end: Callable[[], None]) -> None:
        pair.waiting.popleft()
        pair.bulk_free_s = self._kernel.now_s
        end()
        if pair.waiting:
            self._share_line(pair)

    def _land(self, transfer: InFlight, pair: _Pair, start_s: float) -> None:
        """Let a tensor arrive whose last byte leaves when the pair is free again, or fail."""
        if self._drawn(pair, self._faults.loss_ratio):
            late_s = pair.bulk_free_s + self._faults.retry_timeout_s
            self._kernel.at(late_s, self._fail, transfer, "lost")
            return
        arrival_s = pair.bulk_free_s + pair.spec.latency_s
        if self._drawn(pair, self._faults.corrupt_ratio):
            self._kernel.at(arrival_s, self._refuse, transfer, "its checksum does not hold")
            return
        self._kernel.at(arrival_s, self._arrive, transfer, start_s)

    def _wire_s(self, transfer: InFlight, pair: _Pair, start_s: float) -> float:
        """Return how long a tensor's bytes take if they start at an instant."""
        size_bytes = transfer.size_bytes
        usual = pair.spec.bandwidth_bytes_per_s
        assert transfer.receiver is not None
        rate, until_s = self._slowed.get((transfer.sender.name, transfer.receiver.name), (0.0, 0.0))
        if start_s >= until_s or rate >= usual:
            return size_bytes / usual
        slow_s = min(until_s - start_s, size_bytes / rate)
        return slow_s + (size_bytes - slow_s * rate) / usual

    def _give_up(self, transfer: InFlight) -> None:
        """Tell both ends that a tensor comes too slowly."""
        receiver = transfer.receiver
        if transfer.late is not None and receiver is not None and receiver.reachable:
            transfer.late()
        self._refuse(transfer, "it takes too long", Fault.RATE)

    def _pair(self, sender: Endpoint, receiver: Endpoint) -> _Pair:
        key = (sender.name, receiver.name)
        pair = self._pairs.get(key)
        if pair is None:
            spec = self._links.between(*key, seed=self._seed)
            if self._hidden.issuperset(key):
                # There and back through the host in between, which has other traffic as well.
                rate = spec.bandwidth_bytes_per_s
                spec = LinkSpec(2 * spec.latency_s, rate if key[0] == key[1] else rate / 2)
            pair = _Pair(spec, seeded(self._seed, "faults", *key))
            self._pairs[key] = pair
        return pair

    def _drawn(self, pair: _Pair, ratio: float) -> bool:
        active = ratio > 0 and self._kernel.now_s < self._faults_until_s
        return active and pair.rng.random() < ratio

    def _drawn_delay(self, pair: _Pair) -> float:
        if self._drawn(pair, self._faults.delay_ratio):
            return pair.rng.uniform(0.0, self._faults.delay_max_s)
        return 0.0

    def _arrive(self, transfer: InFlight, start_s: float) -> None:
        receiver = transfer.receiver
        assert receiver is not None
        if transfer.size_bytes and not transfer.sender.reachable:
            return  # The sender died before the last byte: the receiver sees a broken stream.
        if self._is_cut(transfer.sender, receiver):
            self._kernel.after(self._faults.retry_timeout_s, self._fail, transfer, "cut")
        elif receiver.reachable and transfer.shunned is not None and transfer.shunned():
            latency_s = self.spec(receiver, transfer.sender).latency_s
            self._kernel.after(latency_s, self._refuse, transfer, "one of the two is banned")
        elif receiver.reachable:
            # The answer takes the way back, which may have another latency.
            timed = transfer.sent is not None
            latency_s = self.spec(receiver, transfer.sender).latency_s if timed else 0.0
            transfer.delivered()
            self._acknowledge(transfer, latency_s, start_s)
        elif receiver.refuses:
            latency_s = self.spec(receiver, transfer.sender).latency_s
            self._kernel.after(latency_s, self._fail, transfer, "connection refused")
        else:
            self._kernel.after(self._faults.retry_timeout_s, self._fail, transfer, "timeout")

    def joins(self, one: Endpoint, other: Endpoint) -> bool:
        """Return whether the link between two hosts works now, in both directions."""
        return not (self._is_cut(one, other) or self._is_cut(other, one))

    def _is_cut(self, sender: Endpoint, receiver: Endpoint) -> bool:
        if self._hidden and self._hidden.issuperset((sender.name, receiver.name)):
            return sender is not receiver and not any(
                self._passes_on(host, sender, receiver) for host in self._between
            )
        return bool(self._cut) and self._cuts(sender, receiver)

    def _passes_on(self, host: Endpoint, sender: Endpoint, receiver: Endpoint) -> bool:
        awake = host.reachable and host.frozen_until_s <= self._kernel.now_s
        return awake and not (self._cuts(sender, host) or self._cuts(host, receiver))

    def _cuts(self, sender: Endpoint, receiver: Endpoint) -> bool:
        return self._cut.get((sender.name, receiver.name), 0.0) > self._kernel.now_s

    def _acknowledge(self, transfer: InFlight, latency_s: float, start_s: float) -> None:
        assert transfer.receiver is not None
        asleep_s = transfer.receiver.frozen_until_s - self._kernel.now_s
        silent = self._is_cut(transfer.receiver, transfer.sender)
        if silent or asleep_s > self._faults.retry_timeout_s:
            # The worst case of a stalled host, or of a link that carries nothing back: the message
            # counts as failed and yet arrives.
            self._kernel.after(self._faults.retry_timeout_s, self._fail, transfer, "timeout")
        elif transfer.sent is not None:
            self._kernel.after(max(asleep_s, 0.0) + latency_s, self._sent, transfer, start_s)

    def _repeat(self, transfer: InFlight) -> None:
        receiver = transfer.receiver
        if receiver is None or not receiver.reachable or self._is_cut(transfer.sender, receiver):
            return
        if transfer.shunned is not None and transfer.shunned():
            return
        transfer.delivered()

    def _sent(self, transfer: InFlight, start_s: float) -> None:
        if transfer.sent is not None and transfer.sender.reachable:
            transfer.sent(self._kernel.now_s - start_s)

    def _refuse(self, transfer: InFlight, reason: str, fault: Fault = Fault.NONE) -> None:
        if transfer.sender.reachable:
            transfer.failed(reason, fault)

    def _fail(self, transfer: InFlight, reason: str) -> None:
        if transfer.sender.reachable:
            transfer.failed(reason, Fault.LINK)


_TIMED_INTERVAL_S = 5.0
"""Of the control messages to one peer, one in this time is timed. A daemon times every small one;
here that would nearly double the events."""


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Decides which control messages of a host are timed."""

    kernel: Kernel
    measured: Callable[[LinkMeasured], None]
    _timed_s: dict[NodeId, float] = field(default_factory=dict)

    def timed(self, to: NodeId) -> Callable[[float], None] | None:
        """Return the callback for a message's duration, or None if the message is not timed."""
        now_s = self.kernel.now_s
        if now_s - self._timed_s.get(to, -_TIMED_INTERVAL_S) < _TIMED_INTERVAL_S:
            return None
        self._timed_s[to] = now_s
        return partial(self._end, to)

    def _end(self, to: NodeId, duration_s: float) -> None:
        self.measured(LinkMeasured(to, latency_s=duration_s / 2))


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe. It ends in one call of `ended`, unless the sender dies."""

    effect: ProbeLink
    network: Network
    sender: Endpoint
    receiver: Endpoint | None
    ended: Callable[[LinkMeasured], None]

    def start(self) -> None:
        """Time the empty exchange."""
        self.network.send_control(self._transfer(0, self._transfer_bytes))

    def _transfer_bytes(self, trip_s: float) -> None:
        def sent(duration_s: float) -> None:
            size_bytes = self.effect.size_bytes
            latency_s = trip_s / 2
            rate = transfer_rate(size_bytes, duration_s=duration_s, latency_s=latency_s)
            self.ended(LinkMeasured(self.effect.to, latency_s, rate))

        self.network.send_tensor(self._transfer(self.effect.size_bytes, sent))

    def _transfer(self, size_bytes: int, sent: Callable[[float], None]) -> InFlight:
        return InFlight(
            self.sender, self.receiver, size_bytes, delivered=_nothing, sent=sent, failed=self._fail
        )

    def _fail(self, _reason: str, _fault: Fault) -> None:
        self.ended(LinkMeasured(self.effect.to))


def _nothing() -> None:
    """Do nothing: nobody looks at the bytes of a probe."""
