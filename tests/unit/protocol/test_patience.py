"""How long a compute process may stay silent."""

import pytest

from decod.protocol.core.durations import Patience
from decod.run.protocol_config import ProtocolConfig


def patience_of(iteration_timeout_s: float = 300.0, *done: tuple[str, float]) -> Patience:
    """Returns one that has seen jobs of these kinds, which took so long."""
    patience = Patience(ProtocolConfig(iteration_timeout_s=iteration_timeout_s))
    for kind, duration_s in done:
        patience.begin(0.0, kind)
        looked(patience, 0.0, duration_s)
        patience.end(duration_s)
    return patience


def looked(patience: Patience, since_s: float, until_s: float) -> float | None:
    """Looks as often as is asked for; returns when it was too long."""
    now_s = since_s
    while now_s < until_s:
        now_s = min(until_s, now_s + patience.interval_s)
        if patience.look(now_s) is not None:
            return now_s
    return None


@pytest.mark.parametrize(
    ("iteration_timeout_s", "kind", "usual_s", "num_bytes", "limit_s"),
    [
        (300, "forward", 0.1, 0, 60),
        (300, "forward", 12.0, 0, 120),
        (300, "forward", None, 0, 150),
        (300, "load", 1.0, 5_000_000_000, 160),
        (300, "build", 1.0, 0, 600),
        (300, "build", 100.0, 0, 1000),
        (300, "build", None, 0, 600),
        (300, "measure", None, 0, 600),
        (300, "measure", 0.1, 0, 60),
        (20, "forward", 0.1, 0, 5),
        (20, "forward", None, 0, 10),
        (20, "configure", None, 0, 600),
        (1, "forward", None, 0, 5),
        (86_400, "forward", 0.1, 0, 60),
        (86_400, "forward", None, 0, 600),
    ],
)
def test_a_limit_grows_with_what_its_kind_takes_and_what_an_iteration_may(
    iteration_timeout_s: float, kind: str, usual_s: float | None, num_bytes: int, limit_s: float
) -> None:
    patience = patience_of(iteration_timeout_s, *([(kind, usual_s)] if usual_s else []))
    patience.begin(1000.0, kind, num_bytes=num_bytes)
    assert patience.limit_s == pytest.approx(limit_s)
    late_s = looked(patience, 1000.0, 1000.0 + 2 * limit_s)
    assert late_s is not None
    assert limit_s < late_s - 1000.0 <= limit_s + 1.01 * patience.interval_s


@pytest.mark.parametrize(("kind", "late"), [("forward", True), ("embed", False)])
def test_a_job_that_may_wait_for_data_is_never_late(kind: str, *, late: bool) -> None:
    """A block is looked for ten seconds on a disk, and ten minutes in an object store."""
    patience = patience_of(300.0, (kind, 0.1))
    patience.begin(0.0, kind)
    looked(patience, 0.0, 12.0)
    assert patience.is_late(12.0) is late
