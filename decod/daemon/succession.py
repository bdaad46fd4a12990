"""The leader, as a daemon finds it and tells it to others. Each term may have another leader."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from decod.daemon.run_facts import RunPart
from decod.driver.driver import CoreHandle
from decod.ids import NodeId
from decod.net.dht import Dht
from decod.net.dht_record import LEADER, LEADER_TTL_MAX_S
from decod.net.join_string import ADDRESSES_MAX, JoinString
from decod.protocol.core.events import LeaderFound

RECORD_TTL_S = 300
"""Life of a node's own record."""

_SEEK_INTERVAL_S = 5.0
"""Pause between two searches for the leader."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownLeader:
    """The leader as this node knows it."""

    id: NodeId
    name: str
    address: str
    """Empty if unknown."""
    term: int
    electing: bool
    """The leader is gone or was voted out, and no other has been elected yet."""


class Contacts(Protocol):
    """Where newcomers and members are sent, and who may answer them."""

    def leads(self) -> bool:
        """Whether this node leads."""

    def leads_elsewhere(self) -> str | None:
        """Return the leader's address, empty if it is not known; None if this node leads."""

    def addresses(self, *, others: bool = False) -> tuple[str, ...]:
        """Return the addresses of nodes that newcomers can ask, this node's first.

        Args:
            others: Leave out this node itself, if there are others.
        """

    def admitting(self) -> tuple[str, ...]:
        """Return the addresses of the nodes that can renew a membership, the leader first."""


class RunContacts:
    """The leader and the other data nodes, as this node knows them.

    Args:
        part: This node's part in the run.
        own: This node.
        core: Its core. Until it has started, what this node was told counts.
        own_address: Returns this node's address.
        address_of: Returns another node's address, if it is known.
    """

    def __init__(
        self,
        part: RunPart,
        own: NodeId,
        core: CoreHandle,
        own_address: Callable[[], str],
        address_of: Callable[[NodeId], str | None],
    ) -> None:
        self._part, self.own, self._core = part, own, core
        self._own_address, self._address_of = own_address, address_of

    @property
    def own_address(self) -> str:
        return self._own_address()

    def leads(self) -> bool:
        """Whether this node leads."""
        return self.leader().id == self.own

    def leads_elsewhere(self) -> str | None:
        """Return the leader's address, empty if it is not known; None if this node leads."""
        return None if self.leads() else self.leader().address

    def leader(self) -> KnownLeader:
        """Return the leader: from the view if this node is in it, else as it was told."""
        part, facts = self._part, self._core.facts
        view = facts.view if facts is not None else None
        node_id = view.leader if view is not None else part.leader
        member = view.by_id.get(node_id) if view is not None else None
        address = member.address if member is not None else ""
        if node_id == self.own:
            address = self.own_address
        elif not address:
            told = part.leader_address if node_id == part.leader else ""
            address = self._address_of(node_id) or told
        return KnownLeader(
            id=node_id,
            name=member.name if member is not None else "",
            address=address,
            term=view.term if view is not None else 0,
            electing=facts is not None and facts.electing,
        )

    def addresses(self, *, others: bool = False) -> tuple[str, ...]:
        """Return the addresses of this node and the other data nodes, to be asked by newcomers.

        Args:
            others: Leave out this node itself, if there are other data nodes.
        """
        own, facts = self.own_address, self._core.facts
        addresses = [own]
        if facts is not None:
            addresses += [member.address for member in facts.view.data_nodes]
        if others:
            addresses = [address for address in addresses if address != own] or addresses
        return tuple(dict.fromkeys(addresses))[:ADDRESSES_MAX]

    def admitting(self) -> tuple[str, ...]:
        """Return the addresses of the nodes that can renew a membership, the leader first."""
        facts, leader = self._core.facts, self.leader().address
        known = () if facts is None else tuple(m.address for m in facts.view.data_nodes)
        return tuple(dict.fromkeys(a for a in (leader, *known) if a not in ("", self.own_address)))

    def member_string(self) -> str:
        """Return a join string that leads members to the other data nodes. It admits nobody."""
        root = self._part.membership.root
        return str(JoinString(root=root, addresses=self.addresses(others=True)))


async def publish_leader(dht: Dht, contacts: RunContacts) -> None:
    """Publish in the DHT that this node leads. Of two records, the higher term counts."""
    term = max(1, contacts.leader().term)
    record = {"address": contacts.own_address, "term": term}
    await dht.publish(LEADER, record, ttl_s=LEADER_TTL_MAX_S)


async def publish_terms(dht: Dht, contacts: RunContacts, elected: asyncio.Event) -> None:
    """Publish in the DHT whenever this node has been elected. Never returns."""
    while True:
        await elected.wait()
        elected.clear()
        await publish_leader(dht, contacts)


async def seek_successor(dht: Dht, core: CoreHandle) -> None:
    """While this node leads without a quorum, look in the DHT for another leader. Never returns.

    The others may have elected one, and may no longer know this node's address to tell it.
    """
    while True:
        await asyncio.sleep(_SEEK_INTERVAL_S)
        leading = core.leading
        if leading is None or not leading.lacking:
            continue
        found = await _leader_in_dht(dht)
        if found is not None:
            core.post(LeaderFound(found[0], found[2]))


async def seek_leader(
    dht: Dht, core: CoreHandle, set_address: Callable[[NodeId, str], None]
) -> None:
    """Until this node is in the run, look in the DHT for another leader than it was told."""
    facts = core.driver.facts
    while not facts.in_view:
        await asyncio.sleep(_SEEK_INTERVAL_S)
        found = await _leader_in_dht(dht)
        if found is None or not core.runs or facts.in_view:
            continue
        leader, address, term = found
        if leader not in (facts.view.leader, facts.node_id):
            set_address(leader, address)
            core.post(LeaderFound(leader, term))


async def _leader_in_dht(dht: Dht) -> tuple[NodeId, str, int] | None:
    record = await dht.lookup(LEADER)
    if record is None:
        return None
    return record.owner, record.value["address"], record.value["term"]
