"""What a member spends on an iteration, by the durations that it is told."""

from decod.protocol.core.durations import ITERATION_MAX_S, IterationTimes, SpentTime


def test_an_iteration_lasts_from_one_commit_to_the_next() -> None:
    spent = SpentTime()
    spent.sent(5.0, 2.0)
    spent.committed(10.0, 7.0)
    assert spent.usual is None, "nobody knows when the first began"
    spent.sent(12.0, 4.0)
    spent.sent(13.0, 2.0)
    spent.committed(20.0, 11.0)
    assert spent.usual == IterationTimes(computing_s=4.0, waiting_s=6.0, sending_s=3.0)


def test_one_iteration_that_was_disturbed_changes_little_and_five_change_all() -> None:
    spent, now_s, computed_s = SpentTime(), 0.0, 0.0
    spent.committed(now_s, computed_s)
    told = []
    for whole_s, busy_s in [(2.0, 1.0)] * 4 + [(50.0, 49.0)] + [(4.0, 3.0)] * 5:
        now_s, computed_s = now_s + whole_s, computed_s + busy_s
        spent.sent(now_s - 0.5, 0.25)
        spent.committed(now_s, computed_s)
        assert spent.usual is not None
        told.append(spent.usual)
    assert {*told[:5]} == {IterationTimes(1.0, 1.0, 0.25)}
    assert told[-1] == IterationTimes(3.0, 1.0, 0.25)


def test_no_number_exceeds_the_iteration_or_what_a_message_may_hold() -> None:
    spent = SpentTime()
    spent.committed(0.0, 0.0)
    spent.committed(1.0, 1.5)  # A job that had begun before.
    assert spent.usual == IterationTimes(computing_s=1.0, waiting_s=0.0, sending_s=0.0)
    for number in (1, 2):
        spent.sent(number * 3e6, 2e6)
        spent.committed(number * 3e6, number * 3e6)
    assert spent.usual == IterationTimes(ITERATION_MAX_S, 0.0, ITERATION_MAX_S)
