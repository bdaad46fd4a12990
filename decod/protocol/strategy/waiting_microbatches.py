"""Microbatches of a data node that are not under way yet, and the flow that each takes."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from decod.ids import FlowId, MicrobatchId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.deadline import earliest
from decod.protocol.flows.building import DataFlows, Granted
from decod.protocol.flows.substitutes import Substitutes
from decod.protocol.strategy.microbatch import HeldMicrobatch

_FLOW_PATIENCE = 4
"""Answer timeouts that a data node waits for its first flow; all bounds on relays fell before."""


class WaitingMicrobatches:
    """The queue of one data node's share in an iteration.

    Args:
        context: The node's.
        flows: Returns the flows in use.
    """

    def __init__(self, context: Context, flows: Callable[[], DataFlows]) -> None:
        self._context = context
        self._flows = flows
        self.queue: deque[MicrobatchId] = deque()
        self.can_take: set[NodeId] = set()
        """Relays that are ready to be sent microbatches."""
        self._flow_by_s: float | None = None
        self._follow_s: float | None = None
        """When microbatches that find no free flow may follow those under way."""

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._flow_by_s, self._follow_s)

    def reset(self) -> None:
        """Forget the iteration, but not which relays were ready in it."""
        self.queue.clear()

    def open(self, now_s: float, microbatches: Iterable[MicrobatchId], *, ready: bool) -> None:
        """Begin an iteration with these.

        Args:
            now_s: The instant.
            microbatches: What is to start.
            ready: Whether relays that were ready in the last iteration are so in this one.
        """
        if not ready:
            self.can_take.clear()
        self.queue.extend(microbatches)
        timeout_s = self._context.run.protocol.answer_timeout_s
        self._flow_by_s, self._follow_s = now_s + _FLOW_PATIENCE * timeout_s, now_s + timeout_s

    def in_vain(self, now_s: float) -> bool:
        """Return whether the wait for a first flow ends now, and there is none."""
        if self._flow_by_s is None or now_s < self._flow_by_s:
            return False
        self._flow_by_s = None
        return not self._flows().forwarding and not self._context.view.idle_stages

    def may_follow(self, now_s: float) -> bool:
        """Return whether microbatches may follow others from now on."""
        if self._follow_s is None or now_s < self._follow_s:
            return False
        self._follow_s = None
        return True

    def start(self, under_way: Collection[HeldMicrobatch]) -> list[HeldMicrobatch]:
        """Take those that can start now, on flows whose first hop is ready, the cheapest free one
        first.

        Once all flows are ready, or should have been found, those for which none is free follow the
        others, on the flow that would be done with them first, as many as this node can hold: a
        relay that is full makes them wait, and has the next one at hand as soon as there is room.
        """
        flows = self._flows()
        ready = {
            flow_id: granted
            for flow_id, granted in flows.forwarding.items()
            if granted.peer in self.can_take or flows.carried
        }
        final = flows.carried or (flows.final and len(ready) == len(flows.forwarding))
        follows = self._follow_s is None or final
        loads = Counter(held.flow_id for held in under_way)
        started: list[HeldMicrobatch] = []
        while ready and self.queue and loads.total() < self._context.member.capacity:
            flow_id = min(ready, key=lambda k: _queue_cost(ready[k], loads[k]))
            if loads[flow_id] and not follows:
                break
            loads[flow_id] += 1
            microbatch, granted = self.queue.popleft(), ready[flow_id]
            started.append(
                HeldMicrobatch(
                    microbatch, flow_id, granted.path, granted.path_version, stage_index=0
                )
            )
        return started

    def give_up(self) -> list[MicrobatchId]:
        """Return what waits; nothing does any longer."""
        given_up = [*self.queue]
        self.queue.clear()
        return given_up

    def mend(self, others: Substitutes) -> None:
        """Put substitutes in the place of lost relays, in the flows in use."""
        flows = self._flows()
        for flow_id, granted in flows.forwarding.items():
            path = others.mend(granted.path)
            if path != granted.path:
                version = self._context.view.version
                flows.forwarding[flow_id] = replace(
                    granted, peer=path[0], path=path, path_version=version
                )
                self.can_take.add(path[0])


def _queue_cost(granted: Granted, num: int) -> tuple[bool, float, FlowId]:
    """Return what orders flows that `num` microbatches are under way on: free ones first."""
    return num > 0, (num + 1) * granted.cost_s, granted.flow_id
