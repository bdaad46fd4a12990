"""Rank, format and number of iterations follow the averages and the links, within their start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.compression.plan import Method
from decod.protocol.core.average_spec import AverageFormat, AverageSpec
from decod.protocol.leadership.sync_schedule import WINDOW, Adaptation, OuterStepFacts
from decod.run.training_config import Adapt, SyncConfig, SyncMethod

FULL, HALF = AverageSpec(bits=4), AverageSpec(rank=32, bits=4)
FORMATS = (AverageFormat(FULL, 100_000), AverageFormat(HALF, 50_000))


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


@given(st.lists(st.floats(0, 1e4), max_size=40), st.lists(st.floats(0, 1), max_size=40))
def test_start_values_are_never_exceeded(ranks: list[float], rates: list[float]) -> None:
    for adapt in Adapt:
        made = adaptation(adapt)
        for rank, rate in zip(ranks, rates, strict=False):
            step(made, rank, rate)
            assert 1 <= made.every <= 100
            assert 0 <= made.spec.rank <= 64


def test_another_leader_goes_on_from_what_was_chosen() -> None:
    made = adaptation(Adapt.RANK)
    made.resume(AverageSpec(rank=32))
    for _ in range(WINDOW):
        step(made, 17.0)
    assert (made.spec.rank, made.every) == (32, 50)
    for _ in range(WINDOW):
        step(made, 8.5)
    assert (made.spec.rank, made.every) == (16, 25)


@pytest.mark.parametrize(
    ("travel_s", "spec", "every"),
    [(1.0, FULL, 25), (6.0, FULL, 30), (15.0, FULL, 75), (85.0, FULL, 100), (95.0, HALF, 100)],
)
def test_an_average_takes_a_fifth_of_a_phase_if_it_can(
    travel_s: float, spec: AverageSpec, every: int
) -> None:
    """It takes so many seconds with the full rank. With less, it arrives in half of the time."""
    made = adaptation(Adapt.LINKS)
    assert made.spec == FULL
    for _ in range(2):
        step(made, rate=travel_s / 100_000)
        assert (made.spec, made.every) == (spec, every)
