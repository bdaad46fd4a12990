"""What an iteration of a run asks of its hosts, whatever the organisation.

All layers are alike. Embedding, final norm and head are the *outer* part: data nodes hold it in a
pipeline, and every host holds it where each has the whole model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decod.lab.planner.hosts import TrainingHost, TrainingProblem

WHOLE = "none"
"""The format of averages that are not compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNeeds:
    """What one layer, or the outer part, takes of a host and of its links."""

    wire_bytes: Mapping[str, float]
    """Size of its average by format. `WHOLE` is always there."""
    state_bytes: float
    """Memory for weights, moments, their next values and the gradient."""
    local_state_bytes: float
    """The same where members step by themselves."""
    weights_bytes: float
    """Memory for weights and gradient alone, as a client of servers keeps them."""
    microbatch_bytes: float = 0.0
    """Memory for one microbatch between its passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """The work of one iteration of a run."""

    num_layers: int
    """Of the relays."""
    num_microbatches: int
    """Of all data nodes together. They have equal shares."""
    tokens_per_microbatch: int
    activation_bytes: float
    layer: PartNeeds
    outer: PartNeeds
    outer_layers: float
    """Time of the outer part on one device, in layers. Blocks of data nodes count here, too."""
    delays: Sequence[int] = (0, 1)
    """Iterations by which steps of servers may be late."""
    head_s: float = 0.0
    """Of one microbatch at a data node, forward and backward."""
    step_s: float = 0.0
    """The optimizer's step for one layer."""
    cut: tuple[int, ...] = ()
    """Layers of each stage of a pipeline. Empty: a planner may choose them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of an iteration."""
        return self.num_microbatches * self.tokens_per_microbatch

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats in which averages can travel."""
        return tuple(self.layer.wire_bytes)


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Hosts, links, and the work of a run."""

    base: TrainingProblem
    run: RunWork

    @property
    def hosts(self) -> Sequence[TrainingHost]:
        return self.base.hosts
