"""What a node says of views, and takes in: the change from a view that both sides know.

All machines see openings with whole views. Between nodes an `Open` or a `Mend` carries the change
instead, where the receiver is a member of the view before. `KnownViews` makes the one of the other,
at the two ends of the wire, and keeps the last few views for it.

A receiver that can't make the view, because it has missed one or finds another hash, drops the
message and asks its sender for the whole view (`CatchUp`). What is lost of that is as if the
message itself had been lost: a heartbeat from a node that is further makes the receiver ask again.
A host that wakes finds all that came while it slept, and asks once.
"""

from collections import deque
from dataclasses import replace

from decod.ids import Iteration, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.events import Received
from decod.protocol.core.messages import CatchUp, Mend, Message, Open
from decod.protocol.core.seals import NO_SEALS, Seals, doubts, sealed
from decod.protocol.core.view import View, change_between, changed_electors, changed_view

_KNOWN_MAX = 8
"""Views that a node keeps, the newest included: a member may have missed some."""

_Place = tuple[int, Iteration, int]
"""Term, iteration and view version: where a decision leads."""


class KnownViews:
    """The views that one node knows.

    Args:
        context: The node's.
        seals: Make and check the seals of decisions, whose views must be whole for that.
    """

    def __init__(self, context: Context, seals: Seals = NO_SEALS) -> None:
        self._context = context
        self._out = context.out
        self._seals = seals
        self._known: deque[View] = deque(maxlen=_KNOWN_MAX)
        self._before: dict[_Place, View] = {}
        """The view that each of the last decisions has met here."""
        self._asking: CatchUp | None = None
        self._asker = NodeId("")
        """Who asks in this step what it has missed."""
        self._asked: tuple[NodeId, float] = (NodeId(""), 0.0)
        """Whom this node has last asked for a whole view, and when."""

    def taken(self, decision: Open | Mend) -> None:
        """This node is about to act on a decision, whose view is whole."""
        view = _view_of(decision)
        if self._context.node_id in self._context.view:
            self._before[_place_of(decision)] = self._context.view
        while len(self._before) > _KNOWN_MAX:
            del self._before[next(iter(self._before))]
        if view not in self._known:
            self._known.append(view)

    # --- sending ------------------------------------------------------------------------------

    def asked(self, sender: NodeId, message: CatchUp) -> None:
        """What is sent to a node in this step may change the view that it names."""
        self._asker = sender
        self._asking = message

    def answered(self) -> None:
        """The step is over."""
        self._asking = None

    def told(self, to: NodeId, message: Message) -> Message:
        """Return a message with its seal, in the fewest bytes that its receiver can take in."""
        message = sealed(message, self._seals)
        if not isinstance(message, (Open, Mend)) or message.change is not None:
            return message
        base = self._base_for(to, message)
        if base is None:
            return message
        if isinstance(message, Mend):
            return replace(
                message, view=message.view.outline, change=change_between(base, message.view)
            )
        opening = message.opening
        change = change_between(base, opening.view, opening.electors)
        return replace(
            message,
            opening=replace(opening, view=opening.view.outline, electors=()),
            change=change,
        )

    def _base_for(self, to: NodeId, decision: Open | Mend) -> View | None:
        """Return a view that a decision's receiver knows; None if there may be none."""
        if self._asking is not None and to == self._asker:
            return self._named(self._asking.view_hash)
        base = self._before.get(_place_of(decision))
        if base is None or (before := base.by_id.get(to)) is None:
            return None
        now = _view_of(decision).by_id.get(to)
        # Who enters again has started again, and knows nothing.
        again = now is not None and now.since_iteration != before.since_iteration
        return None if again else base

    # --- receiving ----------------------------------------------------------------------------

    def take(self, received: Received) -> Open | Mend | None:
        """Return a decision with its whole view, which this node is to act on.

        None: the view can't be made here, or nobody who may decide has made the decision.
        """
        told = received.message
        message = self.whole(told)
        if message is None:
            self._ask(received.sender)
            return None
        made = replace(received, message=message)
        if message is not told and doubts(made, self._seals, self._out):
            return None
        self.taken(message)
        return message

    def _ask(self, sender: NodeId) -> None:
        """Ask for a whole view, unless the answer to this may still be on its way."""
        now_s = self._context.now_s
        interval_s = self._context.run.protocol.heartbeat_interval_s
        asked, asked_s = self._asked
        if asked == sender and now_s - asked_s < interval_s:
            return
        self._asked = (sender, now_s)
        self._out.note("view.missed", peer=sender)
        self._out.send(sender, CatchUp(self._context.iteration))

    def whole(self, message: Message) -> Open | Mend | None:
        """Return a decision with its whole view, or None if this node can't make that."""
        assert isinstance(message, (Open, Mend))
        change = message.change
        if change is None:
            return message
        base = self._named(change.base)
        view = None if base is None else changed_view(base, _view_of(message), change)
        if view is None:
            return None
        if isinstance(message, Mend):
            return replace(message, view=view, change=None)
        electors = changed_electors(view, change.electors)
        opening = replace(message.opening, view=view, electors=electors)
        return replace(message, opening=opening, change=None)

    def _named(self, view_hash: str) -> View | None:
        return next((view for view in self._known if view.hash == view_hash), None)


def _view_of(decision: Open | Mend) -> View:
    return decision.view if isinstance(decision, Mend) else decision.opening.view


def _place_of(decision: Open | Mend) -> _Place:
    view = _view_of(decision)
    iteration = decision.iteration if isinstance(decision, Mend) else decision.opening.iteration
    return view.term, iteration, view.version
