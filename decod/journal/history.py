"""What has happened in a run: losses and rates, and who came and went since this daemon started.

It is a view of the journal, which the page and the metrics show. It outlives the node's lives in
the run, and losses and rates also the daemon. Its memory is bounded: it thins out old iterations,
and forgets the oldest events.
"""

import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from decod.ids import NodeId, iteration_of
from decod.journal.journal import JournalEntry

STEPS_MAX = 2000
"""Iterations that are kept. Of more, every second one of the older half is dropped."""

EVENTS_MAX = 1000
"""Events that are kept. Of more, the oldest half is dropped."""

FORMER_MAX = 1000
"""Nodes that have gone and are remembered."""


@dataclass(frozen=True, slots=True)
class SeenMember:
    """A member, as far as the history needs it."""

    node_id: NodeId
    name: str
    stage_index: int
    num_microbatches: int | None = None
    """What it has done since it joined, as last said. None: not known here."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A member came or went."""

    time_s: float
    """Seconds of the Unix epoch."""
    kind: str
    """`there` when this daemon first saw the members, `came`, `left` in order, `lost`, or `gone` if
    this node can't tell which of the two."""
    node_id: NodeId
    name: str
    stage_index: int
    reason: str = ""


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

    events: list[MemberEvent] = field(default_factory=list)
    """The oldest first."""
    num_came: int = 0
    num_lost: int = 0
    num_left: int = 0
    _steps: list[list[Any]] = field(default_factory=list)
    _committed_s: float | None = None
    """When the last of them was committed, in seconds of a monotonic clock."""
    _epoch: str = field(default_factory=lambda: secrets.token_hex(4))
    _num_rewritten: int = 0
    _known: dict[NodeId, _Contribution] = field(default_factory=dict)
    _reasons: dict[NodeId, tuple[str, str]] = field(default_factory=dict)
    """Kind and reason of departures that the leader has announced, until the view shows them."""

    @property
    def generation(self) -> str:
        """Changes when something that was told before no longer holds."""
        return f"{self._epoch}-{self._num_rewritten}"

    def since(self, generation: str, num_steps: int, num_events: int) -> dict[str, Any]:
        """Return what a reader lacks that has got `num_steps` and `num_events` of a generation.

        A reader of another generation gets all. A step is a list: iteration, Unix time in seconds,
        loss in nats (or None), and tokens a second (or None).
        """
        if generation != self.generation:
            num_steps = num_events = 0
        return {
            "generation": self.generation,
            "num_steps": len(self._steps),
            "num_events": len(self.events),
            "steps": self._steps[max(0, num_steps) :],
            "events": self.events[max(0, num_events) :],
        }

    @property
    def lost(self) -> Collection[NodeId]:
        """Members whom the leader has given up, and whom the view may still show."""
        return {node for node, (kind, _) in self._reasons.items() if kind == "lost"}

    # --- what the node tells ------------------------------------------------------------------

    def restore(self, entries: Iterable[JournalEntry]) -> None:
        """Take in what an earlier daemon has recorded of the run, if nothing is known yet."""
        if not self._steps:
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
                rate = round(fields["num_tokens"] / max(1e-9, entry.now_s - before_s), 1)
            self._steps.append([iteration, round(entry.time_s, 1), _rounded(fields["loss"]), rate])
            if len(self._steps) > STEPS_MAX:
                self._thin_out()
        elif entry.event == "run.returned":
            self._go_back(int(fields["iteration"]))
            self._committed_s = None
        elif entry.event == "node.started":
            self._committed_s = None
        elif entry.event in ("member.lost", "member.leaving"):
            kind = "lost" if entry.event == "member.lost" else "left"
            reason = str(fields.get("reason", ""))
            self._announce(NodeId(str(fields["peer"])), kind, reason, entry.time_s)

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
            self._add(time_s, kind, member)
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
        self._add(time_s, kind, known.member, reason)
        gone = [node for node, other in self._known.items() if not other.present]
        for node in gone[:-FORMER_MAX]:
            del self._known[node]

    def _add(self, time_s: float, kind: str, member: SeenMember, reason: str = "") -> None:
        self.events.append(
            MemberEvent(
                round(time_s, 1), kind, member.node_id, member.name, member.stage_index, reason
            )
        )
        if len(self.events) > EVENTS_MAX:
            del self.events[: EVENTS_MAX // 2]
            self._num_rewritten += 1

    def _go_back(self, iteration: int) -> None:
        """Forget the steps after this iteration: the run has taken them back."""
        if self._steps and self._steps[-1][0] > iteration:
            self._steps = [step for step in self._steps if step[0] <= iteration]
            self._num_rewritten += 1

    def _thin_out(self) -> None:
        half = len(self._steps) // 2
        self._steps = self._steps[:half:2] + self._steps[half:]
        self._num_rewritten += 1


def _rounded(loss: Any) -> float | None:
    return None if loss is None else round(float(loss), 5)
