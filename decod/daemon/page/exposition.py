"""The metrics of a node, in Prometheus's text format.

Names have base units. No label names a node or a flow, so that the number of series stays small.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from decod.journal.history import RunHistory
from decod.journal.step_metrics import STEP_METRICS
from decod.journal.told_status import mapping_in, number_in, sequence_in
from decod.texts import clean_text

Status = Mapping[str, Any]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TRAINING = ("training", "aggregating")

_GAUGES = (
    ("iteration", None, "iteration", "The last committed iteration."),
    ("loss_nats", None, "loss", "Mean loss over the tokens of that iteration."),
    *((metric.name, None, metric.name, metric.meaning) for metric in STEP_METRICS),
    ("tokens_per_second", None, "tokens_per_s", "Tokens of it, divided by its duration."),
    ("deferred_microbatches", "data", "num_deferred", "Microbatches that are put off at present."),
    ("capacity_microbatches", "node", "capacity", "Microbatches that this node holds at a time."),
    ("checkpoint_iteration", "checkpoint", "iteration", "The leader's newest checkpoint."),
    ("state_fetched_percent", "syncing", "percent", "Of the state that this node is fetching."),
)
"""Gauges: name, part of the status, field in it, and what it means."""

_COUNTERS = (
    ("skipped_microbatches", "data", "num_skipped", "Microbatches never trained on."),
    ("reread_microbatches", "data", "num_reread", "Microbatches trained on again."),
    ("contributed_microbatches", "contributed", "num_microbatches", "Microbatches of this node."),
    ("contributed_tokens", "contributed", "num_tokens", "Tokens that this node has worked on."),
    ("passes", "timing", "num_passes", "Forward and backward passes of this node."),
)

_TIMES = ("compute", "copy", "wait", "transfer", "node_cpu", "node_copy", "node_serialize")
"""Fields of the status's `timing`, without their unit."""


def exposition(status: Status, history: RunHistory) -> bytes:
    """Return a node's metrics. A value that the status does not have is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(_families(status, history)))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    @override
    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(status: Status, history: RunHistory) -> Iterator[Metric]:
    """Yield the metrics, each with its values."""
    info = GaugeMetricFamily("decod_info", "The run and release.", labels=("run", "version"))
    texts = (clean_text(status.get(name, "")) for name in ("run_name", "decod_version"))
    info.add_metric(list(texts), 1)
    yield info
    trains = float(status.get("run_state") in _TRAINING)
    yield GaugeMetricFamily("decod_run_training", "1 if the run trains, otherwise 0.", trains)
    works = float(status.get("state") in _TRAINING)
    yield GaugeMetricFamily("decod_node_training", "1 if this node works, otherwise 0.", works)
    for name, part, field, text in _GAUGES:
        value = number_in(mapping_in(status, part) if part else status, field)
        if value is not None:
            yield GaugeMetricFamily(f"decod_{name}", text, value)
    for name, part, field, text in _COUNTERS:
        if (value := number_in(mapping_in(status, part), field)) is not None:
            yield CounterMetricFamily(f"decod_{name}", text, value)
    yield _members(status)
    events = CounterMetricFamily(
        "decod_member_events", "Members that came, left or were lost.", labels=("kind",)
    )
    counts = {"came": history.num_came, "left": history.num_left, "lost": history.num_lost}
    for kind, count in counts.items():
        events.add_metric([kind], count)
    yield events
    yield _counted(status)
    yield _times(status)


def _members(status: Status) -> Metric:
    members = GaugeMetricFamily("decod_members", "Members.", labels=("stage", "state"))
    for index, stage in enumerate(sequence_in(status, "stages")):
        states = Counter(clean_text(node.get("state")) for node in sequence_in(stage, "nodes"))
        for state, count in states.items():
            members.add_metric([str(index), state], count)
    return members


def _counted(status: Status) -> Metric:
    messages = CounterMetricFamily(
        "decod_messages", "Messages refused, malformed or dropped.", labels=("kind",)
    )
    counters = mapping_in(status, "counters")
    for kind in counters:
        if (value := number_in(counters, kind)) is not None:
            messages.add_metric([clean_text(kind)], value)
    return messages


def _times(status: Status) -> Metric:
    spent = CounterMetricFamily("decod_time_seconds", "Where time goes.", labels=("part",))
    timing = mapping_in(status, "timing")
    for part in _TIMES:
        if (value := number_in(timing, f"{part}_s")) is not None:
            spent.add_metric([part], value)
    return spent
