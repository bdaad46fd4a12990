"""Parts of a node that take several of its others to make."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from decod.config.node import NodeConfig
from decod.daemon.block_source import BlockSource, FolderSource, StoreSource
from decod.daemon.data_supply import DataSupply
from decod.daemon.device import HostDevice
from decod.daemon.disk_states import DiskStates
from decod.daemon.gateway import Gateway
from decod.daemon.host import Host
from decod.daemon.operator_requests import OperatorRequests
from decod.daemon.run_facts import RunPart
from decod.daemon.succession import RunContacts
from decod.daemon.work import WorkLedger
from decod.data.dataset import Dataset
from decod.driver.compute import Compute
from decod.driver.handle import CoreHandle
from decod.membership.registrar import Registrar
from decod.membership.tokens import Tokens
from decod.net.dht import Dht, DhtPorts
from decod.net.limits import LIMITS
from decod.net.server import DataServices, PeerServer
from decod.protocol.core.view import Role
from decod.train.checkpoint.room import DiskRoom
from decod.train.checkpoint.states import StateStore
from decod.train.checkpoint.store import run_folder
from decod.wall_clock import wall_clock


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
    )


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
    part: RunPart, gateway: Gateway, host: Host, services: DataServices | None
) -> PeerServer:
    """Return the server of a node's calls."""
    return PeerServer(
        part.membership,
        part.run_id,
        gateway,
        limits=dataclasses.replace(LIMITS, connections_max=host.files.connections_max),
        watch=gateway.watch,
        services=services,
    )


def dht_of(part: RunPart, contacts: RunContacts, server: PeerServer) -> Dht:
    """Return a node's part of the DHT."""
    bans, counters = part.membership.bans, server.counters
    ports = DhtPorts(
        clock=part.clock, known=contacts.admitting, allowed=bans.allowed, counters=counters
    )
    return Dht(part.membership, part.run_id, ports)
