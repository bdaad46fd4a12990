"""Where newcomers are sent, and who may admit them, as a peer of a collaborative run knows it."""

from collections.abc import Callable

from decod.net.join_string import ADDRESSES_MAX
from decod.protocol.collaboration.company import Company


class PeerContacts:
    """The addresses of a run's peers.

    Args:
        admits: Whether this node admits newcomers.
        company: Returns what this node's core knows of others; None before it has started.
        own_address: Returns this node's address.
        told: Addresses that this node was given.
    """

    def __init__(
        self,
        *,
        admits: bool,
        company: Callable[[], Company | None],
        own_address: Callable[[], str],
        told: tuple[str, ...],
    ) -> None:
        self._admits, self._company = admits, company
        self._own_address, self._told = own_address, told

    def leads(self) -> bool:
        """Whether this node counts the uses of tokens: each data node counts those of its own."""
        return self._admits

    def leads_elsewhere(self) -> str | None:
        """Return None if this node counts the uses of tokens, and else an empty address."""
        return None if self._admits else ""

    def others(self) -> tuple[str, ...]:
        """Return the addresses of the other peers, the coordinator's first."""
        company, own = self._company(), self._own_address()
        found = () if company is None else company.addresses
        return tuple(address for address in found if address != own)

    def addresses(self, *, others: bool = False) -> tuple[str, ...]:
        """Return addresses that newcomers can ask, this node's first."""
        own = () if others and self.others() else (self._own_address(),)
        return tuple(dict.fromkeys((*own, *self.others())))[:ADDRESSES_MAX]

    def admitting(self) -> tuple[str, ...]:
        """Return addresses of nodes that may renew this node's papers."""
        return tuple(dict.fromkeys((*self._told, *self.others())))
