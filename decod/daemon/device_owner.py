"""This host's device: the compute process, and the memory that it shares with this process."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decod.clocks import Stopwatch
from decod.config.node_config import DEVICE_LABEL, NodeConfig
from decod.daemon.node_errors import error_of, run_job
from decod.daemon.pausing.pause_probes import OwnGpu
from decod.daemon.run_facts import RunPart, base_of, sizes_of, tensor_sizes
from decod.daemon.stage_memory import (
    CAPACITY_AUTO_MAX,
    capacity_of,
    needs_here,
    recomputes,
    require_memory,
)
from decod.daemon.waits import OpenWaits
from decod.driver.arena import ALIGNMENT_BYTES, ArenaAllocator
from decod.driver.compute import ComputeDiedError, ComputeProcess, JobError
from decod.errors import HardwareError
from decod.protocol.core.durations import Patience
from decod.protocol.core.jobs import (
    BaseJob,
    Build,
    Configure,
    Measure,
    Measured,
    SetRecompute,
    SetThreads,
    SpreadStage,
)
from decod.protocol.core.messages.decision_messages import DEVICE_LENGTH_MAX
from decod.protocol.core.view import Role
from decod.run.run_config import Organisation, RunConfig
from decod.texts import why_of
from decod.train.checkpoint.places import address_of
from decod.wire import validate

_AVERAGES_MAX = 64
"""Averages that a candidate has room for until its stage's state arrives, unless `keep_max_bytes`
is less."""


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """What this host can do in the run."""

    capacity: int
    """Microbatches at a time."""
    compute_s: float
    """Mean time of a pass through a stage."""
    memory_bytes: int = 0
    """Of the device, for the run. 0: it is not known."""


class HostDevice:
    """The device of one node.

    Args:
        config: This host's choices.
        part: The node's part in the run.
        watch: Measures the time that this process spends on jobs.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self, config: NodeConfig, part: RunPart, watch: Stopwatch, note: Callable[..., None]
    ) -> None:
        self._config, self._part, self._watch, self._note = config, part, watch, note
        self.name = config.device
        """What the operator asked for, such as `auto`, until the compute process has tried it. Then
        it is the device in use."""
        self.text = ""
        """The same for other members, with the reason or the GPU's model. Empty until then."""
        self._compute: ComputeProcess | None = None
        self._arena: ArenaAllocator | None = None
        self._uuids: tuple[str | None, ...] = ()
        self._rank_pids: tuple[int, ...] = ()

    @property
    def gpus(self) -> Sequence[OwnGpu]:
        """The GPUs that the compute process and its ranks use; none before they are known."""
        if self.gone:
            return ()
        return [
            OwnGpu(uuid, pid) for uuid, pid in zip(self._uuids, self.pids, strict=False) if uuid
        ]

    @property
    def pids(self) -> Sequence[int]:
        """The ids of the compute process and its other ranks; none before it has started."""
        return () if self._compute is None else (self._compute.pid, *self._rank_pids)

    def use_threads(self, num_threads: int | None) -> None:
        """Compute with so many threads from the next job on. None: as many as torch takes."""
        self._config = replace(self._config, num_threads=num_threads)
        if self._compute is not None:
            # A process that is not configured yet gets the number again then.
            self._compute.submit(SetThreads(num_threads))

    @property
    def compute(self) -> ComputeProcess:
        assert self._compute is not None
        return self._compute

    @property
    def arena(self) -> ArenaAllocator:
        assert self._arena is not None
        return self._arena

    @property
    def gone(self) -> bool:
        """Whether the compute process has ended, and the state on the device is lost."""
        return self._compute is not None and self._compute.ended.done()

    async def start(self) -> None:
        """Start the compute process. `close` must be called even if this fails."""
        try:
            self._arena = ArenaAllocator(arena_bytes(self._part.run, self._config))
            log_path = self._config.state_dir / "compute.log"
            self._compute = await ComputeProcess.start(
                self._arena, log_path=log_path, watch=self._watch
            )
        except (OSError, OverflowError, ValueError) as error:
            raise HardwareError(
                "can't start the compute process",
                why=why_of(error),
                fix="free memory and disk space, or lower --capacity",
                code="E-HW-005",
            ) from error
        self._compute.watch_over(Patience(self._part.run.protocol), self._hung)
        self._compute.ended.add_done_callback(self._ended)

    async def close(self) -> None:
        """End the compute process, and give the memory back."""
        if self._compute is not None:
            self._compute.ended.remove_done_callback(self._ended)
            await self._compute.close()
        if self._arena is not None:
            self._arena.close()

    def abandon(self) -> None:
        """Kill the compute process, and do not report its end. It may still be loading torch."""
        if self._compute is not None:
            self._compute.ended.remove_done_callback(self._ended)
            self._compute.kill()

    def _hung(self, kind: str, waited_s: float) -> None:
        self._note("worker.hung", job=kind, waited_s=round(waited_s))

    def _ended(self, ended: "asyncio.Future[str]") -> None:
        if not ended.cancelled():
            self._note("worker.died", reason=ended.result())

    async def measure(self, say: Callable[[str], None], waits: OpenWaits) -> MeasuredHost:
        """Configure the compute process and measure it. `say` takes the device in use."""
        part, config = self._part, self._config
        settings = {
            **described(part.run, config, part.role),
            "data_dir": str(part.data_dir) if part.data_dir else None,
            "init_dir": str(part.init_dir) if part.init_dir else None,
            **self._base_settings(),
            "checkpoint_dir": address_of(part.checkpoint_dir) if part.checkpoint_dir else None,
            "checkpoint_sha256": part.manifest.initial_weights,
        }
        async with waits.of("torch to load"):
            facts = (await self.run(Configure(settings))).facts
        self.name = facts["device"]
        self.text = validate.clip_printable(facts["device_text"], DEVICE_LENGTH_MAX)
        ranks = facts.get("ranks", ())
        self._rank_pids = tuple(each["pid"] for each in ranks)
        self._uuids = tuple(each.get("device_uuid") for each in (facts, *ranks))
        say(f"{DEVICE_LABEL} {facts['device_text']}")
        self._note("worker.started", device=facts["device_text"])
        # Any relay stage will do: the stages differ by one block at most.
        stage = 0 if part.role is Role.DATA else (part.stage_index or 1)
        require_memory(part.run, stage, config, facts)
        if needs_here(part.run, stage, config, facts["memory_bytes"]).sharded:
            await self.run(SpreadStage(sharded=True))
            self._note("memory.spread", num_devices=config.num_devices)
        if recomputes(part.run, stage, config, facts["memory_bytes"]):
            await self.run(SetRecompute(recompute=True))
            self._note("memory.recomputed")
        async with waits.of("the device to be measured"):
            await self.run(Build(stage, trial=True))
            measured: Measured = await self.run(Measure())
        room_bytes = facts["memory_bytes"] - self._state_bytes(stage, facts["memory_bytes"])
        capacity = config.capacity or capacity_of(
            part.run, part.role, room_bytes, measured, self.name
        )
        pass_s = (measured.forward_s + measured.backward_s) / 2
        return MeasuredHost(capacity, pass_s, facts["memory_bytes"])

    def _base_settings(self) -> dict[str, Any]:
        base = base_of(self._part, self._config)
        if base is None:
            return {}
        return {
            "base": "".join(base.hashes),
            "base_cache": str(base.cache),
            "base_dir": str(base.folder) if base.folder else None,
        }

    def _state_bytes(self, stage: int, free_bytes: int) -> int:
        """Return what a stage takes of the device beside its microbatches.

        What the first step takes of it is still free when the device is measured.
        """
        run = self._part.run
        needs = needs_here(run, stage, self._config, free_bytes)
        return (
            needs.weights_bytes if run.organisation is Organisation.SERVERS else needs.device_bytes
        )

    async def run(self, job: BaseJob) -> Any:
        """Run a job outside the core. Its errors are such that the operator can act on them."""
        log = self._config.state_dir / "compute.log"
        return await run_job(self.compute, job, "compute", log)


async def try_device(
    run: RunConfig, config: NodeConfig, *, kills: Callable[[Callable[[], None]], None] | None = None
) -> dict[str, Any]:
    """Return the device that a node here would compute on, and its free memory.

    A compute process starts, tries the device, and ends.

    Args:
        run: The run. Nothing of it is built.
        config: This host's choices.
        kills: Takes a function that kills the process, for an end on the spot.

    Returns:
        The compute process's reply to `configure`.

    Raises:
        HardwareError: There is no such device, or the compute process can't start.
    """
    arena = ArenaAllocator(ALIGNMENT_BYTES)
    try:
        compute = await ComputeProcess.start(arena, log_path=Path(os.devnull))
        if kills is not None:
            kills(compute.kill)
        try:
            reply = await compute.submit(Configure(described(run, config, Role.RELAY)))
        except JobError as error:
            raise error_of(error) from error
        except ComputeDiedError as error:
            raise HardwareError(
                "the compute process failed to start",
                why=str(error),
                fix="join the run, and read compute.log in the state folder",
                code="E-HW-002",
            ) from error
        finally:
            await compute.close()
    finally:
        arena.close()
    facts: dict[str, Any] = reply.result.facts
    return facts


def described(run: RunConfig, config: NodeConfig, role: Role) -> dict[str, Any]:
    """Return what a compute process needs to know of a run and of this host's choices."""
    servers = run.organisation is Organisation.SERVERS
    tables = asdict(run)
    del tables["name"], tables["protocol"]
    return tables | {
        "is_client": role is Role.CLIENT,
        "steps_on_host": servers and role is Role.RELAY,
        "device": config.device,
        "num_threads": config.num_threads,
        "memory_max_bytes": config.device_memory_max_bytes,
    }


def arena_bytes(run: RunConfig, config: NodeConfig) -> int:
    """Return the most memory that this host shares with its compute process, for tensors."""
    sizes = sizes_of(run)
    model_bytes = tensor_sizes(run).model_bytes
    capacity = config.capacity or CAPACITY_AUTO_MAX
    batch = run.batch.microbatches_per_iteration
    # Members keep tensors for others, and candidates keep averages. No node needs both.
    kept = max(2 * batch * sizes.activation_bytes, _AVERAGES_MAX * model_bytes)
    kept = min(run.protocol.keep_max_bytes, kept)
    if run.audited:
        # What another has got and sent in an iteration, at its auditor.
        kept += min(run.protocol.keep_max_bytes, 4 * batch * sizes.activation_bytes)
    return (64 << 20) + 8 * capacity * sizes.activation_bytes + kept + 8 * model_bytes
