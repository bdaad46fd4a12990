"""`decod doctor`: checks of this host, and of its way to a run, for a volunteer.

    facts (and `doctor_asking`) -> checks (`host_checks`, `network_checks`) -> diagnoses, one a line

Gathering facts is what touches the system and the network. A check is a pure function of facts, and
returns one `Diagnosis`. `examine` has all checks in their order, gathers the facts of each, and
tells its diagnosis at once.
"""

import dataclasses
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from decod.config.node_config import NodeConfig
from decod.daemon.contact import about_join_string
from decod.daemon.node_folder import is_in_use
from decod.daemon.reachability import advertised
from decod.errors import DecodError
from decod.insight.doctor_asking import (
    Answer,
    Inquiry,
    ask_reach,
    ask_run,
    find_node,
    inquiry_by_node,
    inquiry_by_string,
)
from decod.insight.host_checks import (
    Clock,
    Diagnosis,
    TriedDevice,
    check_clock,
    check_device,
    check_disk,
    check_driver,
    check_system,
    check_versions,
    disk_needs_bytes,
    failed_by,
    fine,
    read_driver,
    read_system,
    releases_of,
    tried_device,
    try_disk,
)
from decod.insight.network_checks import (
    HeldPort,
    ResolvedName,
    RunningNode,
    TriedReach,
    check_mtu,
    check_names,
    check_nat,
    check_node,
    check_port,
    check_port_of,
    check_reach,
    check_run,
    held_port,
    is_address,
    resolve,
    way_to,
)
from decod.net.address import split_address
from decod.net.interfaces import own_addresses
from decod.net.join_string import JoinString
from decod.system import clock_synchronised

Tell = Callable[[Diagnosis], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is examined: a node of this host, or one that does not run yet."""

    config: NodeConfig
    join: JoinString | None = None
    """Names the run to ask. None: that of the node on this host, if one runs."""


async def examine(patient: Patient, tell: Tell) -> None:
    """Make all checks. Those that need the answer of another node are left out without it.

    Args:
        patient: What is examined.
        tell: Takes each diagnosis.
    """
    config = patient.config
    node, in_use = find_node(config.state_dir), is_in_use(config.state_dir)
    tell(check_node(node, in_use=in_use))
    tell(check_system(read_system()))
    await _examine_device(config, node, tell)
    target = await _examine_names(patient, node, tell)
    tell(check_mtu(way_to(target)))
    async with AsyncExitStack() as stack:
        held = None
        if node is not None:
            tell(check_port_of(node))
        elif not in_use:
            held = await stack.enter_async_context(
                held_port(config.listen_host, config.listen_port)
            )
            tell(check_port(held.tried))
        answer, reach = await _examine_run(patient, node, held, tell)
    needs_bytes = disk_needs_bytes(None if answer is None else answer.run)
    tell(check_disk(try_disk(config.state_dir), needs_bytes))
    tell(check_clock(_clock(answer)))
    if reach is not None:
        tell(check_reach(reach))
    if answer is not None:
        tell(check_nat(answer.seen, own_addresses(), reach))


async def _examine_device(config: NodeConfig, node: RunningNode | None, tell: Tell) -> None:
    """Check releases, driver and device. A trial would take memory of the device in use."""
    device: TriedDevice | None = None
    driver = read_driver()
    if node is not None and not node.suspended:
        told = fine("device", f"{node.device or 'that of the training script'}, in use by the node")
    else:
        try:
            device = await tried_device(config)
            told = check_device(device, driver)
        except DecodError as error:
            told = failed_by("device", error)
    release = None if node is None else node.release
    tell(check_versions(releases_of(device, release), driver))
    tell(check_driver(driver))
    tell(told)


async def _examine_names(patient: Patient, node: RunningNode | None, tell: Tell) -> str | None:
    """Check names; return the IP address of a node of the run, if one is known."""
    addresses = () if patient.join is None else patient.join.addresses
    hosts = [split_address(address)[0] for address in addresses]
    named = [host for host in hosts if not is_address(host)]
    found = await resolve(named or [socket.gethostname()])
    tell(check_names(found, has_addresses=len(named) < len(hosts), own=not named))
    hosts += [] if node is None else [split_address(other)[0] for other in node.others]
    return _first_address(hosts, found)


def _first_address(hosts: list[str], names: tuple[ResolvedName, ...]) -> str | None:
    """Return the first IP address of some hosts."""
    known = {name.name: name.addresses for name in names}
    found = (
        address
        for host in hosts
        for address in ((host,) if is_address(host) else known.get(host, ()))
    )
    return next(found, None)


async def _examine_run(
    patient: Patient, node: RunningNode | None, held: HeldPort | None, tell: Tell
) -> tuple[Answer | None, TriedReach | None]:
    """Ask a node of the run, and have it dial this host."""
    state_dir = patient.config.state_dir
    try:
        inquiry: Inquiry | None = None
        if patient.join is not None:
            inquiry = await inquiry_by_string(patient.join, state_dir, node)
        elif node is not None:
            inquiry = inquiry_by_node(node, state_dir)
        if inquiry is None or not inquiry.addresses:
            tell(check_run(None, node))
            return None, None
        answer = await ask_run(inquiry)
        reach = await _reach(patient.config, inquiry, answer, node, held)
    except DecodError as error:
        told = error if patient.join is None else about_join_string(error, patient.join)
        tell(failed_by("run", told))
        return None, None
    tell(check_run(answer.seen, node))
    return answer, reach


async def _reach(
    config: NodeConfig,
    inquiry: Inquiry,
    answer: Answer,
    node: RunningNode | None,
    held: HeldPort | None,
) -> TriedReach | None:
    """Return whether another node reaches this host; None if nobody listens here.

    If a node listens, the other one must find that node. If this process does, it is enough that
    the other one connects: it can't find a node.
    """
    if node is not None and node.address and not node.suspended:
        return await ask_reach(answer, inquiry.member, node.address)
    if held is None or not held.port:
        return None
    own = advertised(config, held.port, answer.seen.observed)
    reach = await ask_reach(answer, inquiry.member, own)
    return dataclasses.replace(reach, unreached="") if held.dialled.is_set() else reach


def _clock(answer: Answer | None) -> Clock:
    synchronised = clock_synchronised()
    if answer is None:
        return Clock(synchronised=synchronised)
    return Clock(ahead_s=answer.ahead_s, asked=answer.seen.asked, synchronised=synchronised)
