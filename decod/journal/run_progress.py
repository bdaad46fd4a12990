"""What a status shows of a node's notes: progress, and recent events that are not routine."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

from decod.ids import iteration_of
from decod.journal.event_specs import event_level, render_note
from decod.journal.journal import JournalEntry
from decod.journal.step_metrics import STEP_METRIC_NAMES

_KEPT_MAX = 8
_KEPT_S = 600.0
"""Older events are only in the log."""

_TOLD_TOO = ("member.leaving", "node.paused", "node.resumed")
"""Orderly events that people wonder about."""

THIS_NODE = "this node"
"""The name that texts use for their own node. Other nodes' status shows its real name instead."""

_NEWEST_ONLY = (
    "state.unkept",
    "checkpoint.failed",
    "data.damaged",
    "data.unreachable",
    "audit_log.failed",
    "vote.failed",
    "addresses.unkept",
)
"""Events that repeat until the operator acts. Only the newest is kept, so that others stay
visible."""


@dataclass(frozen=True, slots=True)
class _RecentEvent:
    at_s: float
    event: str
    text: str


@dataclass(slots=True)
class RecentEvents:
    """The last events that were not routine, the oldest first."""

    named: Callable[[Mapping[str, object]], Mapping[str, object]]
    """Puts names of nodes in place of ids where they are known."""
    _kept: deque[_RecentEvent] = field(default_factory=lambda: deque(maxlen=_KEPT_MAX))

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry."""
        event = entry.event
        if event_level(event) < logging.WARNING and event not in _TOLD_TOO:
            return
        text = render_note(event, self.named(entry.fields))
        if event in _NEWEST_ONLY:
            for earlier in [one for one in self._kept if one.event == event]:
                self._kept.remove(earlier)
        elif self._kept and self._kept[-1].text == text:
            self._kept.pop()
        self._kept.append(_RecentEvent(entry.now_s, event, text))

    def describe(self, now_s: float, *, name: str) -> list[dict[str, Any]]:
        """Return the events of the last 10 minutes as `decod status --json` shows them at any node.

        Args:
            now_s: The time on the clock of the entries.
            name: The name of this node.
        """
        return [
            {
                "age_s": round(now_s - one.at_s, 1),
                "event": one.event,
                "text": one.text.replace(THIS_NODE, name),
            }
            for one in self._kept
            if now_s - one.at_s <= _KEPT_S
        ]


def merged(told: Sequence[Any], own: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the events of another node and this one, the oldest first.

    Each node may know of events that the other can't know.

    Args:
        told: The other node's result of `RecentEvents.describe`. It is unchecked.
        own: This node's result. An event with the same text in both is listed once.
    """
    texts = {one["text"] for one in own}
    others = [one for one in told if _is_happening(one) and one["text"] not in texts]
    return sorted([*others, *own], key=lambda one: -one["age_s"])


def _is_happening(one: Any) -> bool:
    number = isinstance(one, Mapping) and isinstance(one.get("age_s"), int | float)
    return number and isinstance(one.get("text"), str)


_REASONED = frozenset(
    (
        "iteration.aborted",
        "member.lost",
        "member.aside",
        "peer.suspected",
        "state.failed",
        "replay.failed",
        "candidate.refused",
    )
)
"""Events whose reason is shown until the next commit."""

_LOSSES_MAX = 1000
"""Iterations whose loss is remembered, since the run may roll back to one of them."""

NUM_RECENT = 20
"""Iterations that a trend and an estimate look back on."""


@dataclass(slots=True)
class RunProgress:
    """The run's progress, according to a node's notes."""

    iteration: int = 0
    """The last committed iteration."""
    num_iterations: int = 0
    """The iteration with which the run ends. 0: it goes on until it is stopped."""
    loss: float | None = None
    """Loss of that iteration. None before the first, and if this node was not there."""
    metrics: dict[str, float | None] = field(
        default_factory=lambda: dict.fromkeys(STEP_METRIC_NAMES)
    )
    """The step metrics of that iteration, as far as they are known here."""
    tokens_per_s: float | None = None
    message: str = ""
    """The last event since then that was not routine."""
    num_deferred: int = 0
    """At the leader: microbatches that were deferred to the next iteration."""
    on_commit: list[Callable[[], None]] = field(default_factory=list)
    """Called after each commit."""
    on_return: list[Callable[[], None]] = field(default_factory=list)
    """Called when the run has rolled back to `iteration`."""
    on_stage_ending: list[Callable[[], None]] = field(default_factory=list)
    """Called at the leader when the last member of a stage wants to leave."""
    _commits: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT + 1))
    """The newest iterations that this node saw committed, and when."""
    _losses: dict[int, float] = field(default_factory=dict)
    """Losses of the newest iterations that this node saw committed, the oldest first."""

    def loss_of(self, iteration: int) -> float | None:
        """Return an iteration's loss, or None if this node does not know it."""
        return self._losses.get(iteration)

    @property
    def loss_change(self) -> float | None:
        """The last loss less the mean of those before it, of `NUM_RECENT` at most.

        None: this node knows no loss before the last one.
        """
        if self.loss is None or len(self._losses) < 2:
            return None
        return self.loss - fmean(islice(reversed(self._losses.values()), 1, NUM_RECENT + 1))

    @property
    def left_s(self) -> float | None:
        """The time from the last commit to the run's end, at the speed of the last iterations.

        None: it is not known, or the run goes on until it is stopped.
        """
        if not self.num_iterations or len(self._commits) < 2:
            return None
        (first, begin_s), (last, end_s) = self._commits[0], self._commits[-1]
        each_s = (end_s - begin_s) / max(1, last - first)
        return each_s * max(0, self.num_iterations - last)

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry."""
        event, fields, now_s = entry.event, entry.fields, entry.now_s
        if event == "iteration.committed":
            self.num_deferred = int(fields["num_deferred"])
        elif event == "step.committed":
            if self._commits:
                duration_s = now_s - self._commits[-1][1]
                self.tokens_per_s = fields["num_tokens"] / max(1e-9, duration_s)
            self.loss = fields["loss"]
            self.metrics = {name: fields.get(name) for name in STEP_METRIC_NAMES}
            self.iteration = iteration_of(str(fields["iteration"]))
            self._commits.append((self.iteration, now_s))
            self._losses[self.iteration] = fields["loss"]
            if len(self._losses) > _LOSSES_MAX:
                del self._losses[next(iter(self._losses))]
            self.message = ""
            _call_all(self.on_commit)
        elif event == "leader.elected":
            self.message = f"{THIS_NODE} leads the run in term {fields['term']}"
        elif event in _REASONED:
            self.message = str(fields.get("reason", ""))
        elif event == "member.leaving":
            self.message = f"{str(fields.get('peer'))[:8]} is leaving: {fields.get('reason')}"
        elif event == "run.returned":
            self.iteration = int(fields["iteration"])
            self._commits.clear()
            self._losses = {i: loss for i, loss in self._losses.items() if i <= self.iteration}
            self.loss, self.num_deferred = self.loss_of(self.iteration), 0
            self.metrics = dict.fromkeys(STEP_METRIC_NAMES)
            self.message = f"{fields['reason']}: back to iteration {self.iteration}"
            _call_all(self.on_return)
        elif event == "stage.ending":
            stage = fields.get("stage")
            self.message = f"the last member of stage {stage} is leaving: it needs another"
            _call_all(self.on_stage_ending)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
