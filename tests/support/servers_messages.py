"""Messages of servers and workers: an example of each kind."""

from decod.ids import AveragingId, Iteration, MicrobatchId, NodeId
from decod.protocol.core import messages as m
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Folded,
    Given,
    Holding,
    Missing,
    Offer,
    Revoke,
    Settled,
    Taken,
    Unable,
)


def servers_messages(iteration: Iteration, worker: NodeId) -> list[m.Message]:
    """Return one message of every kind without a tensor."""
    first, second, third = (MicrobatchId(1, 0, index) for index in range(3))
    one, averaging = (iteration, 1, first), AveragingId(iteration, 1)
    return [
        Offer(iteration, 1, 4, 0.5),
        Given(*one, worker),
        Taken(*one, worker),
        Fetch(*one),
        Folded(*one),
        Revoke(*one, 2),
        Unable(*one, "no", 2),
        Missing(*one),
        Holding(averaging, (first,), (second,), (third,)),
        Settled(averaging, 3, 77),
    ]
