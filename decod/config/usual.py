"""The optimizer's settings that a run file leaves out, as the field chooses them.

They depend on each other and on how long the run is, so no key has a constant default: a short
warm-up, a cosine from there to the run's last iteration if that is known, and clipping at 1.0.
"""

from collections.abc import Mapping
from typing import Any

from decod.run.training_config import Schedule, SyncMethod

WARMUP_MAX, WARMUP_UNKNOWN = 2000, 100
_WARMUP_SHARE = 50
"""The warm-up of a run of known length is one in so many iterations, up to `WARMUP_MAX`."""
LR_MIN_RATIO = 0.1
CLIP_NORM = 1.0

USUAL_KEYS = ("warmup_iterations", "schedule", "decay_iterations", "lr_min_ratio", "clip_norm")
"""Keys of `[optimizer]` that `with_usual` adds."""


def with_usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run file with the optimizer's settings that it leaves out.

    What is of a wrong type stays as it is: the reader of the file says so.

    Args:
        values: Of the file, by section and key.
    """
    given, length = values.get("optimizer", {}), values.get("num_iterations", 0)
    if not isinstance(given, dict) or type(length) is not int:
        return dict(values)
    decay = given.get("decay_iterations", length)
    if type(decay) is not int or type(given.get("warmup_iterations", 0)) is not int:
        return dict(values)
    usual_warmup = min(WARMUP_MAX, decay // _WARMUP_SHARE) if decay else WARMUP_UNKNOWN
    warmup = given.get("warmup_iterations", usual_warmup)
    falls = Schedule.COSINE if decay > warmup else Schedule.CONSTANT
    schedule = given.get("schedule", falls.value)
    found = {
        "warmup_iterations": warmup,
        "schedule": schedule,
        "decay_iterations": 0 if schedule == Schedule.CONSTANT else decay,
        "lr_min_ratio": LR_MIN_RATIO,
        "clip_norm": 0.0 if _is_compressed(values.get("sync")) else CLIP_NORM,
    }
    return {**values, "optimizer": {**found, **given}}


def _is_compressed(sync: object) -> bool:
    """Whether gradients travel compressed. Then their norm is not known."""
    if not isinstance(sync, dict):
        return False
    steps_locally = sync.get("method", SyncMethod.GRADIENTS.value) != SyncMethod.GRADIENTS
    return not steps_locally and bool(sync.get("compression", "none") != "none")
