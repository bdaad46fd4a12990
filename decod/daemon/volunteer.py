"""`decod join`: finds the run that a join string names, and gives this host to it."""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from decod.config.node import NodeConfig
from decod.daemon.contact import Contact, find_run, patiently
from decod.daemon.host import Host, Node, RunPart, Say
from decod.daemon.leaving import Leaving, run_until_left
from decod.daemon.manifests import KnownManifests
from decod.daemon.peers import KnownPeers
from decod.daemon.progress_display import ProgressDisplay
from decod.daemon.reachability import require_reachable
from decod.daemon.recent_events import merged
from decod.daemon.rejoining import Rejoining
from decod.daemon.status import without_leader
from decod.daemon.succession import RECORD_TTL_S, leader_of, publish_leader, seek_leader
from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import NodeId
from decod.net.ask import ask_status, hello
from decod.net.dht_record import peer_name
from decod.net.server import HelloRequest
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.view import Role

_STATUS_TIMEOUT_S = 0.3
"""Timeout of asking the leader. After it, the node shows its own status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of `decod join`."""

    join_string: str
    node: NodeConfig
    stage_index: int | None = None
    """The relay stage that the operator demands; None for any."""


def run_join(options: JoinOptions, say: Say) -> int:
    """Train until the run ends or the operator stops it; return the exit code.

    Raises:
        DecodError: The run can't be found, does not take this node, or goes on without it.
    """
    return run_until_left(_run(options, say), say)


async def _run(options: JoinOptions, say: Say) -> int:
    with Leaving(say) as leaving:
        contact = await leaving.unless_asked(patiently(lambda: _seek(options), say))
        with Host(options.node, leaving) as host:
            if (own := host.identity.node_id) == contact.leader:
                seeking = patiently(lambda: _seek(options, own), say)
                contact = await leaving.unless_asked(seeking)
            lives = Rejoining[Contact](host, say, rejoins=options.node.rejoins)
            async with host.tended():
                return await lives.run(contact, lambda found: _live(options, host, found, lives))


async def _seek(options: JoinOptions, own: NodeId | None = None) -> Contact:
    """Find the run, and check that it has the stage that the operator demands.

    With `own`, this node's id, its leader must be another node.
    """
    known = KnownManifests(options.node.state_dir)
    peers = KnownPeers(options.node.state_dir)
    contact = await find_run(options.join_string, known, peers, own)
    stages = contact.manifest.run.stages.num_relay_stages
    if options.stage_index is not None and not 1 <= options.stage_index <= stages:
        raise RejectedError(
            f"--stage {options.stage_index} is not a stage of this run",
            why=f"its relay stages are 1 to {stages}",
            fix="choose one of them, or auto",
            code="E-REJ-006",
        )
    return contact


async def _live(
    options: JoinOptions, host: Host, contact: Contact, lives: Rejoining[Contact]
) -> Stop:
    """Live one life in the run; return how it ended."""
    part = RunPart(
        role=Role.RELAY,
        run_id=contact.run_id,
        manifest=contact.manifest,
        leader=contact.leader,
        leader_address=contact.leader_address,
        stage_index=options.stage_index,
    )
    KnownManifests(options.node.state_dir).keep(contact.manifest)
    async with Node(options.node, part, host, lives.say) as node:
        lives.begins(node)
        node.commands["status"] = lambda _: full_status(node)
        _advertise_observed(node, contact)
        name = options.node.name or host.identity.name
        node.say(f"{name} joins run {contact.manifest.run.name} as {node.address}")
        stop = await take_part(node, contact.addresses)
        await lives.ended(node, stop, lambda: _seek(options, host.identity.node_id))
    return stop


Lead = Callable[[], Awaitable[Stop]]
"""The work of a node that has been elected, until it stops."""


async def take_part(node: Node, contacts: tuple[str, ...], lead: Lead | None = None) -> Stop:
    """Train in a run that another node leads, until the run ends or this node leaves.

    Args:
        node: This node.
        contacts: Addresses of nodes of the run.
        lead: Called if this node is elected; None if it can't be elected.
    """

    async def begin() -> None:
        await require_reachable(node)
        await node.prepare()

    # Not awaited: after much churn, the DHT names many nodes that no longer answer.
    announcing = asyncio.create_task(announce(node, contacts, leads=False))
    try:
        if not await node.unless_drained(begin()):
            return Stop(StopReason.DRAINED, "it had not begun to train")
        return await run_until_stopped(node, lead)
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


def _advertise_observed(node: Node, contact: Contact) -> None:
    """Advertise the address that the first peer saw, unless the operator has given an address."""
    everywhere = node.config.listen_host in ("0.0.0.0", "::")  # noqa: S104
    observed = contact.observed_address
    # A peer on the same host sees a loopback address, which is useless to others.
    useful = bool(observed) and not ipaddress.ip_address(observed).is_loopback
    if everywhere and node.config.advertise is None and useful:
        host, port = observed, node.address.rpartition(":")[2]
        node.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def announce(node: Node, contacts: tuple[str, ...], *, leads: bool) -> None:
    """Introduce this node to the leader, enter the DHT, and publish this node's address there."""
    dht = node.dht
    if not leads:
        await _introduce(node)
    assert dht is not None
    if contacts:
        await dht.bootstrap(contacts)
    record = {"node_id": node.identity.node_id, "address": node.address}
    await dht.publish(peer_name(node.identity.node_id), record, ttl_s=RECORD_TTL_S)
    if leads:
        await publish_leader(node)


async def _introduce(node: Node) -> None:
    """Tell the leader that this node is getting ready, to be told if the run ends meanwhile."""
    request = HelloRequest(
        run_id=node.part.run_id, sender=node.identity.node_id, sender_address=node.address
    )
    with suppress(DecodError):
        await hello(node.part.leader_address, request)
        node.note("node.introduced", address=node.part.leader_address)


async def run_until_stopped(node: Node, lead: Lead | None = None) -> Stop:
    """Wait until the core has stopped. If the daemon is asked to leave, tell the core to leave."""
    assert node.driver is not None
    shown = ProgressDisplay(node)
    drained = asyncio.create_task(node.wishes.wait_leaving())
    elected = asyncio.create_task(node.elected.wait())
    seeking = asyncio.create_task(seek_leader(node))
    ends: list[asyncio.Future[Any]] = [drained, node.driver.stopped, elected]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if elected.done() and lead is not None and not node.driver.stopped.done():
            shown.stop()
            return await lead()
        if not node.driver.stopped.done():
            node.wishes.tell_core()
        stop = await node.wait_stopped()
    finally:
        for task in (drained, elected, seeking):
            task.cancel()
        await asyncio.gather(drained, elected, seeking, return_exceptions=True)
        shown.show_last()
    if stop.reason is StopReason.DRAINED:
        node.say(f"left the run: {stop.detail}")
    elif stop.reason is StopReason.FINISHED:
        node.say(f"the run has ended: {stop.detail}")
    return stop


async def full_status(node: Node) -> dict[str, Any]:
    """Return the leader's status with this node's own parts, or else this node's status."""
    own = node.local_status()
    leader = leader_of(node)
    if leader.node_id == node.identity.node_id or not leader.address:
        return own
    try:
        text = await ask_status(
            leader.address,
            node.part.run_id,
            node.identity.node_id,
            timeout_s=_STATUS_TIMEOUT_S,
        )
        status = json.loads(text)
    except NetworkError:
        return without_leader(node, own)
    except (DecodError, ValueError, RecursionError):
        return own
    if not isinstance(status, dict) or status.get("schema_version") != own["schema_version"]:
        return own
    # Its own flows too: it knows its hops from the first flow on, the leader knows flows later.
    mine = ("node", "state", "flows", "states", "syncing", "counters", "timing", "join_string")
    best = {key: _better(own[key], None if key in mine else status.get(key)) for key in own}
    return best | {"recent": merged(best["recent"], own["recent"])}


def _better(own: Any, told: Any) -> Any:
    """Return the leader's value, unless it is None or of another type than this node's."""
    if told is None or (own is not None and not isinstance(told, type(own))):
        return own
    return told
