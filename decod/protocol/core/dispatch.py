"""Who takes in which message, and when: the one table by which all messages are delivered.

Each kind of message has one receiver. A message that belongs to a later iteration or view than this
node's is kept until the node gets there. A message of an earlier one is dropped, and so is a
message of the node's own iteration or view whose sender is no member.
"""

from collections import deque
from collections.abc import Callable
from typing import get_args

from decod.ids import Iteration
from decod.protocol.core.context import Context
from decod.protocol.core.events import Received
from decod.protocol.core.messages import MESSAGES, Message, RoundMessage
from decod.protocol.core.messages.scopes import OfAveraging, OfPath, OfRun, OfView

Receiver = Callable[[float, Received], None]
"""Takes in a message at an instant."""

_KEPT_MAX = 4096
"""Beyond that the oldest early messages without a tensor are dropped, as if lost on the way."""
_KEPT_OF_ONE_MAX = 256
"""Of one sender. So none can have those of others dropped."""

KINDS: tuple[type, ...] = tuple(kind for kind in MESSAGES if kind not in get_args(RoundMessage))
"""All kinds of messages of a pipeline run."""


class Dispatch:
    """One node's table of receivers, and the messages that came too early.

    Args:
        context: The node's.
        num_sent: How many microbatches a sender may have for this node at a time. It has no more
            tensors to send early: forward and backward ones, and a few parts of averages.
    """

    def __init__(self, context: Context, num_sent: int) -> None:
        self._context = context
        self._out = context.out
        self._tensors_of_one_max = 2 * num_sent + 8
        self._receivers: dict[type, Receiver] = {}
        self._early: deque[Received] = deque()
        """Messages that wait. Their tensors stay with the driver until they are taken up."""

    def register(self, receiver: Receiver, *kinds: type) -> None:
        """Name who takes in some kinds of messages."""
        for kind in kinds:
            assert kind not in self._receivers, f"{kind.__name__} has two receivers"
            self._receivers[kind] = receiver

    def register_rest(self, receiver: Receiver, *scopes: type) -> None:
        """Name who takes in what has these scopes and no other receiver."""
        rest = (kind for kind in KINDS if kind not in self._receivers)
        self.register(receiver, *(kind for kind in rest if issubclass(kind, scopes)))

    def check(self) -> None:
        """Every kind must have a receiver."""
        missing = [kind.__name__ for kind in KINDS if kind not in self._receivers]
        assert not missing, f"nobody receives {', '.join(missing)}"

    def deliver(self, now_s: float, received: Received) -> None:
        """Hand a message to its receiver, keep it for later, or drop it."""
        message = received.message
        context = self._context
        place = _place_of(message, context.iteration, context.view.version)
        here = (context.iteration, context.view.version)
        known = received.sender in context.view
        receiver = self._receivers.get(type(message))
        if _travels(message) and context.node_id not in context.view:
            self.keep(received)  # Of an iteration that this node may enter with.
        elif place is not None and place > here:
            self.keep(received)
        elif receiver is None or (place is not None and not (place == here and known)):
            # Of a run of another kind, of an earlier iteration or view, or of no member's.
            self._out.free(received.tensor)
        else:
            receiver(now_s, received)

    def drop(self, now_s: float, received: Received) -> None:  # noqa: ARG002 - as a receiver.
        """Let go of a message."""
        self._out.free(received.tensor)

    # --- early messages -----------------------------------------------------------------------

    def keep(self, received: Received) -> None:
        """Keep a message until another iteration or view begins."""
        self._early.append(received)
        own = [each for each in self._early if each.sender == received.sender]
        tensors = [each for each in own if each.tensor is not None]
        if len(tensors) > self._tensors_of_one_max:
            surplus = tensors[0]
        elif len(own) - len(tensors) > _KEPT_OF_ONE_MAX:
            surplus = next(each for each in own if each.tensor is None)
        elif len(words := [each for each in self._early if each.tensor is None]) > _KEPT_MAX:
            surplus = words[0]
        else:
            return
        self._early.remove(surplus)
        self._out.free(surplus.tensor)

    def replay(self, now_s: float) -> None:
        """Take up the early messages, in the order in which they came."""
        early = self._early
        self._early = deque()
        for each in early:
            self.deliver(now_s, each)

    def end(self) -> None:
        """Drop the early messages: the node stops."""
        early = self._early
        self._early = deque()
        for each in early:
            self._out.free(each.tensor)


def _travels(message: Message) -> bool:
    """Whether a message is of an average that travels: it means something in later iterations."""
    return isinstance(message, OfAveraging) and message.travels


def _place_of(
    message: Message, iteration: Iteration, view_version: int
) -> tuple[Iteration, int] | None:
    """Return the iteration and the view that a message belongs to; None: it means something
    anywhere.

    Args:
        message: Whose scope counts.
        iteration: The node's own, for messages of any iteration.
        view_version: The node's own, for messages of any view.
    """
    if isinstance(message, OfRun) or _travels(message):
        return None
    if isinstance(message, OfView):
        return iteration, message.view_version
    if isinstance(message, OfAveraging):
        return message.averaging.iteration, message.averaging.view_version
    if isinstance(message, OfPath):
        return message.iteration, max(message.path_version, view_version)
    return message.iteration, view_version
