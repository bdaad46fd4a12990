"""The leader, as a daemon finds it and tells it to others. Each term may have another leader."""

import asyncio
import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from decod.errors import DecodError, MalformedMessageError
from decod.ids import NodeId
from decod.net.dht_record import LEADER
from decod.net.join_string import ADDRESSES_MAX, JoinString
from decod.protocol.core.events import LeaderFound
from decod.wire import validate

if TYPE_CHECKING:
    from decod.daemon.host import Node

RECORD_TTL_S = 300.0

_SEEK_INTERVAL_S = 5.0
"""Pause between two searches for the leader."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownLeader:
    """The leader as this node knows it."""

    node_id: NodeId
    name: str
    address: str
    """Empty if unknown."""
    term: int
    electing: bool
    """The leader is gone or was voted out, and no other has been elected yet."""


def leader_of(node: "Node") -> KnownLeader:
    """Return the leader: from the view if this node is in it, else as it was told."""
    part = node.part
    machine = node.driver.machine if node.driver is not None else None
    view = machine.context.view if machine is not None else None
    node_id = view.leader if view is not None else part.leader
    member = view.by_id.get(node_id) if view is not None else None
    address = member.address if member is not None else ""
    if node_id == node.identity.node_id:
        address = node.address
    elif not address:
        told = node.gateway.client.address_of(node_id)
        address = told or (part.leader_address if node_id == part.leader else "")
    return KnownLeader(
        node_id=node_id,
        name=member.name if member is not None else "",
        address=address,
        term=view.term if view is not None else 0,
        electing=machine is not None and machine.leadership.election.electing,
    )


async def publish_leader(node: "Node") -> None:
    """Publish in the DHT that this node leads. Of two records, the higher term counts."""
    assert node.dht is not None
    term = max(1, leader_of(node).term)
    record = {"node_id": node.identity.node_id, "address": node.address, "term": term}
    await node.dht.publish(LEADER, record, ttl_s=RECORD_TTL_S)


async def publish_terms(node: "Node") -> None:
    """Publish in the DHT whenever this node has been elected. Never returns."""
    while True:
        await node.elected.wait()
        node.elected.clear()
        await publish_leader(node)


def join_string_of(node: "Node", *, others: bool = False) -> str:
    """Return the join string, which names this node and the other data nodes.

    Args:
        node: This node.
        others: Leave out this node itself, if there are other data nodes.
    """
    addresses = [node.address]
    if node.driver is not None:
        view = node.driver.machine.context.view
        addresses += [member.address for member in view.data_nodes]
    if others:
        addresses = [address for address in addresses if address != node.address] or addresses
    part = node.part
    join = JoinString(
        run_id=part.run_id,
        manifest_prefix=part.manifest.sha256[:16],
        addresses=tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX],
    )
    return str(join)


async def seek_successor(node: "Node") -> None:
    """While this node leads without a quorum, look in the DHT for another leader. Never returns.

    The others may have elected one, and may no longer know this node's address to tell it.
    """
    assert node.driver is not None
    while True:
        await asyncio.sleep(_SEEK_INTERVAL_S)
        leader = node.driver.machine.leader
        if leader is None or not leader.quorum.lacking:
            continue
        with suppress(DecodError, MalformedMessageError):
            found = await _leader_in_dht(node)
            if found is not None and not node.driver.stopped.done():
                node.driver.post(LeaderFound(found[0], found[2]))


async def seek_leader(node: "Node") -> None:
    """Until this node is in the run, look in the DHT for another leader than it was told."""
    assert node.driver is not None
    while not node.driver.machine.in_view:
        await asyncio.sleep(_SEEK_INTERVAL_S)
        try:
            found = await _leader_in_dht(node)
        except (DecodError, MalformedMessageError):
            continue
        if found is None or node.driver.stopped.done() or node.driver.machine.in_view:
            continue
        leader, address, term = found
        if leader not in (node.driver.machine.context.view.leader, node.identity.node_id):
            node.gateway.client.set_address(leader, address)
            node.driver.post(LeaderFound(leader, term))


async def _leader_in_dht(node: "Node") -> tuple[NodeId, str, int] | None:
    assert node.dht is not None
    record = await node.dht.lookup(LEADER)
    if record is None:
        return None
    leader = validate.node_id("node_id", record["node_id"])
    return leader, validate.address("address", record["address"]), int(record["term"])
