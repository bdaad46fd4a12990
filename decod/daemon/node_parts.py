"""Parts of a node that take several of its others to make."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.daemon.block_source import BlockSource, FolderSource, StoreSource
from decod.daemon.data_supply import DataSupply
from decod.daemon.device_owner import HostDevice
from decod.daemon.disk_states import DiskStates
from decod.daemon.gateway import Gateway
from decod.daemon.host import Host
from decod.daemon.operator_requests import OperatorRequests
from decod.daemon.run_facts import RunPart
from decod.daemon.shared_parts import store_of
from decod.daemon.stored_chunks import StoredChunks
from decod.daemon.succession import RunContacts
from decod.daemon.work import WorkLedger
from decod.data.dataset import Dataset
from decod.driver.compute import Compute
from decod.driver.driver import CoreHandle
from decod.ids import NodeId
from decod.membership.registrar import Registrar
from decod.membership.tokens import Tokens
from decod.net.dht import Dht, DhtPorts
from decod.net.net_limits import LIMITS
from decod.net.server import DataServices, PeerServer
from decod.net.storing import Sharing
from decod.protocol.core.view import Role
from decod.train.checkpoint.room import DiskRoom
from decod.train.checkpoint.shared import SharedCheckpoints
from decod.train.checkpoint.stage_states import StateStore
from decod.train.checkpoint.store import run_folder


def states_of(
    part: RunPart,
    config: NodeConfig,
    core: CoreHandle,
    gateway: Gateway,
    room: DiskRoom,
    note: Callable[..., None],
) -> DiskStates:
    """Return what keeps states of stages on this host's disk."""
    folder = run_folder(config.state_dir, part.run_id)
    return DiskStates(
        folder,
        post=core.post,
        note=note,
        fetch=gateway.fetch_state,
        store=StateStore(folder.with_name("states"), room=room),
        stored=_stored_chunks(part, config),
    )


def shared_of(part: RunPart, config: NodeConfig) -> SharedCheckpoints | None:
    """Return the run's checkpoints in the store that this node shares; None if it shares none.

    Raises:
        ConfigError: This host has no package for the store (E-CFG-095).
    """
    store = store_of(config)
    return None if store is None else SharedCheckpoints(store, part.run_id)


def _stored_chunks(part: RunPart, config: NodeConfig) -> StoredChunks | None:
    store, start = store_of(config), part.manifest.initial_weights
    return None if store is None or start == "seed" else StoredChunks(store, start)


def sharing_of(
    part: RunPart, config: NodeConfig, contacts: RunContacts, note: Callable[..., None]
) -> Sharing:
    """Return how this node writes its stage's part of a checkpoint when the leader asks."""
    shared = shared_of(part, config)

    def find(sender: NodeId) -> SharedCheckpoints | str | None:
        allowed = shared is None or sender == contacts.leader().id
        return shared if allowed else "only the leader of the run may ask for that"

    def written(stage: int, iteration: int, num_bytes: int) -> None:
        note("part.written", stage=stage, iteration=iteration, num_bytes=num_bytes)

    return Sharing(find, written)


def services_of(
    registrar: Registrar | None, supply: DataSupply | None, work: WorkLedger
) -> DataServices | None:
    """Return what a data node does for others beside training."""
    if registrar is None or supply is None:
        return None
    return DataServices(registrar, supply.read_for_peer, work.receipt_of)


def registrar_of(
    part: RunPart, contacts: RunContacts, note: Callable[..., None]
) -> Registrar | None:
    """Return what admits others; None at a volunteer."""
    membership = part.membership
    if membership.role is not Role.DATA:
        return None
    tokens = Tokens(membership.folder)
    return Registrar(membership, tokens, wall_clock, contacts.leads_elsewhere, note)


def supply_of(
    part: RunPart,
    dataset: Dataset | None,
    core: CoreHandle,
    note: Callable[..., None],
    requests: OperatorRequests,
) -> DataSupply | None:
    """Return what gives the compute process its data; None at a volunteer."""
    if dataset is None:
        return None
    leave = partial(requests.leave, 0.0)
    source: BlockSource = FolderSource(dataset)
    if dataset.is_stored:
        source = StoreSource(
            dataset, part.run.batch, part.run.seed, note=note, clock=time.monotonic
        )
    return DataSupply(source, core, part.run_id, part.membership, note=note, leave=leave)


def compute_of(device: HostDevice, supply: DataSupply | None) -> Compute:
    """Return what takes the core's jobs."""
    return device.compute if supply is None else supply.before(device.compute, device.arena)


def server_of(
    part: RunPart,
    gateway: Gateway,
    host: Host,
    services: DataServices | None,
    sharing: Sharing,
) -> PeerServer:
    """Return the server of a node's calls."""
    server = PeerServer(
        part.membership,
        part.run_id,
        gateway,
        limits=dataclasses.replace(LIMITS, connections_max=host.files.connections_max),
        watch=gateway.watch,
        services=services,
    )
    server.parts.share(sharing)
    return server


def dht_of(part: RunPart, contacts: RunContacts, server: PeerServer) -> Dht:
    """Return a node's part of the DHT."""
    bans, counters = part.membership.bans, server.counters
    ports = DhtPorts(
        clock=part.clock, known=contacts.admitting, allowed=bans.allowed, counters=counters
    )
    return Dht(part.membership, part.run_id, ports)
