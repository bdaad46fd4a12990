"""To what a message belongs, which decides when a node may take it in; and how it gets there.

Each message derives from one of the classes here. `protocol.core.dispatch` compares the place that
the message names with the node's own. `decod.protocol.links.forwarding` sends messages by way of a
third member.
"""

from dataclasses import dataclass, field

from decod.ids import AveragingId, Iteration, NodeId
from decod.limits import Number


class WithTensor:
    """Comes with a tensor and travels on the connection for tensors; all others are control."""

    __slots__ = ()


class OfDataNodes:
    """Only data nodes send it, and it does not go down the tree."""

    __slots__ = ()


class OfRun:
    """Taken in whatever iteration and view the node is in."""

    __slots__ = ()


class OfView:
    """Belongs to a version of the view, whatever its iteration."""

    __slots__ = ()
    view_version: int
    """Version of the view that it is true in."""


class OfBatch:
    """Belongs to one iteration."""

    __slots__ = ()
    iteration: Iteration
    """The attempt that it belongs to."""


class OfPath(OfBatch):
    """May rest on a later view than the iteration's first: the microbatch's path was changed."""

    __slots__ = ()
    path_version: int
    """Of the view; 0: of any."""


class OfAveraging:
    """Belongs to one average."""

    __slots__ = ()
    averaging: AveragingId
    """The average that it belongs to."""

    @property
    def travels(self) -> bool:
        """Whether the average travels from one iteration to a later one."""
        return getattr(self, "overlapped", False)


Message = OfRun | OfView | OfBatch | OfAveraging
"""What nodes say to each other. Each dataclass that derives from one of these is a message."""


def travels_on(message: object, anchor: Iteration) -> bool:
    """Return whether a message means something beyond its iteration.

    Args:
        message: Any.
        anchor: The last iteration that ended with an average.
    """
    if not isinstance(message, OfAveraging) or not message.travels:
        return False
    return message.averaging.iteration == anchor


@dataclass(frozen=True, slots=True)
class Way:
    """How a message goes by way of a third member, because its origin can't reach its goal.

    Part of a message's envelope, not of the message.
    """

    origin: NodeId
    """Who says it."""
    goal: NodeId
    """Whom it is for."""
    term: int
    """Of the origin's view."""
    ticket: int
    """Counts the messages of the origin that are passed on, from 1."""
    proof: bytes = field(default=b"", compare=False)
    """That the origin says the message. Whoever drives the core makes and checks it."""


@dataclass(frozen=True, slots=True)
class Passed(OfRun):
    """What became of a message that the sender was to pass on."""

    ticket: Number
    """Which: the ticket of its envelope."""
    arrived: bool
    """Whether its goal has it. Said of tensors; of other messages only if it has not."""
