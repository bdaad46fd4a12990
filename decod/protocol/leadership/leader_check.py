"""Asks the leader whether it lives, on behalf of those who want to know."""

from itertools import count

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import Ping
from decod.protocol.core.messages.election_messages import Canvass, CanvassAnswer


class LeaderCheck:
    """One member's questions to its leader.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self.by_s: float | None = None
        """Until when the leader may answer; None: it is not being asked."""
        self._context = context
        self._nonces = count(1)
        self._nonce = 0
        self._askers: dict[NodeId, Canvass] = {}
        self._silent_until_s: float | None = None
        """The leader has not answered: until then it is not asked anew."""

    def reset(self) -> None:
        """Nobody wants to know any more, or there is something new to know."""
        self.by_s = self._silent_until_s = None
        self._askers.clear()

    def heard(self) -> None:
        """The leader lives."""
        self._silent_until_s = None

    def ask(self, now_s: float, sender: NodeId, question: Canvass) -> list[Effect]:
        """Ask the leader; or answer at once what has just been found."""
        if self._silent_until_s is not None and now_s < self._silent_until_s:
            return [answer_to(sender, question, silent=True)]
        if self.by_s is None:
            self._nonce = next(self._nonces)
            self.by_s = now_s + self._patience_s
        self._askers[sender] = question
        return [Send(self._context.view.leader, Ping(self._nonce))]

    def answered(self, sender: NodeId, nonce: int) -> list[Effect]:
        """A pong has come."""
        ours = sender == self._context.view.leader and nonce == self._nonce
        return self._conclude(silent=False) if ours else []

    def unreachable(self, now_s: float, node: NodeId) -> list[Effect]:
        """A ping could not be delivered."""
        return self.silent(now_s) if node == self._context.view.leader else []

    def silent(self, now_s: float) -> list[Effect]:
        """The leader does not answer."""
        effects = self._conclude(silent=True)
        self._silent_until_s = now_s + self._patience_s
        return effects

    @property
    def _patience_s(self) -> float:
        return self._context.run.protocol.election_timeout_s / 2

    def _conclude(self, *, silent: bool) -> list[Effect]:
        """Tell all who have asked, once."""
        askers = dict(self._askers)
        self.reset()
        return [answer_to(node, question, silent=silent) for node, question in askers.items()]


def answer_to(asker: NodeId, question: Canvass, *, silent: bool) -> Effect:
    """Return what tells a data node whether the leader answers."""
    place = (question.view_term, question.iteration, question.view_version)
    return Send(asker, CanvassAnswer(*place, silent))
