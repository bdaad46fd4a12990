"""The time of a round of the collaborative optimizer.

Peers add up gradients until they have the target batch together, find each other, average, and
apply the average:

    accumulation = samples / sum over peers of 1 / (seconds of one sample)
    exchange     = matchmaking + arithmetic + transfer
    round        = accumulation + exchange + apply + optimizer + other       without overlap
    round        = max(accumulation, exchange) + apply + optimizer + other   with overlap

The transfer takes as long as its slowest sender. `other` is what the records show beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decod.insight.iteration_model import Cause, Remedy, change, finer_ratio, mean
from decod.journal.records import RoundRow

_SLOW_RATIO = 1.5
"""A peer whose sends take so much longer than those of all others holds the average up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpeed:
    """How long a peer takes, in seconds for each of its samples."""

    name: str
    data_s: float
    compute_s: float
    """Forward and backward."""
    accumulate_s: float = 0.0
    step_s: float = 0.0
    """The optimizer's steps between averages, with local updates."""
    sending_s: float = 0.0
    """Per average, not per sample: how long its parts are on their way. 0: not known."""
    is_split: bool = True
    """Its loop tells data from passes. Otherwise all of it counts as computing."""

    @property
    def sample_s(self) -> float:
        return self.data_s + self.compute_s + self.accumulate_s + self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerModel:
    """Mean times of a round. See the module for the formula."""

    peers: tuple[PeerSpeed, ...]
    """Those with records."""
    unseen_rate: float = 0.0
    """Samples per second of accumulation that come from peers without records."""
    num_peers: int
    """With those without records."""
    samples: float
    matchmaking_s: float
    arithmetic_s: float
    """Of the average: encode, add up, decode."""
    transfer_s: float
    apply_s: float
    """Put the average into the parameters."""
    optimizer_s: float = 0.0
    """The optimizer's step after the average. 0 with local updates: it is in the peers' times."""
    other_s: float = 0.0
    overlap: bool = False
    local_updates: bool = False
    compression: str | None = None
    target: float = 0.0
    """The target batch. `samples` is larger, since the last steps go beyond it."""
    step_samples: float = 1.0
    """Samples of one step of a peer."""

    @property
    def accumulation_s(self) -> float:
        rate = sum(1 / max(peer.sample_s, 1e-9) for peer in self.peers) + self.unseen_rate
        return self.samples / rate

    @property
    def exchange_s(self) -> float:
        return self.matchmaking_s + self.arithmetic_s + self.transfer_s

    @property
    def round_s(self) -> float:
        work_s, exchange_s = self.accumulation_s, self.exchange_s
        both_s = max(work_s, exchange_s) if self.overlap else work_s + exchange_s
        return both_s + self.apply_s + self.optimizer_s + self.other_s

    # --- one peer -----------------------------------------------------------------------------

    @property
    def _by_sending(self) -> list[PeerSpeed]:
        """Peers whose sends have been timed, the slowest first."""
        timed = [peer for peer in self.peers if peer.sending_s]
        return sorted(timed, key=lambda peer: -peer.sending_s)

    @property
    def slow_peer(self) -> str:
        slowest = self._by_sending
        if len(slowest) < 2 or slowest[0].sending_s < _SLOW_RATIO * slowest[1].sending_s:
            return ""
        return slowest[0].name

    @property
    def _excess_s(self) -> float:
        """How much shorter the transfer would be if the slow peer sent like the next slowest."""
        if not self.slow_peer:
            return 0.0
        slowest, second = self._by_sending[:2]
        return min(self.transfer_s, slowest.sending_s - second.sending_s)

    # --- causes and changes -------------------------------------------------------------------

    def causes(self) -> dict[Cause, float]:
        without_data = self.with_fast_data()
        data_s = self.accumulation_s - without_data.accumulation_s
        waits = {
            Cause.MATCHMAKING: self.matchmaking_s,
            Cause.PEER: self._excess_s,
            Cause.AVERAGING: self.arithmetic_s + self.transfer_s - self._excess_s,
        }
        if self.overlap:
            # Only what is longer than the accumulation beside it is waited for.
            seen = max(0.0, self.exchange_s - self.accumulation_s) / max(self.exchange_s, 1e-9)
            waits = {cause: seconds * seen for cause, seconds in waits.items()}
        waits[Cause.AVERAGING] += self.apply_s + self.optimizer_s
        work = {Cause.DATA: data_s, Cause.COMPUTE: without_data.accumulation_s}
        return {**work, **waits, Cause.OTHER: self.other_s}

    def changes(self) -> list[Remedy]:
        found = [
            change(
                self,
                self.with_fast_data(),
                Cause.DATA,
                "load data ahead of the step that needs it (workers, prefetching), or from a faster"
                " disk",
                "assumes that no step waits for data any more",
            ),
            *self._changes_of_batch(),
            *self._changes_of_transfer(),
            *self._changes_of_steps(),
            change(
                self,
                self.with_peers(2 * self.num_peers),
                Cause.COMPUTE,
                f"have {2 * self.num_peers} peers instead of {self.num_peers}",
                "the new ones are as fast as the others",
            ),
        ]
        if not self.overlap:
            after = replace(self, overlap=True)
            caution = "averages are applied one step late: watch the loss"
            found.append(change(self, after, Cause.AVERAGING, "set overlap=True", caution))
        return found

    def _changes_of_batch(self) -> list[Remedy]:
        found = []
        for factor in (2, 4):
            what = f"set target_batch_size={round(self._target * factor)}"
            caution = "the optimizer steps more seldom"
            if self.local_updates:
                caution = "peers learn apart for longer: watch the loss"
            after = self.with_samples(factor)
            found.append(change(self, after, Cause.AVERAGING, what, caution))
        if not self.local_updates:
            after = self.with_samples(4)
            what = f"set use_local_updates=True and target_batch_size={round(self._target * 4)}"
            caution = "peers step by themselves between averages: watch the loss"
            step_s = self.optimizer_s / max(1.0, self.step_samples)
            peers = tuple(replace(peer, step_s=step_s) for peer in self.peers)
            after = replace(after, peers=peers, optimizer_s=0.0)
            found.append(change(self, after, Cause.AVERAGING, what, caution))
        return found

    def _changes_of_transfer(self) -> list[Remedy]:
        found = []
        for method in ("bf16", "int8", "int4"):
            ratio = finer_ratio(self.compression, method)
            if ratio is not None and ratio < 1:
                after = self.with_transfer(ratio)
                what, caution = f'set compression="{method}"', "averages are rounded"
                found.append(change(self, after, Cause.AVERAGING, what, caution))
        if name := self.slow_peer:
            after = replace(self, transfer_s=self.transfer_s - self._excess_s)
            what = f"give {name} a faster uplink, or lift its upload cap"
            caution = "it then sends as fast as the next slowest"
            found.append(change(self, after, Cause.PEER, what, caution))
            what = f"go on without {name}, whose uplink is slow"
            found.append(change(self, self.without(name), Cause.PEER, what))
        return found

    def _changes_of_steps(self) -> list[Remedy]:
        after = self.with_accumulation(2)
        what = "double gradient_accumulation_steps"
        caution = "the local optimizer steps half as often" if self.local_updates else ""
        return [change(self, after, Cause.COMPUTE, what, caution)]

    # --- the model with a change --------------------------------------------------------------

    def with_fast_data(self) -> "OptimizerModel":
        """Return the model if nobody waited for data."""
        return replace(self, peers=tuple(replace(peer, data_s=0.0) for peer in self.peers))

    def with_samples(self, factor: float) -> "OptimizerModel":
        """Return the model with a larger target batch."""
        samples = self.samples + (factor - 1) * self._target
        # What is beyond the model, such as logging, comes with the steps.
        other_s = self.other_s * samples / max(self.samples, 1e-9)
        return replace(self, samples=samples, target=self._target * factor, other_s=other_s)

    @property
    def _target(self) -> float:
        return self.target or self.samples

    def with_transfer(self, ratio: float) -> "OptimizerModel":
        """Return the model if so many times as many bytes travelled."""
        peers = tuple(replace(peer, sending_s=peer.sending_s * ratio) for peer in self.peers)
        return replace(self, transfer_s=self.transfer_s * ratio, peers=peers)

    def with_accumulation(self, factor: int) -> "OptimizerModel":
        """Return the model with so many times as many backward passes before a step."""
        peers = tuple(
            replace(peer, accumulate_s=peer.accumulate_s / factor, step_s=peer.step_s / factor)
            for peer in self.peers
        )
        return replace(self, peers=peers)

    def without(self, name: str) -> "OptimizerModel":
        """Return the model without one peer."""
        peers = tuple(peer for peer in self.peers if peer.name != name)
        gone = self._excess_s if name == self.slow_peer else 0.0
        left = replace(self, peers=peers, transfer_s=self.transfer_s - gone)
        ratio = _traffic(self.num_peers - 1) / max(_traffic(self.num_peers), 1e-9)
        return replace(left.with_transfer(ratio), num_peers=self.num_peers - 1)

    def with_peers(self, num_peers: int) -> "OptimizerModel":
        """Return the model with more peers, which are like those that there are."""
        factor = num_peers / self.num_peers
        rate = self.samples / max(self.accumulation_s, 1e-9)
        more = replace(self, unseen_rate=self.unseen_rate + (factor - 1) * rate)
        # The average of a lone peer does not travel. That of two does, but nobody knows how fast.
        ratio = _traffic(num_peers) / _traffic(self.num_peers) if self.num_peers > 1 else 1.0
        return replace(more.with_transfer(ratio), num_peers=num_peers)

    def unknown(self) -> list[str]:
        found = []
        if missing := self.num_peers - len(self.peers):
            found.append(
                f"records of {missing} of {self.num_peers} peers are missing: their data, computing"
                " and uplinks are seen only in what they contribute"
            )
        if len(self.peers) > 1 and not any(peer.sending_s for peer in self.peers):
            found.append("no peer has timed its sends, so a slow uplink has no name")
        if unsplit := [peer.name for peer in self.peers if not peer.is_split]:
            found.append(
                f"how long {', '.join(unsplit)} waits for data: it counts as computing until the"
                " script calls optimizer.watch(model)"
            )
        if self.num_peers == 1:
            found.append("a lone peer averages with nobody: what averages would cost is not known")
        return found


def _traffic(num_peers: int) -> float:
    """Return what a peer sends in an average, in units of twice its parameters' bytes.

    Everybody adds up one part: it gets that part of all others, and sends them the mean.
    """
    return (num_peers - 1) / num_peers


def optimizer_model(rows: Sequence[Sequence[RoundRow]]) -> OptimizerModel:
    """Return the model of some rounds.

    Args:
        rows: By round, a row of each peer with records. At least one.
    """
    every = [row for each in rows for row in each]
    names = dict.fromkeys((row.peer, row.name) for row in every)
    peers = tuple(_speed([r for r in every if r.peer == peer], name) for peer, name in names)
    last = every[-1]
    num_peers = max(len(peers), round(mean([row.peers or 1 for row in every])))
    samples = mean([_samples_of(each) for each in rows])
    seen = mean([sum(row.samples for row in each) for each in rows])
    rate = sum(1 / max(peer.sample_s, 1e-9) for peer in peers)
    unseen_rate = rate * max(0.0, samples / max(seen, 1e-9) - 1) if num_peers > len(peers) else 0.0
    transfers = [max(_transfer_s(row) for row in each) for each in rows]
    model = OptimizerModel(
        peers=peers,
        unseen_rate=unseen_rate,
        num_peers=num_peers,
        samples=samples,
        matchmaking_s=mean([row.matchmaking_s or 0.0 for row in every]),
        arithmetic_s=mean([row.averaging_compute_s or 0.0 for row in every]),
        transfer_s=mean(transfers),
        apply_s=mean([max(row.apply_s or 0.0 for row in each) for each in rows]),
        optimizer_s=mean([max(_round_step_s(row) for row in each) for each in rows]),
        overlap=bool(last.overlap),
        local_updates=bool(last.local_updates),
        compression=last.compression,
        target=float(last.target_batch_size or 0),
        step_samples=sum(row.samples for row in every)
        / max(1, sum(row.steps or 0 for row in every)),
    )
    measured_s = mean([row.round_s for row in every])
    return replace(model, other_s=max(0.0, measured_s - model.round_s))


def _samples_of(rows: Sequence[RoundRow]) -> float:
    known = [row.round_samples for row in rows if row.round_samples is not None]
    return mean(known) if known else sum(row.samples for row in rows)


def _transfer_s(row: RoundRow) -> float:
    return max(0.0, (row.averaging_s or 0.0) - (row.averaging_compute_s or 0.0))


def _round_step_s(row: RoundRow) -> float:
    # With local updates, the optimizer steps at each step of the loop, and not once a round.
    return 0.0 if row.local_updates else row.optimizer_s or 0.0


def _speed(rows: Sequence[RoundRow], name: str) -> PeerSpeed:
    samples = max(1, sum(row.samples for row in rows))
    local = [row for row in rows if row.local_updates]
    return PeerSpeed(
        name=name,
        data_s=sum(row.data_s or 0.0 for row in rows) / samples,
        compute_s=sum(_passes_s(row) for row in rows) / samples,
        accumulate_s=sum(row.accumulate_s or 0.0 for row in rows) / samples,
        step_s=sum(row.optimizer_s or 0.0 for row in local) / samples,
        sending_s=mean([row.average_sending_s or 0.0 for row in rows]),
        is_split=all(row.unsplit_s is None for row in rows),
    )


def _passes_s(row: RoundRow) -> float:
    return sum(each or 0.0 for each in (row.forward_s, row.backward_s, row.unsplit_s))
