"""What a member spends on an iteration, by the durations that it is told."""

from decod.protocol.core.spent_time import ITERATION_MAX_S, IterationTimes, SpentTime


def test_an_iteration_lasts_from_one_commit_to_the_next() -> None:
    spent = SpentTime()
    spent.sent(5.0, 2.0)
    spent.committed(10.0, 7.0)
    assert spent.last is None, "nobody knows when the first began"
    spent.sent(12.0, 4.0)
    spent.sent(13.0, 2.0)
    spent.committed(20.0, 11.0)
    assert spent.last == IterationTimes(computing_s=4.0, waiting_s=6.0, sending_s=3.0)
    spent.committed(21.0, 11.0)
    assert spent.last == IterationTimes(computing_s=0.0, waiting_s=1.0, sending_s=0.0)


def test_no_number_exceeds_the_iteration_or_what_a_message_may_hold() -> None:
    spent = SpentTime()
    spent.committed(0.0, 0.0)
    spent.committed(1.0, 1.5)  # A job that had begun before.
    assert spent.last == IterationTimes(computing_s=1.0, waiting_s=0.0, sending_s=0.0)
    spent.sent(3e6, 2e6)
    spent.committed(3e6, 2e6)
    assert spent.last == IterationTimes(ITERATION_MAX_S, 0.0, ITERATION_MAX_S)
