"""The routing `gwtf`: the paper's own search (V-C), beside training."""

from random import Random

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.flows.gwtf.search import GwtfSearch
from decod.protocol.flows.position import Position
from decod.protocol.flows.searching import Search, SearchingRouting


class GwtfRouting(SearchingRouting):
    """Request Change and Request Redirect, with annealing, on the flows of Request Flow."""

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
    ) -> GwtfSearch:
        return GwtfSearch(position, view_version=view_version, settler=settler, rng=rng)
