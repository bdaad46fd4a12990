"""Simulated links: latency, bandwidth, order, and on request loss, repeats and delay.

What the real transport promises holds here too. Control messages of one ordered pair keep their
order; so do its tensors, which go one after another through the pair's bandwidth; the two do not
wait for each other. Every send ends in exactly one of: delivered (once or, under faults, twice),
or reported as failed. Nothing is ever lost without a word, except towards a sender that is dead.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from decod.protocol.core.events import Fault
from decod.sim.kernel import Kernel, seeded

CONTROL_MESSAGE_SIZE_BYTES = 200
"""What a control message weighs on a link. Small against every tensor; only its order matters."""


_RATE_MIN_BYTES_PER_S = 64.0 * 1024
_RATE_GRACE_S = 5.0
_FRAME_BYTES = 1 << 20


def give_up_after_s(size_bytes: int) -> float:
    """Return how long a tensor may take before it is given up, as by the transport."""
    counted_bytes = min(size_bytes, _FRAME_BYTES) + size_bytes
    return _RATE_GRACE_S + counted_bytes / _RATE_MIN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One direction between two hosts."""

    latency_s: float = 0.02
    """One way."""
    bandwidth_bytes_per_s: float = 12_500_000.0
    """Shared by all tensors of this ordered pair, which take turns."""


_LOOPBACK = LinkSpec(latency_s=0.0, bandwidth_bytes_per_s=1e12)
"""What a host sends to itself takes no time, but is still an event of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """What may go wrong on every link. All ratios are per message; 0 switches a fault off."""

    loss_ratio: float = 0.0
    """Messages that do not arrive: the sender hears so after `retry_timeout_s`."""
    duplicate_ratio: float = 0.0
    """Control messages that arrive twice."""
    delay_ratio: float = 0.0
    """Messages that are late by up to `delay_max_s`; those behind them wait."""
    delay_max_s: float = 1.0
    reorder_ratio: float = 0.0
    """Control messages that are late by up to `delay_max_s`, and overtaken meanwhile."""
    corrupt_ratio: float = 0.0
    """Tensors whose checksum does not hold when they arrive: refused, and the sender is told."""
    until_s: float = math.inf
    """From then on nothing of all this happens any more."""
    retry_timeout_s: float = 3.0
    """How long a transport tries before it gives a message up."""


@dataclass(frozen=True, slots=True)
class Links:
    """Which link joins two hosts: by name of sender and receiver, else the default."""

    default: LinkSpec = field(default_factory=LinkSpec)
    overrides: Mapping[tuple[str, str], LinkSpec] = field(default_factory=dict)
    spread_ratio: float = 0.0
    """Each pair's latency and bandwidth differ from the default by up to this share."""

    def between(self, sender: str, receiver: str, *, seed: int) -> LinkSpec:
        """Return the link of an ordered pair; the same for the same seed."""
        if sender == receiver:
            return _LOOPBACK
        spec = self.overrides.get((sender, receiver))
        if spec is not None:
            return spec
        if not self.spread_ratio:
            return self.default
        rng = seeded(seed, "link", sender, receiver)
        low, high = 1 - self.spread_ratio, 1 + self.spread_ratio
        return LinkSpec(
            self.default.latency_s * rng.uniform(low, high),
            self.default.bandwidth_bytes_per_s * rng.uniform(low, high),
        )


class Endpoint(Protocol):
    """What the network must know of a host."""

    name: str
    reachable: bool
    """False once it has stopped or died."""
    refuses: bool
    """Unreachable, but its machine still answers that nobody listens."""
    frozen_until_s: float
    """It takes nothing in before this instant, though its machine keeps what arrives."""


@dataclass(slots=True)
class _Pair:
    """State of one ordered pair."""

    spec: LinkSpec
    rng: random.Random
    control_free_s: float = 0.0
    bulk_free_s: float = 0.0


@dataclass(eq=False, slots=True)
class InFlight:
    """One message on its way, and what to do when it ends."""

    sender: Endpoint
    receiver: Endpoint | None
    """None: nobody has this id."""
    size_bytes: int
    """Of its tensor; 0 for control messages."""
    delivered: Callable[[], None]
    """At the receiver."""
    sent: Callable[[float], None] | None
    """At the sender, with the seconds that the transfer took. None: it does not care."""
    failed: Callable[[str, Fault], None]
    """At the sender, with the reason."""
    late: Callable[[], None] | None = None
    """At the receiver of a tensor that comes too slowly."""


class Network:
    """Carries transfers between endpoints in virtual time."""

    def __init__(self, kernel: Kernel, links: Links, faults: LinkFaults, *, seed: int) -> None:
        self._kernel = kernel
        self._links = links
        self._faults = faults
        self._seed = seed
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._cut: dict[tuple[str, str], float] = {}
        self._slowed: dict[tuple[str, str], tuple[float, float]] = {}
        """Bytes a second of tensors, and until when."""
        ratios = [faults.loss_ratio, faults.duplicate_ratio, faults.delay_ratio]
        ratios += [faults.reorder_ratio, faults.corrupt_ratio]
        self._faults_until_s = faults.until_s if any(ratios) else -math.inf

    def cut(self, sender: str, receiver: str, *, until_s: float) -> None:
        """Let nothing through in this direction until an instant; sends fail meanwhile."""
        self._cut[sender, receiver] = max(until_s, self._cut.get((sender, receiver), 0.0))

    def slow(self, sender: str, receiver: str, *, rate: float, until_s: float) -> None:
        """Let tensors through in this direction at `rate` bytes a second until an instant."""
        self._slowed[sender, receiver] = (rate, until_s)

    def change(self, sender: Endpoint, receiver: Endpoint, spec: LinkSpec) -> None:
        """Give an ordered pair another link from now on; what is on its way keeps its time."""
        self._pair(sender, receiver).spec = spec

    def spec(self, sender: Endpoint, receiver: Endpoint) -> LinkSpec:
        """Return the link of an ordered pair."""
        return self._pair(sender, receiver).spec

    def send_control(self, transfer: InFlight) -> None:
        """Carry a control message: latency, and the small time of its bytes."""
        if transfer.receiver is None:
            self._kernel.after(0.0, self._fail, transfer, "no such node")
            return
        pair = self._pair(transfer.sender, transfer.receiver)
        spec, now_s = pair.spec, self._kernel.now_s
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
        """Carry a tensor: it waits for those before it, then for its own bytes, then latency."""
        if transfer.receiver is None:
            self._kernel.after(0.0, self._fail, transfer, "no such node")
            return
        pair = self._pair(transfer.sender, transfer.receiver)
        start_s = max(self._kernel.now_s, pair.bulk_free_s)
        wire_s = self._wire_s(transfer, pair, start_s) + self._drawn_delay(pair)
        limit_s = give_up_after_s(transfer.size_bytes)
        pair.bulk_free_s = start_s + min(wire_s, limit_s)
        if wire_s > limit_s:
            self._kernel.at(pair.bulk_free_s, self._give_up, transfer)
            return
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
        """Return how long a tensor's bytes take that start at an instant."""
        size_bytes, usual = transfer.size_bytes, pair.spec.bandwidth_bytes_per_s
        assert transfer.receiver is not None
        rate, until_s = self._slowed.get((transfer.sender.name, transfer.receiver.name), (0.0, 0.0))
        if start_s >= until_s or rate >= usual:
            return size_bytes / usual
        slow_s = min(until_s - start_s, size_bytes / rate)
        return slow_s + (size_bytes - slow_s * rate) / usual

    def _give_up(self, transfer: InFlight) -> None:
        """A tensor has come too slowly: both ends find out."""
        receiver = transfer.receiver
        if transfer.late is not None and receiver is not None and receiver.reachable:
            transfer.late()
        self._refuse(transfer, "it takes too long", Fault.RATE)

    def _pair(self, sender: Endpoint, receiver: Endpoint) -> _Pair:
        key = (sender.name, receiver.name)
        pair = self._pairs.get(key)
        if pair is None:
            spec = self._links.between(*key, seed=self._seed)
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
        if self._cut and self._is_cut(transfer.sender, receiver):
            self._kernel.after(self._faults.retry_timeout_s, self._fail, transfer, "cut")
        elif receiver.reachable:
            # Answers take the way back, which may be another.
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
        """Whether the link between two hosts carries something now, both ways."""
        return not (self._is_cut(one, other) or self._is_cut(other, one))

    def _is_cut(self, sender: Endpoint, receiver: Endpoint) -> bool:
        return self._cut.get((sender.name, receiver.name), 0.0) > self._kernel.now_s

    def _acknowledge(self, transfer: InFlight, latency_s: float, start_s: float) -> None:
        assert transfer.receiver is not None
        asleep_s = transfer.receiver.frozen_until_s - self._kernel.now_s
        silent = self._cut and self._is_cut(transfer.receiver, transfer.sender)
        if silent or asleep_s > self._faults.retry_timeout_s:
            # The worst that a stalled host can do, or a link that carries nothing back: the
            # message counts as failed and yet arrives.
            self._kernel.after(self._faults.retry_timeout_s, self._fail, transfer, "timeout")
        elif transfer.sent is not None:
            self._kernel.after(max(asleep_s, 0.0) + latency_s, self._sent, transfer, start_s)

    def _repeat(self, transfer: InFlight) -> None:
        receiver = transfer.receiver
        if receiver is None or not receiver.reachable or self._is_cut(transfer.sender, receiver):
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
