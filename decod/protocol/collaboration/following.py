"""Whom a peer follows, and who is the next if that one is lost."""

from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.protocol.core.messages.round_messages import Height, PeerEntry, Roll, Standing


@dataclass(slots=True)
class Following:
    """A peer's knowledge of its coordinator."""

    coordinator: NodeId
    roll: Roll
    heard_s: float
    """When the coordinator has last shown that it lives."""
    height: Height
    """The run's, as far as it is known here."""
    lost: set[NodeId] = field(default_factory=set)
    """Coordinators that were silent, since one was heard."""
    standing: Standing | None = None
    standing_s: float = 0.0

    @property
    def term(self) -> int:
        return self.roll.term

    def entry(self, node: NodeId) -> PeerEntry | None:
        """Return what the coordinator says of a peer; None if it does not know it."""
        return next((each for each in self.roll.peers if each.node_id == node), None)

    def said(self, now_s: float, standing: Standing) -> None:
        """The coordinator has told how far the round is."""
        self.heard_s, self.standing, self.standing_s = now_s, standing, now_s
        self.height = standing.height
        self.lost.clear()

    def closing_in_s(self, now_s: float, target: int) -> float | None:
        """Return in how many seconds the batch is full, as it seems. None: it is not known."""
        standing = self.standing
        if standing is None or standing.averaging or standing.samples_per_s <= 0:
            return None
        since_s = now_s - self.standing_s
        missing = target - standing.num_samples - since_s * standing.samples_per_s
        return max(0.0, missing / standing.samples_per_s)

    def successor(self) -> NodeId | None:
        """Return who coordinates if the coordinator is lost: the oldest that has the run's state.

        None: the coordinator knew of nobody else.
        """
        gone = {*self.lost, self.coordinator}
        return next((p.node_id for p in self.roll.peers if p.level and p.node_id not in gone), None)
