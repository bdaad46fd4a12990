"""What a leader does with the state of a whole model, one phase a process, through production code.

The run's core is a stand-in that names an iteration. States come over sockets with TLS from a donor
that reads them from disk. Stage 0 is the leader's own, and lies in its memory or in a file as a
copy of its device's state would.
"""

import asyncio
import json
import math
import sys
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bench.memory import measured
from decod.config.node_config import RESUME_LATEST
from decod.config.schema import Manifest
from decod.daemon.checkpointing import CheckpointPlan, Checkpoints
from decod.daemon.disk_states import InitialStates
from decod.daemon.exporting import export_model
from decod.daemon.resume import Resumed, find_all, find_resumed
from decod.daemon.run_facts import RunPart
from decod.daemon.run_snapshot import SnapshotSources
from decod.driver.arena import StateCopies
from decod.driver.driver import CoreHandle, ServedState
from decod.ids import RunId
from decod.journal.run_progress import RunProgress
from decod.membership.statements import new_charter
from decod.net.donor import StateBlob, StateRequest
from decod.net.download import Donor, DownloadTerms, download
from decod.net.net_limits import Limits
from decod.net.rate_caps import UNLIMITED
from decod.net.server import PeerHandler, PeerServer
from decod.net.storing import PartRequest, Sharing, write_part
from decod.protocol.core.effects import FetchState
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from decod.train.checkpoint.description import (
    CHUNK_SIZE_BYTES,
    Description,
    StateSink,
    cut,
    description_text,
    entry_json,
    hash_tensor,
    parse_description,
    placed,
)
from decod.train.checkpoint.entries import (
    DTYPE_BYTES,
    MASTER_PREFIX,
    StateBytes,
    TensorEntry,
    moments_of,
    size_bytes_of,
    state_tensors,
)
from decod.train.checkpoint.iteration_folders import stage_file
from decod.train.checkpoint.manifest import file_header, packed
from decod.train.checkpoint.places import DiskRoom
from decod.train.checkpoint.shared import SharedCheckpoints, SharedStore, open_store
from decod.train.checkpoint.stage_states import KeptState
from decod.train.checkpoint.store import CheckpointConfig
from tests.support.members import data_node
from tests.unit.protocol.cast import view_of

RUN_ID = RunId("r" * 26)
ITERATION = 5
ME, DONOR = data_node("leader"), data_node("donor")
LIMITS = Limits(states_lent_max=1024, state_streams_max=64)
_BLOCK = CHUNK_SIZE_BYTES // 4
"""Values that are drawn at once."""


def manifest_of(run: RunConfig) -> Manifest:
    """Return the manifest of a run without data."""
    return Manifest(run=run, data_index_sha256="0" * 64, data_vocab_size=run.model.vocab_size)


def own_bytes(run: RunConfig) -> int:
    """Return the size of the state of the leader's own stage."""
    return size_bytes_of(state_tensors(run, 0))


# --- states on disk -------------------------------------------------------------------------------


def make_states(folder: Path, run: RunConfig) -> None:
    """Write a state of random values for every stage, and what its member would say of it."""
    folder.mkdir()
    for index in range(run.stages.num_relay_stages + 1):
        tensors = state_tensors(run, index).items()
        entries = placed(_entry(name, dtype, shape) for name, (dtype, shape) in tensors)
        described, digests = list[object](), list[str]()
        with (folder / stage_file(index)).open("wb") as file:
            file.write(file_header(packed(entries)))
            for entry in entries:
                whole, chunks = hash_tensor(_written(file, _values(entry, run.model.dtype)))
                described.append(entry_json(entry) | {"sha256": whole})
                digests += chunks
        (folder / f"{index}.json").write_text(description_text(described, "".join(digests)))


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, math.prod(shape) * DTYPE_BYTES[dtype], "")


def _written(file: Any, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        file.write(piece)
        yield piece


def _values(entry: TensorEntry, dtype: ModelDtype) -> Iterator[bytes]:
    """Yield a tensor's bytes, chunk by chunk. Parameters are their rounded master weights."""
    name = entry.name.removeprefix(MASTER_PREFIX)
    for offset, size in cut(entry):
        first = (offset - entry.offset) // DTYPE_BYTES[entry.dtype]
        num = size // DTYPE_BYTES[entry.dtype]
        blocks = range(first // _BLOCK, -(-(first + num) // _BLOCK))
        drawn = [np.random.default_rng([zlib.crc32(name.encode()), k]) for k in blocks]
        values = np.concatenate([each.standard_normal(_BLOCK, np.float32) for each in drawn])[:num]
        bits = (np.abs(values) / 50).view(np.uint32)
        if dtype is ModelDtype.BFLOAT16:
            bits &= np.uint32(0xFFFF0000)  # So that rounding changes nothing.
        halves = entry.dtype == ModelDtype.BFLOAT16
        yield (bits >> np.uint32(16)).astype(np.uint16).tobytes() if halves else bits.tobytes()


def kept_state(folder: Path, index: int) -> KeptState:
    text = (folder / f"{index}.json").read_text()
    path = folder / stage_file(index)
    return KeptState.of(path, index, ITERATION, "", parse_description(text))


def _told(description: Description, *, with_optimizer: bool) -> str:
    """Return what a member says of a state, or of its parameters, which come first in the blob."""
    if with_optimizer:
        return description.text
    weights = [each for each in description.entries if not each.name.startswith("optimizer.")]
    num_chunks = sum(1 for entry in weights for _ in cut(entry))
    digests = "".join(chunk.sha256 for chunk in description.chunks[:num_chunks])
    return description_text([entry_json(entry) for entry in weights], digests)


# --- the donor ------------------------------------------------------------------------------------


class _DonorHandler:
    """Gives the states of all relay stages from disk."""

    pace = intake = UNLIMITED
    stopped = False

    def __init__(self, folder: Path, run: RunConfig) -> None:
        indices = range(1, run.stages.num_relay_stages + 1)
        self._states = {index: kept_state(folder, index) for index in indices}

    async def state(self, request: StateRequest) -> StateBlob | str:
        state = self._states[request.stage_index]

        async def read(offset: int, num_bytes: int) -> bytes:  # noqa: ARG001 - a chunk's own.
            return await asyncio.to_thread(state.read, offset)

        told = _told(state.description, with_optimizer=request.with_optimizer)
        return StateBlob(manifest=told, read=read, release=lambda: None)


async def give(folder: Path, run: RunConfig) -> None:
    """Serve states until standard input closes. Print the address first."""
    handler = cast("PeerHandler", _DonorHandler(folder, run))
    server = PeerServer(DONOR, RUN_ID, handler, limits=LIMITS)
    with measured("donor"):
        server.parts.share(Sharing(lambda _: _shared(folder.parent)))
        port = await server.start("127.0.0.1", 0)
        print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0.0)


# --- the leader -----------------------------------------------------------------------------------


class _Leader:
    """What a leader's checkpoints and exports use of its core, its device and its network."""

    def __init__(self, folder: Path, run: RunConfig, address: str) -> None:
        self._folder, self._address = folder, address
        self._copies = StateCopies(folder.parent, DiskRoom(folder.parent))
        members = [f"r{index}a" for index in range(1, run.stages.num_relay_stages + 1)]
        leading = SimpleNamespace(
            view=view_of("d0", *members, num_stages=len(members) + 1),
            committed=ITERATION,
            anchor=ITERATION,
            loss=2.5,
            marks=(),
            origin=None,
            hashes=(),
        )
        core = CoreHandle()
        driver = SimpleNamespace(
            facts=SimpleNamespace(leading=leading),
            stopped=asyncio.get_running_loop().create_future(),
            post=lambda _: None,
            broken=False,
            request_state=self._own_state,
        )
        core.attach(cast("Any", driver))
        self.progress = RunProgress(iteration=ITERATION)
        self.sources = SnapshotSources(
            core=core,
            progress=self.progress,
            fetch=self._fetch,
            write_part=self._write_part,
            load=self._load,
            state_bytes=0,
            device_gone=lambda: False,
            ending=lambda: False,
        )

    async def _own_state(self, stage: int, iteration: int, *, with_optimizer: bool) -> ServedState:
        state = kept_state(self._folder, stage)
        text = _told(state.description, with_optimizer=with_optimizer)
        description = parse_description(text)
        file = self._copies.create(description.num_bytes)
        data: StateBytes = memoryview(bytearray(0 if file else description.num_bytes))
        if file is not None:
            data = file.view
        for chunk in description.chunks:
            data[chunk.offset : chunk.offset + chunk.num_bytes] = state.read(chunk.offset)
        return ServedState(iteration, text, data, file.close if file else lambda: None)

    async def _fetch(self, wanted: FetchState, sink: StateSink, *, with_optimizer: bool) -> str:
        return await fetch(wanted, sink, self._address, with_optimizer=with_optimizer)

    async def _write_part(
        self, wanted: FetchState, folder: str, described: Callable[[Description], None]
    ) -> Description:
        part = PartRequest(state=_request(wanted, with_optimizer=True), folder=folder)
        return await write_part(part, Donor(DONOR.node_id, self._address), described, ME.tls)

    async def _load(self, *_: Any) -> None:
        return None


async def fetch(
    wanted: FetchState, sink: StateSink, address: str, *, with_optimizer: bool = True
) -> str:
    """Fetch a state from the donor at an address. Return its description."""
    request = _request(wanted, with_optimizer=with_optimizer)
    terms = DownloadTerms(limits=LIMITS)
    fetched = await download(request, [Donor(DONOR.node_id, address)], sink, ME.tls, terms)
    return fetched.description.text


def _request(wanted: FetchState, *, with_optimizer: bool) -> StateRequest:
    return StateRequest(
        run_id=RUN_ID,
        sender=ME.node_id,
        stage_index=wanted.stage_index,
        iteration=wanted.iteration,
        with_optimizer=with_optimizer,
    )


def _part(
    run: RunConfig,
    resumed: Resumed | None = None,
) -> RunPart:
    manifest = manifest_of(run)
    if resumed is not None:
        manifest = replace(
            manifest,
            initial_weights=resumed.manifest.sha256,
            start_iteration=resumed.manifest.iteration,
        )
    return RunPart(
        membership=ME,
        run_id=RUN_ID,
        manifest=manifest,
        charter=new_charter(ME, RUN_ID, manifest.to_json()),
        leader=ME.node_id,
        checkpoint_dir=None if resumed is None else resumed.folder,
        checkpoint_chunks={} if resumed is None else resumed.chunks,
    )


async def write_checkpoint(folder: Path, run: RunConfig, address: str, *, shares: bool) -> None:
    """Gather all states from the donor, and write them as a checkpoint.

    Args:
        folder: Contains the states, and the checkpoint in the end.
        run: The run.
        address: The donor's.
        shares: Whether the donor writes its stages itself, into a store.
    """
    leader = _Leader(folder / "given", run, address)
    plan = CheckpointPlan(
        part=_part(run),
        state_dir=folder / "leader",
        config=CheckpointConfig(),
        shared=_shared(folder) if shares else None,
    )
    checkpoints = Checkpoints(
        leader.sources,
        plan,
        asyncio.Lock(),
        note=lambda *_, **__: None,
        on_written=lambda *_: None,
    )
    with measured("checkpoint"):
        await checkpoints.finish()
    if checkpoints.problem is not None:
        raise SystemExit(checkpoints.problem)


def _shared(folder: Path) -> SharedCheckpoints:
    return SharedCheckpoints(store_of(folder), RUN_ID)


def store_of(folder: Path) -> SharedStore:
    return open_store(str(folder / "store"))


async def export(folder: Path, run: RunConfig, address: str) -> None:
    """Export the model of a running leader."""
    leader = _Leader(folder / "given", run, address)
    with measured("export"):
        await export_model(leader.sources, run, folder / "model")


async def resume(folder: Path, run: RunConfig) -> None:
    """Find the checkpoint as `decod leader --resume latest` does, and give each stage its state."""
    with measured("resume"):
        resumed = find_resumed(
            folder / "leader", manifest_of(run), RESUME_LATEST, lambda _: None, store_of(folder)
        )
        states = InitialStates(_part(run, resumed))
        for index in range(1, run.stages.num_relay_stages + 1):
            given = await states.find(index)
            assert isinstance(given, StateBlob), given
            for chunk in parse_description(given.manifest).chunks:
                await given.read(chunk.offset, chunk.num_bytes)


async def build_own(folder: Path, run: RunConfig) -> None:
    """Load the leader's own stage from the checkpoint, as its compute process does."""
    import torch

    from decod.model.shape import stage_shapes
    from decod.train.layout import Layout
    from decod.train.start import CheckpointSource, StateForm, checkpoint_state

    (found,) = find_all(folder / "leader", store_of(folder))
    assert found.manifest is not None
    source = CheckpointSource(found.folder, found.manifest.sha256)
    layout = Layout(stage_shapes(run.model, run.stages, 0))
    with measured("own stage"):
        dtype = getattr(torch, run.model.dtype.value)
        checkpoint_state(source, StateForm(layout, dtype, moments_of(run)))


async def verify(folder: Path, run: RunConfig) -> None:  # noqa: ARG001 - as all phases.
    """Run `decod checkpoint verify`."""
    from decod.cli.checkpoint_command import verify as command

    with measured("verify"), _silent():
        leader, store = str(folder / "leader"), str(store_of(folder))
        places = ["--state-dir", leader, "--checkpoint-store", store]
        command.main(places, standalone_mode=False)


@contextmanager
def _silent() -> Iterator[None]:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        yield


PHASES: dict[str, Callable[[Path, RunConfig], Awaitable[None]]] = {
    "verify": verify,
    "resume": resume,
    "own stage": build_own,
}
"""Phases that need no donor, in their order, after the checkpoint."""
