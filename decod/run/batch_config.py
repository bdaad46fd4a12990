"""Batch settings that all members must share."""

from dataclasses import dataclass

from decod.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Shape of one iteration's batch."""

    sequence_length: int = 256
    """Tokens that a sequence is trained on; one more is read for the last target. At least 2."""
    microbatch_size: int = 4
    """Sequences in a microbatch. Raise it when devices sit idle, lower it when memory runs out."""
    num_microbatches: int = 8
    """Microbatches that each data node injects in an iteration."""
    num_data_nodes: int = 1
    """How many data nodes the run can have; each has an ordinal below this number, and with it
    its own share of every batch."""

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "num_microbatches", "num_data_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"batch.{name} is {getattr(self, name)}",
                    why="a batch holds at least one of each",
                    fix="give a number of at least 1",
                )
        if self.sequence_length < 2:
            raise ConfigError(
                f"batch.sequence_length is {self.sequence_length}",
                why="a sequence must hold at least two tokens to predict anything",
                fix="give at least 2, usually 256 or more",
            )

    def require_devices(self, num_devices: int) -> None:
        """Check that so many devices can divide a microbatch.

        Raises:
            ConfigError: There are more devices than sequences (E-CFG-021).
        """
        num_rows = self.microbatch_size
        if num_devices > num_rows:
            raise ConfigError(
                f"{num_devices} devices for microbatches of {num_rows} sequences",
                why="a device computes at least one sequence of every microbatch",
                fix=f"name {num_rows} devices at most and run another node on the others, or ask "
                "the organiser for a larger batch.microbatch_size",
                code="E-CFG-021",
            )

    @property
    def tokens_per_microbatch(self) -> int:
        return self.sequence_length * self.microbatch_size

    @property
    def microbatches_per_iteration(self) -> int:
        """Of a whole batch, from all data nodes that the run can have."""
        return self.num_microbatches * self.num_data_nodes

    @property
    def tokens_per_iteration(self) -> int:
        """Of a whole batch."""
        return self.tokens_per_microbatch * self.microbatches_per_iteration
