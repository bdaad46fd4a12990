"""States of simulated stages, as they travel and lie on disks."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedState:
    """Parameters and optimizer state of a stage."""

    stage_index: int
    iteration: int
    parameter_hash: str
    with_optimizer: bool = True
    """The whole state, and not only the parameters."""
    weights: str = ""
    pending: str = ""
    """Of a whole state where steps are late: the parameters, and what the next step comes from."""


def manifest_of(blob: SimulatedState) -> str:
    """Return the description of a state, as JSON."""
    return json.dumps(
        {
            "stage_index": blob.stage_index,
            "iteration": blob.iteration,
            "parameter_hash": blob.parameter_hash,
            "with_optimizer": blob.with_optimizer,
            "weights": blob.weights,
            "pending": blob.pending,
        }
    )
