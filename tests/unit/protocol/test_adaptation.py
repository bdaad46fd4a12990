"""Rank, format and number of iterations follow the averages and the links, within their start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.compression.plan import Method
from decod.protocol.core.average_spec import WHOLE, AverageFormat, AverageSpec
from decod.protocol.leadership.sync_schedule import WINDOW, Adaptation, OuterStepFacts
from decod.run.training_config import Adapt, SyncConfig, SyncMethod

FINE, COARSE = AverageSpec(bits=16), AverageSpec(rank=16)
FORMATS = (
    AverageFormat(FINE, 400_000),
    AverageFormat(WHOLE, 100_000),
    AverageFormat(COARSE, 25_000),
)


def adaptation(adapt: Adapt, *, every: int = 100, num_fragments: int = 1) -> Adaptation:
    sync = SyncConfig(
        method=SyncMethod.DILOCO,
        every=every,
        fragments=num_fragments,
        overlap=True,
        compression=Method.LOWRANK,
        rank=64,
        adapt=adapt,
    )
    return Adaptation(sync, FORMATS if adapt is Adapt.LINKS else ())


def step(made: Adaptation, effective_rank: float = 0.0, rate: float = 0.0) -> None:
    """Take an outer step. `rate`: seconds a byte. An iteration takes a second."""
    sizes = {each.spec: each.num_bytes for each in FORMATS}
    travel_s = rate * sizes.get(made.spec, 0)
    made.stepped(made.spec, OuterStepFacts(effective_rank, travel_s, iteration_s=1.0))


def test_rank_and_h_follow_the_effective_rank_over_a_window() -> None:
    made = adaptation(Adapt.RANK)
    for _ in range(WINDOW):
        step(made, 40.0)
    assert (made.spec, made.every) == (WHOLE, 100)
    for _ in range(WINDOW):
        step(made, 20.0)
    assert (made.spec.rank, made.every) == (32, 50)


def test_one_odd_average_moves_the_rank_by_a_fifth_of_it() -> None:
    made = adaptation(Adapt.RANK)
    for _ in range(WINDOW):
        step(made, 40.0)
    step(made, 20.0)
    assert (made.spec.rank, made.every) == (58, 90)


@given(st.lists(st.floats(0, 1e4), max_size=40), st.lists(st.floats(0, 1), max_size=40))
def test_start_values_are_never_exceeded(ranks: list[float], rates: list[float]) -> None:
    for adapt in Adapt:
        made = adaptation(adapt)
        for rank, rate in zip(ranks, rates, strict=False):
            step(made, rank, rate)
            assert 1 <= made.every <= 100
            assert 0 <= made.spec.rank <= 64


def test_nothing_adapts_if_it_is_off() -> None:
    made = adaptation(Adapt.OFF)
    for rank in range(20, 1, -1):
        step(made, float(rank), 1.0)
    assert (made.spec, made.every) == (WHOLE, 100)


@pytest.mark.parametrize(
    ("rate", "spec", "every"),
    [
        (1e-3, COARSE, 28),  # 25 s of 28
        (8.9e-4, WHOLE, 99),  # 89 s of 99
        (2e-4, FINE, 89),  # 80 s of 89
        (1e-6, FINE, 25),  # 0.4 s: averages are not made more than four times as often
        (1.0, COARSE, 100),  # Nothing fits.
    ],
)
def test_averages_travel_as_finely_and_as_often_as_they_arrive_in_time(
    rate: float, spec: AverageSpec, every: int
) -> None:
    made = adaptation(Adapt.LINKS)
    for _ in range(3):
        step(made, rate=rate)
    assert (made.spec, made.every) == (spec, every)


def test_fragments_share_the_time_between_two_averages_of_the_same_one() -> None:
    made = adaptation(Adapt.LINKS, num_fragments=4)
    for _ in range(3):
        step(made, rate=1e-4)
    assert (made.spec, made.every, made.interval) == (WHOLE, 48, 12)  # 10 s of 12


def test_another_leader_goes_on_from_what_was_chosen() -> None:
    made = adaptation(Adapt.RANK)
    made.resume(AverageSpec(rank=32), 50)
    for _ in range(WINDOW):
        step(made, 17.0)
    assert (made.spec.rank, made.every) == (32, 50)
    for _ in range(WINDOW):
        step(made, 8.5)
    assert (made.spec.rank, made.every) == (16, 25)
