"""How often a run's state is kept. Local to the leader's host: members need not agree on it."""

from dataclasses import dataclass

from decod.errors import ConfigError

EVERY_MAX = 1 << 40
KEEP_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Settings of the leader's checkpoints: how often it writes one, and how many it keeps."""

    every_iterations: int = 100
    """A checkpoint after so many iterations, and when the leader ends; 0 writes none. Each takes
    three times the model's size, for bfloat16 seven times, on the leader's disk, and travels there
    from the other stages: raise it where links are slow and iterations short."""
    keep: int = 3
    """Checkpoints of the run that stay; the oldest go. While one is written there is one more."""

    def __post_init__(self) -> None:
        if not 0 <= self.every_iterations <= EVERY_MAX:
            raise ConfigError(
                f"checkpoint.every_iterations is {self.every_iterations}",
                why="it is a number of iterations, from 0 to 2^40",
                fix="give 0 for no checkpoints, or a number such as 100",
            )
        if not 1 <= self.keep <= KEEP_MAX:
            raise ConfigError(
                f"checkpoint.keep is {self.keep}",
                why="without one there is nothing to go on from, and more than 1000 is a slip",
                fix="give 3, or every_iterations = 0 for no checkpoints",
            )
