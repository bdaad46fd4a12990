"""What comes of members' doubts about others that live."""

import pytest

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages.membership_messages import TENSOR_REFUSED, TOO_SLOW, Suspect
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.quorum import Quorum
from decod.protocol.leadership.seats import Seats
from decod.protocol.leadership.suspicions import IterationProgress, Suspicions
from tests.unit.protocol.cast import CONFIG, D0, FACTS, R1A, R1B, R2A, R2B, view_of
from tests.unit.protocol.test_admission import STAGED

VIEW = view_of("d0", "r1a", "r1b", "r2a", "r2b")
STANDING = IterationProgress(VIEW, due_s=0.0)


class Leader:
    """Its doubts, and who is told to go."""

    def __init__(self) -> None:
        out = EffectSink[Effect]()
        quorum = Quorum(D0, out)
        quorum.committed(VIEW)
        admission = Admission(STAGED, FACTS, Seats(STAGED.sync, out), out)
        self.suspicions = Suspicions(CONFIG, admission, quorum, out, lambda *_: 0)

    def hear(self, *reports: tuple[NodeId, NodeId, str]) -> set[NodeId]:
        """Take in who doubts whom, and why; return who goes."""
        for sender, node, reason in reports:
            self.suspicions.suspected(1.0, sender, Suspect(node, reason), STANDING)
        return set(self.suspicions.overdue(1.0, VIEW))


def test_a_tensor_that_is_refused_once_is_a_mishap() -> None:
    """Else whoever is refused by one, and waits for another that is slow, looks slow itself."""
    leader = Leader()
    refused, slow = (D0, R1B, TENSOR_REFUSED), (R1B, R1A, TOO_SLOW)
    assert not leader.hear(refused, slow)
    leader.suspicions.committed()
    assert not leader.hear(refused)


@pytest.mark.parametrize("reason", [TENSOR_REFUSED, TOO_SLOW])
def test_who_refuses_tensors_of_several_others_again_and_again_goes(reason: str) -> None:
    leader = Leader()
    reports = [(sender, R1A, reason) for sender in (D0, R2A, R2B)]
    assert leader.hear(*reports, *reports) == {R1A}
