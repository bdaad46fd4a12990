"""Messages that could not be delivered: tried again as long as they mean something."""

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send, SendTensor
from decod.protocol.core.events import SendFailed
from decod.protocol.core.messages import (
    CatchUp,
    Heartbeat,
    Leave,
    LinkReport,
    Message,
    Open,
)
from decod.protocol.core.messages.decision_messages import ElectionMessage
from decod.protocol.core.messages.scopes import OfAveraging, Passed, travels_on

_RETRY_S = 1.0
"""Pause before an undelivered message is tried again."""


class Outbox:
    """Holds undelivered messages (and their tensors) until they are sent again or dropped."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: list[tuple[float, int, Send | SendTensor]] = []
        """With the instant and the term that each is tried again at."""

    @property
    def deadline_s(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None  # All wait equally long.

    def undelivered(self, now_s: float, event: SendFailed) -> list[Effect]:
        """Keep a message for another try, if its receiver would still care."""
        if self._current(event.to, event.message):
            again: Send | SendTensor = Send(event.to, event.message)
            if event.tensor is not None:
                again = SendTensor(event.to, event.message, event.tensor)
            due_s = now_s + _RETRY_S
            assert not self._waiting or self._waiting[-1][0] <= due_s, "the first is due first"
            self._waiting.append((due_s, self._context.view.term, again))
            return []
        return self._context.tensors.release(event.tensor) if event.tensor is not None else []

    def overdue(self, now_s: float) -> list[Effect]:
        if not self._waiting or self._waiting[0][0] > now_s:
            return []
        due = [(term, effect) for due_s, term, effect in self._waiting if due_s <= now_s]
        self._waiting = [entry for entry in self._waiting if entry[0] > now_s]
        effects: list[Effect] = []
        for term, effect in due:
            same_term = term == self._context.view.term
            if same_term and self._current(effect.to, effect.message):
                effects.append(effect)
            elif isinstance(effect, SendTensor):
                effects += self._context.tensors.release(effect.tensor)
        return effects

    def _current(self, receiver: NodeId, message: Message) -> bool:
        """Whether a message would still mean something to its receiver."""
        if isinstance(message, Open):
            return message.opening.iteration == self._context.iteration
        if isinstance(message, Leave):
            return True
        if isinstance(message, ElectionMessage):
            return False  # An election that has not ended is begun again.
        if isinstance(message, (Heartbeat, LinkReport, CatchUp)):
            return False  # A newer one follows by itself.
        if receiver not in self._context.view:
            return False
        if isinstance(message, Passed):
            return True
        if travels_on(message, self._context.anchor):
            return True
        if isinstance(message, OfAveraging):
            return message.averaging.iteration == self._context.iteration
        if (iteration := getattr(message, "iteration", None)) is not None:
            return bool(iteration == self._context.iteration)
        return getattr(message, "view_version", None) == self._context.view.version
