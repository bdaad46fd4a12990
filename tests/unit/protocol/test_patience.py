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


def test_the_longest_of_a_kind_counts_and_another_kind_does_not() -> None:
    done = (("forward", 9.0), ("forward", 0.1), ("backward", 30.0), ("forward", 1.0))
    patience = patience_of(300, *done)
    patience.begin(50.0, "forward")
    assert patience.limit_s == pytest.approx(90)


def test_a_refused_job_tells_nothing_of_its_kind() -> None:
    patience = patience_of()
    patience.begin(0.0, "forward")
    patience.end(0.1, done=False)
    patience.begin(1.0, "forward")
    assert patience.limit_s == 150


def test_a_process_with_nothing_to_do_may_be_silent() -> None:
    patience = patience_of(300, ("forward", 1.0))
    assert looked(patience, 1.0, 1e4) is None
    patience.begin(1e4, "forward")
    assert looked(patience, 1e4, 1e4 + 59) is None


def test_time_in_which_the_whole_host_stood_still_does_not_count() -> None:
    """Neither against the process, nor as what its jobs take."""
    patience = patience_of(300, ("forward", 1.0))
    patience.begin(10.0, "forward")
    assert looked(patience, 10.0, 40.0) is None
    assert patience.look(4000.0) is None, "as much as two looks at most"
    assert looked(patience, 4000.0, 4017.0) is None
    patience.end(9000.0)
    patience.begin(9000.0, "forward")
    # Twice as much as between two looks: of 3960 s, and of 4983 s.
    assert patience.limit_s == pytest.approx(10 * (30 + 2 + 17 + 2))


@pytest.mark.parametrize(("usual_s", "late_s"), [(0.1, 4.0), (3.0, 12.0)])
def test_a_job_is_late_long_before_it_is_given_up_but_never_the_first_of_its_kind(
    usual_s: float, late_s: float
) -> None:
    patience = patience_of(300)
    patience.took("forward", usual_s)
    for kind, late in (("forward", True), ("backward", False)):
        patience.begin(0.0, kind)
        assert looked(patience, 0.0, late_s) is None
        assert not patience.is_late(late_s)
        assert looked(patience, late_s, late_s + 1.0) is None
        assert patience.is_late(late_s + 1.0) == late


@pytest.mark.parametrize(("kind", "late"), [("reset", True), ("forward", False)])
def test_the_first_job_of_a_kind_gets_more_time_unless_it_loads_and_compiles_nothing(
    kind: str, *, late: bool
) -> None:
    patience = patience_of(300)
    patience.begin(0.0, kind)
    looked(patience, 0.0, 3.9)
    assert not patience.is_late(3.9)
    assert (looked(patience, 3.9, 100.0) is not None) == late
    assert patience.is_late(100.0) == late
