"""Which question an operator asks of a node, and its answer.

`why_evidence` reads what the node has recorded. `why_idle`, `why_slow` and `why_removed` answer one
question each, and are pure functions of these records. An answer never guesses: if the records
don't tell, it says so.
"""

from collections.abc import Callable, Sequence

from decod.errors import ConfigError
from decod.insight.why_evidence import Explanation, NodeRecords, WhyQuestion
from decod.insight.why_idle import why_idle
from decod.insight.why_removed import why_removed
from decod.insight.why_slow import why_slow
from decod.journal.records import Mode

_ANSWERS: dict[WhyQuestion, Callable[[NodeRecords], Explanation]] = {
    WhyQuestion.IDLE: why_idle,
    WhyQuestion.SLOW: why_slow,
    WhyQuestion.REMOVED: why_removed,
}


def answers_of(records: NodeRecords, question: WhyQuestion | None = None) -> Sequence[Explanation]:
    """Return the answer to a question.

    Args:
        records: Of the node.
        question: The question. None: all questions that apply now, which may be none.

    Raises:
        ConfigError: The node is in a collaborative run, which these questions are not for
            (E-RUN-048).
    """
    status, rounds = records.status, records.rounds
    if (status is not None and "collaboration" in status) or (
        rounds is not None and rounds.mode is Mode.OPTIMIZER
    ):
        raise ConfigError(
            f"the node in {records.state_dir} belongs to a training script",
            why="its rounds have no stages and flows, about which these questions are",
            fix="decod optimizer status, or decod analyse, with that folder",
            code="E-RUN-048",
        )
    if question is not None:
        return (_ANSWERS[question](records),)
    return tuple(each for answer in _ANSWERS.values() if (each := answer(records)).applies)
