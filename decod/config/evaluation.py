"""What the leader measures on held-out text. Local: members need not agree on it."""

from dataclasses import dataclass

from decod.errors import ConfigError
from decod.train.checkpoint.store import EVERY_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the leader measures what the model makes of text that it is not trained with."""

    held_out: str = ""
    """Folder of that text, as `decod data prepare` writes it, absolute or as seen from this file,
    or its URL. Empty: nothing is evaluated."""
    every_iterations: int = 100
    """An evaluation after so many iterations; 0 for none. For each, the model travels to the leader
    and is written to its disk."""
    num_sequences: int = 64
    """Sequences of the text that an evaluation reads: always the same ones."""
    device: str = "cpu"
    """Where the leader computes it: `cpu`, `auto` or `cuda:N`. A second copy of the model must fit
    there."""

    def __post_init__(self) -> None:
        if not 0 <= self.every_iterations <= EVERY_MAX:
            raise ConfigError(
                f"evaluation.every_iterations is {self.every_iterations}",
                why="it is a number of iterations, from 0 to 2^40",
                fix="give 0 for no evaluations, or a number such as 100",
            )
        if self.num_sequences < 1:
            raise ConfigError(
                f"evaluation.num_sequences is {self.num_sequences}",
                why="without a sequence there is no loss",
                fix="give at least 1, such as 64",
            )
