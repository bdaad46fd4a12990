"""What a node measures of its iterations and its host, for `decod analyse`.

A row enters the journal's file at each commit, from what the parts of the node have counted since
the last. The event loop only adds numbers up.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from decod.clocks import wall_clock
from decod.compression.plan import Method
from decod.config.node_config import NodeConfig
from decod.daemon.device_owner import HostDevice
from decod.daemon.gateway import Gateway
from decod.daemon.run_facts import RunPart
from decod.driver.compute import Compute, TimedCompute
from decod.driver.driver import CoreHandle
from decod.ids import iteration_of
from decod.journal.host_sampler import HostSampler
from decod.journal.journal import JournalEntry, TakeNote
from decod.journal.journal_file import FOLDER, KeptJournal
from decod.journal.records import Mode, RoundRow
from decod.run.run_config import RunConfig
from decod.run.training_config import ActivationCompression, SyncMethod


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
        sampler = HostSampler(run_id, own, name, self._processes)
        self._kept = KeptJournal(
            config.state_dir / FOLDER, run_id, own, sampler.sample, watched.note
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
