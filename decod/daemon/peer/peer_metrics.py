"""What a peer measures of its rounds and its host, for `decod analyse`."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from decod.clocks import wall_clock
from decod.daemon.peer.loop_facts import LoopFacts
from decod.daemon.peer.peer_entry import PeerPart
from decod.daemon.tensor_traffic import TensorTraffic
from decod.journal.journal import JournalEntry
from decod.journal.journal_file import KeptJournal
from decod.journal.records import Mode, RoundRow


class LoopMetrics:
    """Measures what one peer does.

    Args:
        loop: What its training loop has said.
        part: Its part in the run.
        name: Its name.
        kept: Gets a row on each round.
        traffic: Counts its tensors.
        compute_s: Returns how long the averaging process has worked so far, in seconds.
    """

    def __init__(
        self,
        loop: LoopFacts,
        part: PeerPart,
        name: str,
        kept: KeptJournal,
        traffic: TensorTraffic,
        compute_s: Callable[[], float],
    ) -> None:
        self._loop, self._part, self._name, self._kept = loop, part, name, kept
        self._traffic, self._events = traffic, asyncio.get_running_loop()
        self._ended_s: float | None = None
        """When the last round ended here, on the event loop's clock. None: none has."""
        self._compute_s, self._computed_s = compute_s, 0.0
        self._begin()

    def _begin(self) -> None:
        """Begin to count anew."""
        self._num_steps = self._num_samples = 0
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._waits_s: float | None = None
        """Since when the loop has been told to wait, or the batch is full."""
        self._begun_s: float | None = None
        """When the average began."""

    # --- the loop -----------------------------------------------------------------------------

    def stepped(self, num_samples: int, seconds: Mapping[str, float]) -> None:
        """Count a step of the loop."""
        self._num_steps += 1
        self._num_samples += num_samples
        for name, value in seconds.items():
            self._spent[name] += value

    def waits(self) -> None:
        """The loop has been told to wait."""
        self._waits_s = self._waits_s or self._events.time()

    # --- rounds -------------------------------------------------------------------------------

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry."""
        match entry.event:
            case "round.closing":
                self.waits()
            case "round.begun":
                self._begun_s = self._events.time()
            case "round.committed":
                compute_s = self._compute_s()
                self._spent["average"] = compute_s - self._computed_s
                self._computed_s = compute_s
                self._record(entry.fields)

    def _record(self, fields: Mapping[str, Any]) -> None:
        now_s, began_s = self._events.time(), self._ended_s
        self._ended_s = now_s
        _, averages = self._traffic.take(began_s or now_s)
        if began_s is not None:
            self._kept.add(self._row(fields, now_s, began_s, averages))
        self._begin()

    def _row(
        self, fields: Mapping[str, Any], now_s: float, began_s: float, averages: Any
    ) -> RoundRow:
        loop, spent = self._loop, self._spent
        begun_s = self._begun_s if self._begun_s is not None else now_s
        waits_s = self._waits_s if self._waits_s is not None else begun_s
        return RoundRow(
            mode=Mode.OPTIMIZER,
            time_s=wall_clock(),
            run=self._part.run_id,
            peer=self._part.membership.node_id,
            name=self._name,
            round=int(fields["round"]),
            round_s=now_s - began_s,
            steps=self._num_steps,
            samples=int(fields["own"]),
            round_samples=int(fields["samples"]),
            data_s=spent.get("data"),
            forward_s=spent.get("forward"),
            backward_s=spent.get("backward"),
            unsplit_s=spent.get("unsplit"),
            accumulate_s=spent["accumulate"],
            optimizer_s=spent["apply"],
            matchmaking_s=max(0.0, begun_s - waits_s),
            averaging_s=max(0.0, now_s - begun_s),
            averaging_compute_s=max(0.0, spent["average"]),
            wait_s=spent["wait"],
            average_sending_s=averages.sending_s,
            average_sent_bytes=averages.sent_bytes,
            average_received_bytes=averages.received_bytes,
            peers=int(fields["peers"]),
            target_batch_size=loop.terms.target_batch_size,
            batch_size_per_step=loop.batch_size_per_step,
            accumulation_steps=loop.accumulation_steps,
            local_updates=loop.terms.use_local_updates,
            overlap=loop.overlap,
            compression=loop.terms.compression,
            device=loop.device,
        )
