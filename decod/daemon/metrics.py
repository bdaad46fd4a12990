"""What a node counts: its credit, the leader's table of iterations, and rows for `decod analyse`.

A row enters the journal's file at each commit, from what the parts of the node have counted since
the last. The event loop only adds numbers up.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from decod.clocks import wall_clock
from decod.compression.plan import Method
from decod.config.node_config import NodeConfig
from decod.daemon.device_owner import HostDevice
from decod.daemon.gateway import Gateway
from decod.daemon.run_facts import RunPart
from decod.daemon.tracking.tracking import Tracking, tracking_plan
from decod.driver.compute import Compute, TimedCompute
from decod.driver.driver import CoreHandle
from decod.ids import NodeId, iteration_of
from decod.journal import credit_file
from decod.journal.credit import Credit, RunCredit, describe_credit
from decod.journal.credit_file import CreditLedger
from decod.journal.iteration_file import FILE_NAME, IterationFile, Row
from decod.journal.journal import JournalEntry, Spool, TakeNote
from decod.journal.journal_file import FOLDER, KeptJournal
from decod.journal.records import Mode, RoundRow
from decod.journal.step_metrics import STEP_METRIC_NAMES
from decod.protocol.core.effects import CountWork
from decod.run.run_config import RunConfig
from decod.run.training_config import ActivationCompression, SyncMethod
from decod.tasks import in_thread
from decod.texts import clean_text, why_of
from decod.train.checkpoint.store import run_folder, run_id_of

# --- credit --------------------------------------------------------------------------------------
# Counts what a node does for its run, for the credit ledger of its folder.
#
# Work is counted when an iteration is committed. A thread writes the ledger every few seconds and
# at the end of the node's life, so a slow or full disk does not disturb training. A crash loses
# the work of the last seconds.


SAVE_INTERVAL_S = 10.0

_NAME_MAX_CHARACTERS = 64
_DISK_S = 10.0
"""How long the start and the end of a node wait for a disk that hangs."""


class CreditCounter:
    """Counts one node's work. Use it in `async with`.

    Args:
        ledger: Gets the counts. It outlives the node.
        part: The node's part in the run.
        node_name: The node's name.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self, ledger: CreditLedger, part: RunPart, node_name: str, note: Callable[..., None]
    ) -> None:
        self._ledger, self._note = ledger, note
        self._run_id, self._own = part.run_id, part.membership.node_id
        run = part.run
        self._tokens_each = run.batch.tokens_per_microbatch
        self._run_name = clean_text(run.name, limit=_NAME_MAX_CHARACTERS)
        self._node_name = clean_text(node_name, limit=_NAME_MAX_CHARACTERS)
        self._told = False

    async def __aenter__(self) -> Self:
        await self._save_in_time()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._save_in_time()

    async def _save_in_time(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISK_S):
                await self._save()

    async def keep_saving(self) -> None:
        """Write the ledger now and then. Never returns."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self._save()

    def count(self, effect: CountWork) -> None:
        """Count the microbatches of an iteration that is committed."""
        if number := dict(effect.work).get(self._own, 0):
            tokens = number * self._tokens_each
            self._add(Credit(num_microbatches=number, num_tokens=tokens))

    def spent(self, *, device_s: float, sent_bytes: int, received_bytes: int) -> None:
        """Count what the time since the commit before took of this host, in seconds and bytes."""
        self._add(Credit(device_s=device_s, sent_bytes=sent_bytes, received_bytes=received_bytes))

    def _add(self, credit: Credit) -> None:
        now_s = wall_clock()
        row = RunCredit(
            run_name=self._run_name,
            node_name=self._node_name,
            first_s=now_s,
            last_s=now_s,
            credit=credit,
        )
        self._ledger.add(self._run_id, row)

    async def _save(self) -> None:
        try:
            aside = await in_thread(self._ledger.save)
        except OSError as error:
            if not self._told:
                self._note("credit.unkept", reason=f"{credit_file.FILE_NAME}: {why_of(error)}")
            self._told = True
            return
        self._told = False
        if aside is not None:
            path, reason = aside
            # Other members may see it, whom this host's folders don't concern.
            self._note("credit.damaged", file=path.name, reason=reason)

    def describe(self) -> dict[str, Any]:
        """Return the `credit` part of `decod status`: of all runs of this folder."""
        return dict(describe_credit(self._ledger.rows))


# --- the table of iterations ---------------------------------------------------------------------
# Writes loss and rates of the iterations that this node commits as the leader into a file.
#
# A row is collected from the entries of a commit. Rows wait in memory until the disk takes them.
# TensorBoard and W&B get the same rows, if the operator wants that.


ROWS_WAITING_MAX = 10_000
"""Rows that wait for the disk. Further ones are dropped."""

TRACKED = ("loss", "tokens_per_s", *STEP_METRIC_NAMES, "num_members")
"""Columns that trackers get."""

_PASSES_PER_MICROBATCH = 3
"""Of a data node: embedding, head with loss, and the embedding's backward pass."""


class IterationLog:
    """Writes the iterations of a leader. Use it in `async with`. Elsewhere it writes nothing.

    Args:
        file: Gets the rows.
        run_id: Of the run.
        own: This node.
        note: Takes the name of an event, and its fields as keywords.
        tracking: Gets the rows too.
    """

    def __init__(
        self,
        file: IterationFile,
        run_id: str,
        own: NodeId,
        note: TakeNote,
        tracking: Tracking | None = None,
    ) -> None:
        self._run_id, self._own, self._tracking = run_id, own, tracking
        self._rows = Spool[Row](
            lambda rows, _: file.add(rows), file.close, waiting_max=ROWS_WAITING_MAX
        )
        self._rows.on_failed.append(
            lambda outage: note("iterations.unkept", reason=f"{FILE_NAME}: {outage.reason}")
        )
        self._row: dict[str, object] | None = None
        """Of the iteration that has just been committed, until all of it is known."""
        self._num_members: object = None
        self._committed_s: float | None = None
        self._num_passes = 0

    async def __aenter__(self) -> Self:
        await self._rows.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._finish_row()
        await self._rows.__aexit__(*exc_info)
        if self._tracking is not None:
            await self._tracking.close()

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry. Never waits and never raises."""
        event, fields = entry.event, entry.fields
        if event == "iteration.opened":
            self._finish_row()
            self._num_members = fields["num_members"]
        elif event == "iteration.committed":
            self._finish_row()
            self._row = self._begun_row(entry)
        elif event == "step.committed":
            self._take_step(entry)
        elif event == "evaluation.done" and self._tracking is not None:
            self._tracking.take(int(fields["iteration"]), {"held_out_loss": fields["loss"]})

    def count(self, work: CountWork) -> None:
        """Take in how much this node has worked in an iteration that is committed."""
        row = self._row
        if row is not None and row["iteration"] == work.iteration and "num_passes" in row:
            needed = _PASSES_PER_MICROBATCH * dict(work.work).get(self._own, 0)
            row["num_passes_wasted"] = max(0, int(str(row["num_passes"])) - needed)

    def _begun_row(self, entry: JournalEntry) -> dict[str, object]:
        fields, now = entry.fields, datetime.fromtimestamp(entry.time_s, UTC)
        era, _, numbered = str(fields["iteration"]).rpartition(":")
        number, _, attempt = numbered.partition(".")
        told = ("loss", "num_tokens", "duration_s", "num_microbatches", "num_deferred")
        return {
            "iteration": int(number),
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **{name: fields.get(name) for name in told},
            "num_reread": fields.get("num_reread", 0),
            "num_members": self._num_members,
            "attempt": int(attempt),
            "era": int(era.removeprefix("e") or 0),
            "run_id": self._run_id,
        }

    def _take_step(self, entry: JournalEntry) -> None:
        """Take in this node's own step, which every member notes. It tells of rates."""
        fields, now_s, before_s = entry.fields, entry.now_s, self._committed_s
        num_passes = int(fields["num_passes"]) - self._num_passes
        self._committed_s, self._num_passes = now_s, int(fields["num_passes"])
        row = self._row
        if row is None or row["iteration"] != iteration_of(str(fields["iteration"])):
            return
        row["num_passes"] = num_passes
        row.update((name, fields.get(name)) for name in STEP_METRIC_NAMES)
        if before_s is not None and now_s > before_s:
            row["tokens_per_s"] = round(fields["num_tokens"] / (now_s - before_s), 3)

    def _finish_row(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._rows.add(row)
            if self._tracking is not None:
                self._tracking.take(
                    int(str(row["iteration"])), {name: row.get(name) for name in TRACKED}
                )


def iteration_log(part: RunPart, config: NodeConfig, note: TakeNote) -> IterationLog:
    """Return the log of a node, with the trackers of its configuration.

    Its file goes on from that of the run that this run resumes.
    """
    came_from = part.checkpoint_dir
    earlier = None
    if came_from is not None:
        earlier = run_folder(config.state_dir, run_id_of(came_from)).with_name(FILE_NAME)
    file = IterationFile(
        run_folder(config.state_dir, part.run_id).with_name(FILE_NAME),
        earlier=earlier,
        start_iteration=part.manifest.start_iteration,
    )
    plan, own = tracking_plan(config, part), part.membership.node_id
    tracking = Tracking(plan, note) if plan.wanted else None
    return IterationLog(file, part.run_id, own, note, tracking)


# --- measurements --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchedParts:
    """The parts of a node from which its metrics come."""

    core: CoreHandle
    device: HostDevice
    gateway: Gateway
    note: TakeNote
    spent: Callable[..., None]
    """Takes what an iteration took: `device_s`, `sent_bytes` and `received_bytes`."""


class NodeMetrics:
    """Records what one node does. Use it in `async with`.

    Args:
        part: The node's part in the run.
        name: Its name.
        config: This host's choices.
        watched: Parts of the node.
    """

    def __init__(self, part: RunPart, name: str, config: NodeConfig, watched: WatchedParts) -> None:
        self._part, self._name = part, name
        self._core, self._device, self._gateway = watched.core, watched.device, watched.gateway
        self._spent = watched.spent
        self._timed: TimedCompute | None = None
        self._num_members: int | None = None
        self._committed_s: float | None = None
        """When the last iteration was committed, on the loop's clock. None before the first."""
        self._loop = asyncio.get_running_loop()
        run_id, own = part.run_id, part.membership.node_id
        self._kept = KeptJournal(
            config.state_dir / FOLDER, run_id, own, name, self._processes, watched.note
        )

    async def __aenter__(self) -> Self:
        await self._kept.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._kept.__aexit__(*exc_info)

    def _processes(self) -> Iterator[int]:
        yield os.getpid()
        yield from self._device.pids

    def timed(self, compute: Compute) -> TimedCompute:
        """Return a layer in front of the compute process, by which its jobs are timed."""
        self._timed = TimedCompute(compute)
        return self._timed

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry."""
        event, fields = entry.event, entry.fields
        self._kept.take(entry)
        if event == "iteration.opened":
            self._num_members = int(fields["num_members"])
        elif event == "step.committed":
            self._on_commit(iteration_of(str(fields["iteration"])), fields)

    def _on_commit(self, iteration: int, fields: Mapping[str, Any]) -> None:
        assert self._timed is not None
        now_s, began_s = self._loop.time(), self._committed_s
        times, self._committed_s = self._timed.take(), now_s
        passes, averages = self._gateway.traffic.take(began_s or now_s)
        self._spent(
            device_s=times.computing_s,
            sent_bytes=passes.sent_bytes + averages.sent_bytes,
            received_bytes=passes.received_bytes + averages.received_bytes,
        )
        facts, run = self._core.facts, self._part.run
        if began_s is None or facts is None:
            return  # The time before the first commit here is not an iteration's.
        begin_s, averaging_s = times.passes_begin_s, times.averaging_begin_s
        batch, sync = run.batch, run.sync
        is_local = sync.method is SyncMethod.DILOCO
        self._kept.add(
            RoundRow(
                mode=Mode.PIPELINE,
                time_s=wall_clock(),
                run=self._part.run_id,
                peer=self._part.membership.node_id,
                name=self._name,
                stage=facts.own_stage,
                round=iteration,
                round_s=now_s - began_s,
                steps=times.num_microbatches,
                samples=times.num_microbatches * batch.microbatch_size,
                round_samples=int(fields["num_tokens"]) // batch.sequence_length,
                data_s=times.data_s,
                forward_s=times.forward_s,
                backward_s=times.backward_s,
                optimizer_s=times.step_s,
                other_s=times.other_s,
                matchmaking_s=None if begin_s is None else max(0.0, begin_s - began_s),
                averaging_s=None if averaging_s is None else now_s - max(averaging_s, began_s),
                averaging_compute_s=times.averaging_s,
                sending_s=passes.sending_s,
                sent_bytes=passes.sent_bytes,
                received_bytes=passes.received_bytes,
                average_sending_s=averages.sending_s,
                average_sent_bytes=averages.sent_bytes,
                average_received_bytes=averages.received_bytes,
                peers=self._num_members,
                target_batch_size=batch.num_microbatches
                * batch.num_data_nodes
                * batch.microbatch_size,
                batch_size_per_step=batch.microbatch_size,
                local_updates=is_local,
                averages_every=sync.every if is_local else 1,
                overlap=sync.overlap,
                compression=_format_of_averages(run),
                activation_compression=_format_of_activations(run),
                capacity=facts.load.capacity,
                device=self._device.name,
                loss=fields["loss"],
            )
        )

    def timing(self) -> dict[str, float]:
        """Return how this node has spent its time since its core started, in seconds."""
        if not self._core.started:
            return {}
        spent = self._gateway.watch.seconds
        return {
            **self._core.driver.timing(),
            "node_copy_s": spent["copy"],
            "node_serialize_s": spent["serialize"],
            "node_cpu_s": time.process_time(),
        }


def _format_of_averages(run: RunConfig) -> str:
    sync, reduction = run.sync, run.reduction
    compressed = sync.method is SyncMethod.DILOCO and sync.compression is not Method.NONE
    return sync.compression.value if compressed else reduction.wire_dtype.value


def _format_of_activations(run: RunConfig) -> str:
    compression, dtype = run.activations.compression, run.model.dtype
    return dtype.value if compression is ActivationCompression.NONE else compression.value
