"""A node's last moments in a run that has ended: nothing is begun, and what was begun is finished.

Messages may overtake each other, and the word that the run is over may overtake the last commit.
So a node stops when its device has done what was committed, and not before some time has passed in
which it sends again what was lost, passes on what is for others, and tells whoever asks. Otherwise
the last to hear of the end could find nobody to tell it.
"""

from decod.protocol.core.context import Context
from decod.protocol.core.dispatch import released
from decod.protocol.core.effects import Effect, Send, Stop, StopReason
from decod.protocol.core.events import (
    Event,
    JobFailed,
    JobFinished,
    Received,
    SendFailed,
    StateFetched,
    TensorSent,
)
from decod.protocol.core.messages import CatchUp, Open, Ping, Pong
from decod.protocol.links.forwarding import Forwarding
from decod.protocol.links.outbox import Outbox

_LINGER_INTERVALS = 1.5
"""Heartbeats for which a node stays: longer than it takes to send something again."""


class Ending:
    """What one node does between the end of its run and its own.

    Args:
        now_s: The time.
        context: The node's.
        decision: Says that the run is over.
    """

    def __init__(self, now_s: float, context: Context, decision: Open) -> None:
        reason = StopReason.FAILED if decision.failed else StopReason.FINISHED
        detail = decision.reason or "the run is over"
        self._context = context
        context.compute.over = True
        self._decision = decision
        self._stop = Stop(reason, detail)
        self._interval_s = context.run.protocol.heartbeat_interval_s
        self.deadline_s = now_s + _LINGER_INTERVALS * self._interval_s
        """When the node is to stop, if its device has nothing left to do."""

    def taken(
        self, now_s: float, event: Event, forwarding: Forwarding, outbox: Outbox
    ) -> list[Effect]:
        """Take in an event. The last effect is the node's end, if that has come."""
        effects = self._taken(now_s, event, forwarding, outbox)
        if now_s < self.deadline_s:
            return effects
        if self._context.compute.idle:
            return [*effects, self._stop]
        # Its results count, and a device that hangs is noticed by the driver.
        self.deadline_s = now_s + self._interval_s
        return effects

    def _taken(
        self, now_s: float, event: Event, forwarding: Forwarding, outbox: Outbox
    ) -> list[Effect]:
        context = self._context
        match event:
            case Received(way=way) if way is not None and way.goal != context.node_id:
                return forwarding.pass_on(event)
            case Received(sender, CatchUp()):
                return [Send(sender, self._decision)]
            case Received(sender, Ping(nonce)):
                return [Send(sender, Pong(nonce))]
            case Received():
                return released(event)
            case JobFinished():
                return context.compute.finished(now_s, event)
            case JobFailed():
                return context.compute.failed(now_s, event)[1]
            case TensorSent():
                return forwarding.sent(event) + context.tensors.release(event.tensor)
            case SendFailed():
                effects, failed = forwarding.undelivered(now_s, event)
                return effects + ([] if failed is None else outbox.undelivered(now_s, failed))
            case StateFetched():
                return context.tensors.release(context.tensors.add(event.tensor))
        return outbox.overdue(now_s)
