"""What becomes of a node's messages: while it takes part, and in its last moments.

A message that could not be delivered is a doubt about its receiver, which the leader hears of, and
is tried again as long as it means something; by way of another member if the direct link is broken
(`decod.protocol.links.forwarding`).
"""

from decod.ids import NodeId
from decod.protocol.core import messages
from decod.protocol.core.bans import BanList, ReadBans
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.events import (
    Event,
    Fault,
    JobFailed,
    JobFinished,
    LinkMeasured,
    Received,
    SendFailed,
    StateFetched,
    TensorSent,
    earliest,
)
from decod.protocol.core.messages import CatchUp, Open, Ping, Pong
from decod.protocol.core.messages.membership_messages import FollowMessage
from decod.protocol.core.messages.scopes import Passed
from decod.protocol.leadership.joining import Joining
from decod.protocol.leadership.leadership import Leadership
from decod.protocol.links.ban_news import BanNews
from decod.protocol.links.forwarding import Forwarding, Outbox
from decod.protocol.links.liveness import Liveness
from decod.protocol.links.measuring import LinkMeasuring
from decod.protocol.strategy.strategy import Strategy


class Delivery:
    """Tells a node's machines what has arrived and what has not.

    Args:
        context: The node's.
        forwarding: How its messages get to others.
        strategy: What it does in the iterations.
        leadership: Who leads.
        joining: Its way in.
        read_bans: Reads lists of bans.
    """

    def __init__(
        self,
        context: Context,
        forwarding: Forwarding,
        strategy: Strategy,
        leadership: Leadership,
        joining: Joining,
        read_bans: ReadBans,
    ) -> None:
        self.forwarding = forwarding
        self.outbox = Outbox(context)
        self.measuring = LinkMeasuring(context)
        self.liveness = Liveness(
            context, lambda: strategy.facts.awaited | forwarding.receivers, forwarding.broken
        )
        self._context = context
        self._out = context.out
        self._bans = BanNews(context, read_bans)
        self._tensors = context.tensors
        self._strategy = strategy
        self._leadership = leadership
        self._joining = joining

    @property
    def deadline_s(self) -> float | None:
        # Asked after every event, so without a loop.
        outbox_s = self.outbox.deadline_s
        forwarding_s = self.forwarding.deadline_s
        return earliest(outbox_s, forwarding_s, self.liveness.deadline_s, self.measuring.deadline_s)

    def overdue(self, now_s: float) -> None:
        """Send again, and try broken links."""
        self.outbox.overdue(now_s)
        self.forwarding.overdue(now_s)

    def sent(self, now_s: float, event: TensorSent) -> None:
        """A tensor has arrived where it was sent to."""
        self._strategy.step(now_s, event)
        self._strategy.copy.replay_source.sent(event)
        self.forwarding.sent(event)
        self.measuring.sent(now_s, event)
        self._tensors.release(event.tensor)

    def heard(self, now_s: float, received: Received) -> None:
        """Somebody says something, in whatever term."""
        self.liveness.heard(now_s, received)
        message = received.message
        if isinstance(message, messages.Heartbeat):
            self._bans.heard(now_s, received.sender, message)

    def received(self, now_s: float, received: Received) -> None:
        """Take in who lives, who is banned, or what became of a message."""
        sender = received.sender
        match received.message:
            case Passed() as word:
                self._undelivered(now_s, self.forwarding.passed(sender, word))
            case messages.Bans():
                bans = self._bans.received(received)
                if bans is not None:
                    self.banned(now_s, bans, sender)
            case Ping(nonce):
                # Whom this node can't be reached by it may not reach either.
                if received.way is not None:
                    self.forwarding.hinted(now_s, sender)
                self._out.send(sender, Pong(nonce))
            case _:
                raise AssertionError(f"{received.message} is not for here")

    def banned(self, now_s: float, bans: BanList, teller: NodeId) -> None:
        """There is a list of bans, from another node or this node's host. A later one counts."""
        own = self._context.node_id
        if bans.version <= self._context.bans.version:
            return
        if self._context.view.leader in bans.banned:
            self._bans.contest(now_s, bans)
            return
        self._bans.adopt(bans, teller)
        if own in bans.banned:
            self._out.put(Stop(StopReason.BANNED, bans.banned[own]))
        else:
            self._leadership.exclude(now_s)

    def measured(self, now_s: float, event: LinkMeasured) -> None:
        """A link was timed."""
        self.forwarding.measured(now_s, event)
        self.measuring.measured(now_s, event)

    def failed(self, now_s: float, event: SendFailed) -> None:
        """Something did not arrive where it was sent to."""
        if event.gone:
            self.liveness.gone(now_s, event.to)
        failed = self.forwarding.undelivered(now_s, event)
        # What was sent before the link was known to be broken fails as well, maybe seconds later.
        # That is no news: it goes another way now.
        known = event.way is None and self.forwarding.goes_around(event.to)
        if failed is None and event.fault is Fault.LINK and not known:
            # Another's message, or one that was to be passed on: the receiver is doubted alike.
            self.liveness.undelivered(now_s, event.to, event.reason)
        else:
            self._undelivered(now_s, failed, doubted=not known)

    def _undelivered(self, now_s: float, event: SendFailed | None, *, doubted: bool = True) -> None:
        """Doubt the receiver, and try again later if the message still matters then."""
        if event is None:
            return
        if isinstance(event.message, FollowMessage):
            self._joining.missed(now_s, event, self._strategy.copy.replay_source)
            self._strategy.copy.arrival.progressed(now_s)
            return
        self.outbox.undelivered(now_s, event)
        self._strategy.step(now_s, event)
        self.measuring.undelivered(event)
        if event.tensor is not None and event.fault is not Fault.LINK:
            late = event.fault is Fault.RATE
            reason = messages.TOO_SLOW if late else messages.TENSOR_REFUSED
            self.liveness.suspect(now_s, event.to, reason)
            return
        handled = self._leadership.unreachable(now_s, event.to, event.message, event.reason)
        if doubted and not handled:
            self.liveness.undelivered(now_s, event.to, event.reason)


_LINGER_INTERVALS = 1.5
"""Heartbeats for which a node stays: longer than it takes to send something again."""


class Ending:
    """What one node does between the end of its run and its own.

    Messages may overtake each other, and the word that the run is over may overtake the last
    commit. So a node stops when its device has done what was committed, and not before some time
    has passed in which it sends again what was lost, passes on what is for others, and tells
    whoever asks. Otherwise the last to hear of the end could find nobody to tell it.

    Args:
        now_s: The time.
        context: The node's.
        decision: Says that the run is over.
    """

    def __init__(self, now_s: float, context: Context, decision: Open) -> None:
        reason = StopReason.FAILED if decision.failed else StopReason.FINISHED
        detail = decision.reason or "the run is over"
        self._context = context
        self._out = context.out
        context.compute.over = True
        self._decision = decision
        self._stop = Stop(reason, detail)
        self._interval_s = context.run.protocol.heartbeat_interval_s
        self.deadline_s = now_s + _LINGER_INTERVALS * self._interval_s
        """When the node is to stop, if its device has nothing left to do."""

    def taken(self, now_s: float, event: Event, forwarding: Forwarding, outbox: Outbox) -> None:
        """Take in an event. The last effect is the node's end, if that has come."""
        self._taken(now_s, event, forwarding, outbox)
        if now_s < self.deadline_s:
            return
        if self._context.compute.idle:
            self._out.put(self._stop)
        else:
            # Its results count, and a device that hangs is noticed by the driver.
            self.deadline_s = now_s + self._interval_s

    def _taken(  # noqa: C901 - a line each.
        self, now_s: float, event: Event, forwarding: Forwarding, outbox: Outbox
    ) -> None:
        context = self._context
        match event:
            case Received(way=way) if way is not None and way.goal != context.node_id:
                forwarding.pass_on(event)
            case Received(sender, CatchUp()):
                self._out.send(sender, self._decision)
            case Received(sender, Ping(nonce)):
                self._out.send(sender, Pong(nonce))
            case Received():
                self._out.free(event.tensor)
            case JobFinished():
                context.compute.finished(now_s, event)
            case JobFailed():
                context.compute.failed(now_s, event)
            case TensorSent():
                forwarding.sent(event)
                context.tensors.release(event.tensor)
            case SendFailed():
                failed = forwarding.undelivered(now_s, event)
                if failed is not None:
                    outbox.undelivered(now_s, failed)
            case StateFetched():
                context.tensors.release(context.tensors.add(event.tensor))
            case _:
                outbox.overdue(now_s)
