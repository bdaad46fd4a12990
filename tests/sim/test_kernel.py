"""Virtual time passes in order, and only by what was planned."""

from hypothesis import given
from hypothesis import strategies as st

from decod.sim.kernel import Kernel, seeded


def test_things_happen_in_the_order_of_time_and_then_of_planning() -> None:
    kernel, seen = Kernel(), list[str]()
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (2.0, "d")):
        kernel.at(time_s, seen.append, name)
    kernel.run(until_s=10.0)
    assert seen == ["a", "b", "c", "d"]
    assert kernel.num_events == 4


@given(st.lists(st.floats(0, 100)))
def test_time_never_goes_back(times_s: list[float]) -> None:
    kernel, seen = Kernel(), list[float]()
    for time_s in times_s:
        # What is planned for the past happens now.
        kernel.at(time_s, lambda: kernel.at(kernel.now_s - 1, lambda: seen.append(kernel.now_s)))
    kernel.run(until_s=100.0)
    assert seen == sorted(times_s)


def test_a_run_ends_at_its_limit_and_can_go_on() -> None:
    kernel, seen = Kernel(), list[int]()
    kernel.after(1.0, seen.append, 1)
    kernel.after(3.0, seen.append, 3)
    assert not kernel.run(until_s=2.0)
    assert seen == [1]
    assert kernel.run(until_s=5.0, done=lambda: 3 in seen)


def test_generators_of_different_purposes_are_independent_and_repeatable() -> None:
    first = [seeded(7, "link", 1, 2).random() for _ in range(2)]
    assert first[0] == first[1]
    assert first[0] != seeded(7, "link", 2, 1).random()
    assert first[0] != seeded(8, "link", 1, 2).random()
