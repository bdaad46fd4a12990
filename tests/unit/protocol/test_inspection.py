"""What clients return is looked at before it is used."""

import pytest

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.core.effects import Effect
from decod.protocol.core.jobs import Inspect
from decod.protocol.core.messages.membership_messages import NOT_FINITE, Suspect
from decod.protocol.leadership.leader import serves
from decod.protocol.strategy.servers.workers import Inspection
from tests.unit.protocol.cast import B1A, C1A, C1B, D0, F1A, F2A, Heard, mb, notes_of, sent
from tests.unit.protocol.servers_cast import Bench, stage

M = mb(0)


class InspectionBench(Bench):
    """b1a, and what it takes from its workers."""

    def __init__(self) -> None:
        super().__init__(B1A, stage())
        self.taken: list[tuple[NodeId, MicrobatchId]] = []
        self.inspection = Heard(Inspection(self.context, self._take, is_gradient=False))

    def _take(self, worker: NodeId, microbatch: MicrobatchId, result: TensorId) -> None:
        self.taken.append((worker, microbatch))
        self.context.tensors.release(result)

    def come(self, worker: NodeId) -> list[Effect]:
        return self.inspection.came(worker, M, self.new())


LOOK = Inspect(M, is_gradient=False)


def test_what_no_member_sent_is_dropped() -> None:
    bench = InspectionBench()
    bench.lose("c1a")
    bench.come(C1A)
    assert bench.taken == []
    assert bench.num_held == 0


def test_a_client_that_returns_nan_is_named_to_the_leader() -> None:
    bench = InspectionBench()
    bench.come(C1A)
    effects = bench.refuse(LOOK, "it holds nan")
    assert sent(effects) == [(D0, Suspect(C1A, NOT_FINITE))]
    assert notes_of(effects) == ["job.failed", "result.refused"]
    assert bench.taken == []
    assert bench.num_held == 0


@pytest.mark.parametrize(
    ("server", "client", "may"),
    [(B1A, C1A, True), (F1A, C1A, True), (F2A, C1A, False), (B1A, F1A, False), (C1B, C1A, False)],
)
def test_only_servers_of_its_stage_have_a_client_removed(
    server: NodeId, client: NodeId, may: bool
) -> None:
    assert serves(stage(), server, client) is may
