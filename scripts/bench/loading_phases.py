"""How a node gets its stage's state, one way a process pair, through production code.

The node process runs the real driver with a stand-in for the core, which builds the stage, has a
state fetched, and loads it. The compute process is the real one. A donor in a process of its own
serves states over sockets with TLS.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.checkpoint_phases import (
    DONOR,
    ITERATION,
    ME,
    RUN_ID,
    fetch,
    kept_state,
    store_of,
)
from bench.memory import forget_peak, peak_bytes, report_peak, resident_bytes
from decod.config.node_config import NodeConfig
from decod.daemon.device_owner import described
from decod.daemon.disk_states import DiskStates, StoredChunks
from decod.driver.arena import ArenaAllocator, Sizes, StateCopies
from decod.driver.compute import ComputeProcess
from decod.driver.driver import DriverPorts, NodeDriver
from decod.files import PieceFile
from decod.model.hf import config_to_hf
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.jobs import Configure
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from decod.train.checkpoint.description import StateSink
from decod.train.checkpoint.iteration_folders import StateInFile, stage_file
from decod.train.checkpoint.manifest import CheckpointManifest, file_header, packed
from decod.train.checkpoint.places import DiskRoom
from decod.train.checkpoint.stage_states import KeptState, StateStore
from decod.train.checkpoint.store import MANIFEST

STAGE = 1
"""The stage that is loaded."""

_PIECE_BYTES = 4 << 20


# --- files ----------------------------------------------------------------------------------------


def write_sources(folder: Path, run: RunConfig) -> None:
    """Lay out the given states as a checkpoint in a store, and their weights as a model folder."""
    given = folder / "given"
    states = [kept_state(given, index) for index in range(run.stages.num_relay_stages + 1)]
    place = Path(str(store_of(folder))) / RUN_ID / f"{ITERATION}-00000000"
    place.mkdir(parents=True)
    for index in range(len(states)):
        (place / stage_file(index)).hardlink_to(given / stage_file(index))
    manifest = CheckpointManifest(
        iteration=ITERATION,
        run_id=RUN_ID,
        created_s=1,
        loss=2.5,
        num_deferred=0,
        settings={},
        stages=tuple(packed(state.description.entries) for state in states),
    )
    (place / MANIFEST).write_bytes(manifest.to_json())
    _write_model(folder / "weights", run, states)


def _write_model(folder: Path, run: RunConfig, states: Sequence[KeptState]) -> None:
    """Write the weights of all stages as a model folder with one file for each stage."""
    folder.mkdir()
    files: dict[str, str] = {}
    for index, state in enumerate(states):
        entries = [e for e in state.description.entries if not e.name.startswith("optimizer.")]
        name = f"model-{index}.safetensors"
        files |= {entry.name: name for entry in entries}
        ends = {entry.offset + entry.num_bytes for entry in entries}
        with (folder / name).open("wb") as file:
            file.write(file_header(packed(tuple(entries))))
            for chunk in state.description.chunks:
                if chunk.offset < max(ends):
                    file.write(state.read(chunk.offset))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config_to_hf(run.model)))


def keep(folder: Path) -> None:
    """Write the state as a node keeps it on its disk."""
    state = kept_state(folder / "given", STAGE)
    entries = state.description.entries
    starts = [state.places[entry.offset][1] for entry in entries]
    with (folder / "given" / stage_file(STAGE)).open("rb") as source:
        data = StateInFile(PieceFile(source.fileno()), entries, starts)
        StateStore(folder / "states").write(STAGE, ITERATION, "", state.description, data)


# --- a stage that is built from files -------------------------------------------------------------


async def _built(folder: Path, run: RunConfig, **sources: str) -> None:
    """Build the stage in a compute process from what the run starts from."""
    compute = await ComputeProcess.start(ArenaAllocator(1 << 20), log_path=folder / "compute.log")
    try:
        fields = described(run, NodeConfig(state_dir=folder, device="cpu"), Role.RELAY)
        await compute.submit(Configure({**fields, **sources}))
        with report_peak("compute", compute.pid):
            built = await compute.submit(jobs.Build(STAGE))
        _tell(built.result.parameter_hash, built.duration_s)
    finally:
        await compute.close()


async def from_checkpoint(folder: Path, run: RunConfig, _: str) -> None:
    """Build the stage from a checkpoint, as a node does that leads a resumed run."""
    place = Path(str(store_of(folder))) / RUN_ID / f"{ITERATION}-00000000"
    digest = json.loads((place / MANIFEST).read_bytes())["sha256"]
    await _built(folder, run, checkpoint_dir=str(place), checkpoint_sha256=digest)


async def from_model(folder: Path, run: RunConfig, _: str) -> None:
    """Build the stage from the folder of a model."""
    await _built(folder, run, init_dir=str(folder / "weights"))


def _tell(hash_: str, duration_s: float) -> None:
    print(json.dumps({"hash": hash_, "seconds": duration_s}), flush=True)


# --- a stage that is fetched ----------------------------------------------------------------------


class _Core:
    """Stands in for the core: builds the stage, has its state fetched, and loads it."""

    deadline_s = None

    def __init__(self, wanted: fx.FetchState, begun: Callable[[], None]) -> None:
        self._wanted, self._begun = wanted, begun
        self.hash = ""
        self.context = SimpleNamespace(node_id=ME.node_id, view=SimpleNamespace(term=0))
        self.strategy, self.leadership = None, SimpleNamespace(election=None)

    def start(self, now_s: float) -> list[fx.Effect]:  # noqa: ARG002 - as all cores.
        return [fx.StartJob(cast("Any", 1), jobs.Build(STAGE))]

    def step(self, now_s: float, event: ev.Event) -> list[fx.Effect]:  # noqa: ARG002
        match event:
            case ev.JobFinished(1):
                self._begun()
                return [self._wanted]
            case ev.StateFetched(_, iteration, text, tensor):
                job = jobs.Load(iteration, (text,))
                return [fx.StartJob(cast("Any", 2), job, (tensor.id,))]
            case ev.JobFinished(2, result):
                self.hash = cast("jobs.Built", result).parameter_hash
                return [fx.Stop(cast("Any", None), "loaded")]
            case _:
                raise AssertionError(event)


class _Transport:
    """Fetches from the donor."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def fetch_state(self, wanted: fx.FetchState, sink: StateSink) -> str:
        return await fetch(wanted, sink, self._address)


async def _fetched(folder: Path, run: RunConfig, address: str, disk: DiskStates | None) -> None:
    arena = ArenaAllocator(4 << 30)
    compute = await ComputeProcess.start(arena, log_path=folder / "compute.log")
    fields = described(run, NodeConfig(state_dir=folder, device="cpu"), Role.RELAY)
    await compute.submit(Configure(fields))
    starts: dict[str, int] = {}
    clock, begun_s = asyncio.get_running_loop().time, 0.0

    def begun() -> None:
        nonlocal begun_s
        begun_s = clock()
        for pid in ("self", str(compute.pid)):
            forget_peak(pid)
            starts[pid] = resident_bytes(pid)

    donors = (ME.node_id, DONOR.node_id) if disk is not None else (DONOR.node_id,)
    core = _Core(fx.FetchState(donors, STAGE, ITERATION, ""), begun)
    ports = DriverPorts(
        transport=cast("Any", _Transport(address)),
        on_note=lambda _: None,
        on_run_complete=lambda _: None,
        planning=cast("Any", None),
        disk=disk,
        copies=StateCopies(folder, DiskRoom(folder)),
    )
    driver = NodeDriver(cast("Any", core), compute, arena, Sizes(0, 4, 4), ports)
    if disk is not None:
        disk.start()
        await disk.searched()
    try:
        driver.start()
        await driver.stopped
        duration_s = clock() - begun_s
        for name, pid in (("node", "self"), ("compute", str(compute.pid))):
            peak = peak_bytes(pid) - starts[pid]
            print(json.dumps({"process": name, "peak_bytes": peak}), flush=True)
        _tell(core.hash, duration_s)
    finally:
        await driver.close()
        await compute.close()
        if disk is not None:
            await disk.close()


async def from_peers(folder: Path, run: RunConfig, address: str) -> None:
    """Fetch the state from a peer."""
    await _fetched(folder, run, address, None)


def _disk(folder: Path, stored: StoredChunks | None, states: str) -> DiskStates:
    return DiskStates(
        folder / "checkpoints",
        post=lambda _: None,
        note=lambda *_, **__: None,
        fetch=cast("Any", None),
        store=StateStore(folder / states),
        stored=stored,
    )


async def from_store(folder: Path, run: RunConfig, address: str) -> None:
    """Fetch the state, which a peer describes, from the store that members share."""
    place = Path(str(store_of(folder))) / RUN_ID / f"{ITERATION}-00000000"
    digest = json.loads((place / MANIFEST).read_bytes())["sha256"]
    disk = _disk(folder, StoredChunks(store_of(folder), digest), "nothing")
    await _fetched(folder, run, address, disk)


async def from_own_disk(folder: Path, run: RunConfig, address: str) -> None:
    """Read the state that this node keeps on its disk."""
    await _fetched(folder, run, address, _disk(folder, None, "states"))


WAYS: dict[str, Callable[[Path, RunConfig, str], Awaitable[None]]] = {
    "a checkpoint": from_checkpoint,
    "a model folder": from_model,
    "peers": from_peers,
    "a checkpoint store": from_store,
    "its own disk": from_own_disk,
}
"""Where the state comes from."""
