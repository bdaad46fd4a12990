"""To what a message belongs: that decides when a node may take it in.

Each message derives from one of the classes here. `protocol.core.dispatch` compares the place that
the message names with the node's own.
"""

from decod.ids import AveragingId, Iteration


class OfRun:
    """Taken in whatever iteration and view the node is in."""

    __slots__ = ()


class OfView:
    """Belongs to a version of the view, whatever its iteration."""

    __slots__ = ()
    view_version: int


class OfBatch:
    """Belongs to one iteration."""

    __slots__ = ()
    iteration: Iteration


class OfPath(OfBatch):
    """May rest on a later view than the iteration's first: the microbatch's path was changed."""

    __slots__ = ()
    path_version: int
    """Of the view; 0: of any."""


class OfAveraging:
    """Belongs to one average."""

    __slots__ = ()
    averaging: AveragingId

    @property
    def travels(self) -> bool:
        """Whether the average travels from one iteration to a later one."""
        return getattr(self, "overlapped", False)


def travels_on(message: object, anchor: Iteration) -> bool:
    """Return whether a message means something beyond its iteration.

    Args:
        message: Any.
        anchor: The last iteration that ended with an average.
    """
    if not isinstance(message, OfAveraging) or not message.travels:
        return False
    return message.averaging.iteration == anchor
