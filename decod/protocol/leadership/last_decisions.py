"""The decisions that have brought a member to its place in the run."""

from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import Mend, Open


@dataclass(slots=True)
class LastDecisions:
    """What a member tells others who are behind it."""

    opened: Open | None = None
    """The decision that opened the context's iteration; None before the first."""
    mended: Mend | None = None
    """The newest loss that this iteration has survived."""

    def adopt(self, opened: Open) -> None:
        """An iteration has been opened."""
        self.opened, self.mended = opened, None

    def send(self, to: NodeId) -> list[Effect]:
        """Bring another member to the same place."""
        words = (self.opened, self.mended)
        return [Send(to, word) for word in words if word is not None]
