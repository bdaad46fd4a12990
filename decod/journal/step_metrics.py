"""The numbers of an optimizer step that people are shown, beside its loss.

A metric of this table is a field of the note `step.committed`, and by that a field of `decod
status`, a column of `iterations.csv`, a gauge of Prometheus, a curve of the trackers, and a number
in the data of the page. A new one takes a row here, its source, and its row in the documents. Its
source is `StageExecutor.metrics`, unless the core knows it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepMetric:
    """One number of a committed step."""

    name: str
    meaning: str
    """For Prometheus."""


STEP_METRICS = (
    StepMetric("gradient_norm", "Norm of its gradient before clipping."),
    StepMetric("learning_rate", "Learning rate of its step."),
)
"""All of them. New ones come last, since they are the last columns of `iterations.csv`."""

STEP_METRIC_NAMES = tuple(metric.name for metric in STEP_METRICS)
