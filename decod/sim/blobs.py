"""States of simulated stages, as they travel and lie on disks."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedState:
    """Parameters and optimizer state of a stage."""

    stage_index: int
    iteration: int
    parameter_hash: str


def manifest_of(blob: SimulatedState) -> str:
    """Return the description of a state, as JSON."""
    return json.dumps(
        {
            "stage_index": blob.stage_index,
            "iteration": blob.iteration,
            "parameter_hash": blob.parameter_hash,
        }
    )
