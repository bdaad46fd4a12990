"""What a server knows of its stage's workers, and whom it gives the next microbatch.

A worker's speed shows in how fast its results come. Each microbatch goes to the worker that is
expected to have it done first: so all get work in proportion to their speed, and none has much left
at the end. One that has as many as it may wait for is passed over only if it would not be first all
the same; then the microbatch stays in the pool until somebody has room.

Source: reliable and unreliable parameter servers, section 3.2.1. Deviation: there a batch is cut
beforehand by the clients' computing power, and what is left over goes into a pool. Here all of it
comes from the pool, one microbatch at a time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.estimate import Recent


@dataclass(slots=True)
class WorkerRecord:
    """One worker, as a server sees it."""

    window: int
    """Microbatches that it may be given and not have done."""
    pass_s: float
    """How long it takes for one, by its own account."""
    given: dict[MicrobatchId, float] = field(default_factory=dict)
    """Since when it has which, oldest first."""
    turn_s: Recent = field(default_factory=Recent)
    """Times from one result to the next while it had something to do, or for a single one."""
    last_s: float = 0.0
    """When its last result came."""

    @property
    def full(self) -> bool:
        return len(self.given) >= self.window

    @property
    def each_s(self) -> float:
        """How long it takes for one microbatch."""
        return self.turn_s.median if self.turn_s else self.pass_s


class WorkerTable:
    """The workers that have offered themselves in an iteration.

    Args:
        context: The server's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.records: dict[NodeId, WorkerRecord] = {}
        self._known: dict[NodeId, Recent] = {}
        """Speeds, which outlive an iteration."""

    def __contains__(self, node: NodeId) -> bool:
        return node in self.records

    def reset(self) -> None:
        """An iteration is over."""
        self.records.clear()

    def keep(self, members: Mapping[NodeId, object]) -> None:
        """Forget those that are no members any more."""
        for table in (self.records, self._known):
            for node in [n for n in table if n not in members]:
                del table[node]

    def offered(self, node: NodeId, window: int, pass_s: float) -> None:
        """A worker takes microbatches."""
        known = self.records.get(node)
        if known is None:
            turn_s = self._known.setdefault(node, Recent())
            self.records[node] = WorkerRecord(window, pass_s, turn_s=turn_s)
        else:
            known.window, known.pass_s = window, pass_s

    def gave(self, now_s: float, node: NodeId, microbatch: MicrobatchId) -> None:
        """A worker has got a microbatch."""
        self.records[node].given[microbatch] = now_s

    def done(self, now_s: float, node: NodeId, microbatch: MicrobatchId) -> None:
        """A worker's result has come, or is not wanted any more."""
        record = self.records.get(node)
        since_s = record.given.pop(microbatch, None) if record is not None else None
        if record is not None and since_s is not None:
            record.turn_s.add(now_s, now_s - max(since_s, record.last_s))
            record.last_s = now_s

    def dropped(self, microbatch: MicrobatchId) -> None:
        """Nobody need do a microbatch any more."""
        for record in self.records.values():
            record.given.pop(microbatch, None)

    def expected_s(self, node: NodeId, num_more: int = 0) -> float:
        """Return how long a worker would take until it has done one more.

        Args:
            node: The worker.
            num_more: Microbatches that it is to get before.
        """
        record = self.records[node]
        num = len(record.given) + num_more + 1
        own = node == self._context.node_id
        return num * record.each_s + (0.0 if own else self._context.links.transfer_s(node))

    def choose(
        self, waiting: Collection[tuple[MicrobatchId, Collection[NodeId]]]
    ) -> list[tuple[MicrobatchId, NodeId]]:
        """Return who is to get which microbatches now.

        Args:
            waiting: Microbatches in their order, and who must not get each.
        """
        more = dict.fromkeys(self.records, 0)
        chosen: list[tuple[MicrobatchId, NodeId]] = []
        for microbatch, barred in waiting:
            if all(r.full or len(r.given) + more[n] >= r.window for n, r in self.records.items()):
                break
            able = [node for node in self.records if node not in barred]
            if not able:
                continue
            best = min(able, key=lambda node: (self.expected_s(node, more[node]), node))
            record = self.records[best]
            if len(record.given) + more[best] < record.window:
                chosen.append((microbatch, best))
            more[best] += 1
        return chosen
