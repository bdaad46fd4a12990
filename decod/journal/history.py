"""What has happened in a run: curves, and events since this daemon started.

It is a view of the journal, which the page and the metrics show. It outlives the node's lives in
the run. Curves begin with the run: an earlier daemon of this host has recorded them, or the leader
tells them. Its memory is bounded: it thins out old iterations, and forgets the oldest events.
"""

import math
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

from decod.ids import NodeId, iteration_of
from decod.journal.journal import JournalEntry

T = TypeVar("T", bound=Sequence[Any])

STEPS_MAX = 2000
"""Iterations that are kept. If there are more, the older ones are thinned out evenly."""

_NEWEST = 500
"""Iterations of which none is dropped."""

EVENTS_MAX = 1000
"""Events that are kept. Of more, the oldest half is dropped."""

FORMER_MAX = 1000
"""Nodes that have gone and are remembered."""

TOLD_MAX = 120
"""Iterations, and as many evaluations, of the curves that a leader tells others."""

TEXTS_MAX = 90
TEXTS_TOLD_MAX = 9
"""Texts that are kept, and that a leader tells others."""

ModelText = tuple[int, str, str]
"""Iteration, prompt, and how the model goes on with it."""

_GAP_POINTS_MIN = 3
"""So many points of the leader's between two neighbours of this node's fill a gap."""

_NUM_USUAL = 16
"""An iteration's usual duration is the median of so many."""

Point = list[Any]
"""Iteration, Unix time in seconds, loss in nats (or None), and tokens a second (or None)."""


@dataclass(frozen=True, slots=True)
class SeenMember:
    """A member, as far as the history needs it."""

    node_id: NodeId
    name: str
    stage_index: int
    num_microbatches: int | None = None
    """What it has done since it joined, as last said. None: not known here."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A member came or went, or the run took a turn."""

    time_s: float
    """Seconds of the Unix epoch."""
    kind: str
    """Of a member: `there` when this daemon first saw the members, `came`, `left` in order, `lost`,
    or `gone` if this node can't tell which of the two. Of the run: one of `RUN_EVENTS`."""
    iteration: int
    """The last that was committed before it."""
    name: str = ""
    """Of the member."""
    stage_index: int | None = None
    reason: str = ""
    cost_s: float | None = None
    """Of a loss: how much longer than usual the iteration took in which it fell. None: not known
    yet."""


RUN_EVENTS = {
    "leader.elected": "elected",
    "run.recut": "recut",
    "run.returned": "returned",
    "checkpoint.written": "checkpoint",
}
"""Turns of a run, by the events that tell of them."""


@dataclass(slots=True)
class _Contribution:
    """What one node has done in all of its lives in the run."""

    member: SeenMember
    earlier: int = 0
    """Microbatches of its earlier lives."""
    present: bool = True


@dataclass(slots=True)
class RunHistory:
    """What this daemon has seen of its run."""

    events: list[RunEvent] = field(default_factory=list)
    """The oldest first."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Iterations that were evaluated on held-out text, and their losses."""
    texts: list[ModelText] = field(default_factory=list)
    """What the model has written, the oldest first."""
    num_came: int = 0
    num_lost: int = 0
    num_left: int = 0
    _steps: list[Point] = field(default_factory=list)
    _committed_s: float | None = None
    """When the last of them was committed, in seconds of a monotonic clock."""
    _durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_USUAL))
    _uncosted: int = 0
    """Losses at the end of the events whose cost the next commit tells."""
    _epoch: str = field(default_factory=lambda: secrets.token_hex(4))
    _num_rewritten: int = 0
    _has_own: bool = False
    """This node has committed, now or in an earlier life."""
    _num_told: int = 0
    """Points that another node has told, less those that this one has committed since."""
    _known: dict[NodeId, _Contribution] = field(default_factory=dict)
    _reasons: dict[NodeId, tuple[str, str]] = field(default_factory=dict)
    """Kind and reason of departures that the leader has announced, until the view shows them."""

    @property
    def generation(self) -> str:
        """Changes when something that was told before no longer holds."""
        return f"{self._epoch}-{self._num_rewritten}"

    @property
    def rest(self) -> str:
        """Changes with the evaluations and texts."""
        ends = [part[-1][0] if part else 0 for part in (self.held_out, self.texts)]
        return f"{len(self.held_out)}-{len(self.texts)}-{ends[0]}-{ends[1]}"

    def since(
        self, generation: str, num_steps: int, num_events: int, rest: str = ""
    ) -> dict[str, Any]:
        """Return what a reader lacks that has got `num_steps` and `num_events` of a generation.

        A reader of another generation gets all. Evaluations and texts are all told when they have
        changed, and else None.
        """
        is_whole = generation != self.generation
        if is_whole:
            num_steps = num_events = 0
        has_rest = rest == self.rest and not is_whole
        return {
            "generation": self.generation,
            "whole": is_whole,
            "rest": self.rest,
            "num_steps": len(self._steps),
            "num_events": len(self.events),
            "steps": self._steps[max(0, num_steps) :],
            "events": self.events[max(0, num_events) :],
            "held_out": None if has_rest else self.held_out,
            "texts": None if has_rest else self.texts,
        }

    def told(self) -> dict[str, Any]:
        """Return the curves in few points, for hosts that have not seen the run from its start."""
        return {
            "steps": _thinned(self._steps, TOLD_MAX),
            "held_out": _thinned(self.held_out, TOLD_MAX),
            "texts": self.texts[-TEXTS_TOLD_MAX:],
        }

    def learn(
        self,
        steps: Iterable[Point],
        held_out: Iterable[Sequence[Any]],
        texts: Iterable[ModelText] = (),
    ) -> None:
        """Take in the points of a leader's curves that lie before or between this node's own, and
        its evaluations and texts after them.
        """
        last = self._steps[-1][0] if self._steps and self._has_own else math.inf
        newest = max((text[0] for text in self.texts), default=0)
        for text in texts:
            if newest < text[0] <= last:
                self._add_text(text)
        if missed := self._missed(steps):
            self._num_told += len(missed)
            # Whoever tells ever more points does not make the list longer than it may be.
            self._steps = sorted(self._steps + missed, key=lambda point: point[0])
            if len(self._steps) > STEPS_MAX:
                self._thin_out()
            self._num_rewritten += 1
        newest = self.held_out[-1][0] if self.held_out else 0
        self.held_out += [
            (iteration, loss)
            for iteration, loss in held_out
            if isinstance(iteration, int) and newest < iteration <= last
        ]
        self.held_out = _thinned(self.held_out, STEPS_MAX)

    def _missed(self, told: Iterable[Point]) -> list[Point]:
        """Return the points of a leader's curve from times when this node was not in the run."""
        if self._num_told > STEPS_MAX // 2:
            return []  # No leader has a reason to tell so much.
        own = [point[0] for point in self._steps]
        gaps: dict[int, list[Point]] = {}
        for point in told:
            place = bisect_left(own, point[0])
            if not isinstance(point[0], int) or point[0] < 1:
                continue
            if point[0] not in own[place : place + 1] and (place < len(own) or not self._has_own):
                gaps.setdefault(place, []).append(point)
        # The leader tells few points, so several between two of this node's show that it was away.
        return [
            point
            for place, points in gaps.items()
            if place == 0 or len(points) >= _GAP_POINTS_MIN or not self._has_own
            for point in points
        ]

    @property
    def lost(self) -> Collection[NodeId]:
        """Members whom the leader has given up, and whom the view may still show."""
        return {node for node, (kind, _) in self._reasons.items() if kind == "lost"}

    # --- what the node tells ------------------------------------------------------------------

    def restore(self, entries: Iterable[JournalEntry], steps: Iterable[Point] = ()) -> None:
        """Take in what an earlier daemon has recorded of the run, if nothing is known yet.

        Args:
            entries: The newest of its entries.
            steps: All iterations of which there is a record, in order.
        """
        if not self._steps:
            for point in steps:
                self._append(point)
            for entry in entries:
                with suppress(KeyError, TypeError, ValueError):  # A line may be spoilt.
                    self.take(entry)

    def take(self, entry: JournalEntry) -> None:
        """Take in one entry of the node."""
        fields = entry.fields
        if entry.event == "step.committed":
            iteration = iteration_of(str(fields["iteration"]))
            self._go_back(iteration - 1)
            rate, before_s = None, self._committed_s
            self._committed_s = entry.now_s
            if before_s is not None:
                duration_s = entry.now_s - before_s
                rate = round(fields["num_tokens"] / max(1e-9, duration_s), 1)
                self._cost(duration_s)
            self._append([iteration, round(entry.time_s, 1), _rounded(fields["loss"]), rate])
        elif entry.event == "round.committed":
            self._take_round(entry)
        elif entry.event == "evaluation.done":
            if (loss := _rounded(fields["loss"])) is not None:
                iteration = int(fields["iteration"])
                earlier = [one for one in self.held_out if one[0] < iteration]
                self.held_out = _thinned([*earlier, (iteration, loss)], STEPS_MAX)
        elif entry.event == "text.written":
            prompt, text = str(fields["prompt"]), str(fields["text"])
            self._add_text((int(fields["iteration"]), prompt, text))
        elif entry.event in RUN_EVENTS:
            self._take_turn(entry)
        elif entry.event == "node.started":
            self._committed_s = None
        elif entry.event in ("member.lost", "peer.lost", "member.leaving"):
            kind = "left" if entry.event == "member.leaving" else "lost"
            reason = str(fields.get("reason", ""))
            self._announce(NodeId(str(fields["peer"])), kind, reason, entry.time_s)

    def _take_round(self, entry: JournalEntry) -> None:
        """Take in a round of collaborative optimizers, whose losses only their scripts know."""
        number, before_s = int(entry.fields["round"]), self._committed_s
        self._go_back(number - 1)
        self._committed_s = entry.now_s
        rate = None
        if before_s is not None:
            rate = round(entry.fields["samples"] / max(1e-9, entry.now_s - before_s), 1)
        self._append([number, round(entry.time_s, 1), None, rate])

    def _take_turn(self, entry: JournalEntry) -> None:
        fields, reason = entry.fields, ""
        if entry.event == "run.returned":
            self._go_back(int(fields["iteration"]))
            self._committed_s = None
            reason = str(fields.get("reason", ""))
        elif entry.event == "run.recut":
            reason = str(fields.get("blocks", ""))
        self._add(RunEvent(entry.time_s, RUN_EVENTS[entry.event], self._iteration, reason=reason))

    def see(self, members: Iterable[SeenMember], *, time_s: float) -> None:
        """Compare the members with those before, and note who came and who went.

        Args:
            members: All members of an iteration that begins.
            time_s: Seconds of the Unix epoch.
        """
        present = {member.node_id: member for member in members}
        kind = "came" if self._known else "there"
        for node_id, known in list(self._known.items()):
            if known.present and node_id not in present:
                self._went(node_id, *self._reasons.get(node_id, ("gone", "")), time_s)
        # Whoever is lost and yet a member of a new iteration has come back.
        self._reasons = {
            node: why for node, why in self._reasons.items() if node in present and why[0] == "left"
        }
        for member in present.values():
            self._see_one(member, kind, time_s)

    def _see_one(self, member: SeenMember, kind: str, time_s: float) -> None:
        known = self._known.get(member.node_id)
        if known is None or not known.present:
            # It counts from 0 again.
            earlier = 0 if known is None else self.total(member.node_id) or 0
            self._known[member.node_id] = _Contribution(member, earlier)
            self.num_came += kind == "came"
            self._add(self._event(time_s, kind, member))
        elif member.num_microbatches is not None:
            if member.num_microbatches < (known.member.num_microbatches or 0):
                # It came back between two looks.
                known.earlier += known.member.num_microbatches or 0
            known.member = member

    def total(self, node_id: NodeId) -> int | None:
        """Return the microbatches that a node has worked on, also before it came back."""
        known = self._known.get(node_id)
        if known is None:
            return None
        done = known.member.num_microbatches
        return known.earlier + done if done is not None else known.earlier or None

    def former(self) -> list[SeenMember]:
        """Return the nodes that have gone, with what they had done in all."""
        return [
            SeenMember(node, known.member.name, known.member.stage_index, self.total(node))
            for node, known in self._known.items()
            if not known.present
        ]

    def contributors(self) -> list[SeenMember]:
        """Return all nodes that have worked on microbatches, with how many, the busiest first."""
        found = [
            replace(known.member, num_microbatches=self.total(node))
            for node, known in self._known.items()
            if self.total(node)
        ]
        return sorted(found, key=lambda one: -(one.num_microbatches or 0))

    # --- inside -------------------------------------------------------------------------------

    def _announce(self, node_id: NodeId, kind: str, reason: str, time_s: float) -> None:
        known = self._known.get(node_id)
        if known is None or not known.present:
            return
        self._reasons[node_id] = (kind, reason)
        if kind == "lost":  # The view shows it later, maybe not before a quorum is back.
            self._went(node_id, kind, reason, time_s)

    def _went(self, node_id: NodeId, kind: str, reason: str, time_s: float) -> None:
        known = self._known.pop(node_id)
        known.present = False
        self._known[node_id] = known  # The last to go is the last to be forgotten.
        self.num_lost += kind == "lost"
        self.num_left += kind == "left"
        self._add(self._event(time_s, kind, known.member, reason))
        self._uncosted += kind == "lost"
        gone = [node for node, other in self._known.items() if not other.present]
        for node in gone[:-FORMER_MAX]:
            del self._known[node]

    @property
    def _iteration(self) -> int:
        return int(self._steps[-1][0]) if self._steps else 0

    def _event(self, time_s: float, kind: str, member: SeenMember, reason: str = "") -> RunEvent:
        return RunEvent(time_s, kind, self._iteration, member.name, member.stage_index, reason)

    def _cost(self, duration_s: float) -> None:
        """Say of the losses since the last commit how long they have held this one up."""
        usual_s = median(self._durations_s) if self._durations_s else None
        if not self._uncosted:
            self._durations_s.append(duration_s)
        elif usual_s is not None:
            cost_s = round(max(0.0, duration_s - usual_s), 1)
            for index in range(len(self.events)):
                one = self.events[-1 - index]
                if one.kind == "lost":
                    self.events[-1 - index] = replace(one, cost_s=cost_s)
                    self._uncosted -= 1
                if not self._uncosted:
                    break
            self._num_rewritten += 1
        self._uncosted = 0

    def _add(self, event: RunEvent) -> None:
        self.events.append(replace(event, time_s=round(event.time_s, 1)))
        if len(self.events) > EVENTS_MAX:
            del self.events[: EVENTS_MAX // 2]
            self._num_rewritten += 1

    def _go_back(self, iteration: int) -> None:
        """Forget the steps after this iteration: the run has taken them back."""
        self.texts = [text for text in self.texts if text[0] <= iteration]
        self.held_out = [one for one in self.held_out if one[0] <= iteration]
        if self._steps and self._steps[-1][0] > iteration:
            self._steps = [step for step in self._steps if step[0] <= iteration]
            self._num_rewritten += 1

    def _add_text(self, text: ModelText) -> None:
        self.texts.append(text)
        if len(self.texts) > TEXTS_MAX:
            # Texts of one iteration, for several prompts, go together.
            iterations = sorted({iteration for iteration, _, _ in self.texts})
            kept = {*iterations[: len(iterations) // 2 : 2], *iterations[len(iterations) // 2 :]}
            self.texts = [one for one in self.texts if one[0] in kept][-TEXTS_MAX:]

    def _append(self, point: Point) -> None:
        self._has_own = True
        self._num_told = max(0, self._num_told - 1)
        self._steps.append(point)
        if len(self._steps) > STEPS_MAX:
            self._thin_out()

    def _thin_out(self) -> None:
        newest = self._steps[-_NEWEST:]
        self._steps = _thinned(self._steps[:-_NEWEST], STEPS_MAX // 2) + newest
        self._num_rewritten += 1


def _thinned(points: Sequence[T], num_max: int) -> list[T]:
    """Return at most so many of some points, evenly over their iterations, the last among them."""
    if len(points) <= num_max:
        return [*points]
    # There is room for a part of a stride at either end, and for the last point. Strides are powers
    # of two, so that points which were kept before are kept again.
    least = math.ceil((points[-1][0] - points[0][0] + 1) / (num_max - 3))
    stride = 1 << (least - 1).bit_length()
    kept = dict[int, T]()
    for point in points:
        kept.setdefault((point[0] - 1) // stride, point)
    found = list(kept.values())
    return found if found[-1] is points[-1] else [*found, points[-1]]


def _rounded(loss: Any) -> float | None:
    number = math.nan if loss is None else float(loss)
    return round(number, 5) if math.isfinite(number) else None
