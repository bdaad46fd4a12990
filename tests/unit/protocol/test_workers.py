"""Whom a server gives the next microbatch."""

from decod.ids import NodeId
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.server_messages import Offer
from decod.protocol.strategy.servers.workers import WorkerTable
from tests.unit.protocol.cast import B1A, C1A, C1B, F1A, ITERATION, context_of, mb, view_of


class Table(WorkerTable):
    """The table of f1a, to which an activation takes so long from everybody else."""

    def __init__(self, *, transfer_s: float = 1.0) -> None:
        context = context_of(F1A, view_of("d0", "f1a", "b1a", "c1a", "c1b"))
        context.links = LinkTable(activation_size_bytes=1_000_000, compute_s=1.0)
        for node in (C1A, C1B, B1A):
            rate = 1_000_000 / transfer_s
            context.links.measured(node, latency_s=0.0, bandwidth_bytes_per_s=rate)
        super().__init__(context)

    def offer(
        self,
        node: NodeId,
        window: int,
        pass_s: float,
        *,
        idle: bool = False,
        num_servers: int = 1,
    ) -> None:
        self.offered(node, Offer(ITERATION, 1, window, pass_s, idle=idle), num_servers)


# --- who has enough -------------------------------------------------------------------------------


def test_a_microbatch_that_nobody_may_have_does_not_hold_up_the_next() -> None:
    workers = Table()
    workers.offer(C1A, 4, 1.0)
    assert workers.choose([(mb(0), {C1A}), (mb(1), set())]) == [(mb(1), C1A)]
