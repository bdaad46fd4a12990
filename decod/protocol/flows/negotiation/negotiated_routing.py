"""The routing `flow`: decod's own search, over a draft that is settled into flows."""

from random import Random

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.flows.negotiation.negotiation import Negotiation
from decod.protocol.flows.position import Position
from decod.protocol.flows.searching import Search, SearchingRouting


class FlowRouting(SearchingRouting):
    """Flows over which an iteration is short. A new view goes on with the draft of the last."""

    @staticmethod
    @override
    def make_search(
        position: Position,
        *,
        view_version: int,
        settler: NodeId,
        compute: ComputeQueue,
        rng: Random,
        previous: Search | None,
    ) -> Negotiation:
        return Negotiation(
            position,
            view_version=view_version,
            settler=settler,
            compute=compute,
            rng=rng,
            previous=previous if isinstance(previous, Negotiation) else None,
        )
