"""What a node's links carry in the draft, and how its two ends agree on that."""

from collections.abc import Callable
from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages.routing_messages import DraftUnits


@dataclass(slots=True)
class DraftLink:
    """One direction of the link to one neighbour."""

    units: int = 0
    version: int = 0
    """Changes so far. Both ends count them, so what was said before a change is known as stale."""
    peer_units: int | None = 0
    """What the other end says it carries; None: it has not spoken."""
    reserved: int = 0
    """Units that a change under way may take from it."""

    @property
    def agreed(self) -> bool:
        return self.peer_units == self.units

    @property
    def available(self) -> int:
        return self.units - self.reserved if self.agreed else 0

    def grow(self, units: int) -> None:
        """Add units (or take them away) in a change that the other end carries out too.

        Ends that had not agreed before do not agree now.
        """
        self.units += units
        if self.peer_units is not None:
            self.peer_units += units
        self.version += 1


@dataclass(slots=True)
class DraftLinks:
    """All links of one node, by direction."""

    outward: dict[NodeId, DraftLink] = field(default_factory=dict)
    inward: dict[NodeId, DraftLink] = field(default_factory=dict)

    def side(self, *, outward: bool) -> dict[NodeId, DraftLink]:
        return self.outward if outward else self.inward

    @property
    def num_out(self) -> int:
        return sum([link.units for link in self.outward.values()])

    @property
    def num_in(self) -> int:
        return sum([link.units for link in self.inward.values()])

    @property
    def agreed(self) -> bool:
        return all(link.agreed for side in (self.outward, self.inward) for link in side.values())

    def said(self, sender: NodeId, message: DraftUnits, *, busy: bool) -> bool:
        """Take in the other end's number. Returns whether it should be told this end's at once.

        A node that has promised to take part in a change (`busy`) lowers nothing meanwhile: the
        promise may rest on it. While the two differ each says its number once a round, and not in
        answer to the other's, or they would go on and on.
        """
        link = self.side(outward=not message.outward).get(sender)
        if link is None or message.link_version != link.version:
            return False
        if link.peer_units is None or message.units < link.peer_units:
            link.peer_units = message.units
        if not busy:
            link.units = min(link.units, link.peer_units)
        return link.agreed and not message.agreed

    def lower(
        self, side: dict[NodeId, DraftLink], target: int, cost: Callable[[NodeId], float]
    ) -> None:
        """Let go of units of one side until it has no more than `target`; dearest links first."""
        excess = sum(link.units for link in side.values()) - target
        for _, peer in sorted(((-cost(peer), peer) for peer in side) if excess > 0 else ()):
            dropped = min(max(excess, 0), side[peer].units)
            side[peer].units -= dropped
            excess -= dropped

    def statements(self, view_version: int) -> list[Effect]:
        """Tell the other end of each link on which the two do not agree yet."""
        return [
            self.statement(view_version, peer, outward=outward)
            for outward in (False, True)
            for peer, link in self.side(outward=outward).items()
            if not link.agreed
        ]

    def statement(self, view_version: int, peer: NodeId, *, outward: bool) -> Effect:
        link = self.side(outward=outward)[peer]
        return Send(peer, DraftUnits(view_version, outward, link.version, link.units, link.agreed))
