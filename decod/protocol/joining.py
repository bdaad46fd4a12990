"""A candidate's way in: offer, get a stage, build it, say that it stands ready.

    OFFERING -> (Assign) -> BUILDING -> [FETCHING] -> PREPARED -> (in the view)

The candidate repeats what it said last until the leader lets it in; the leader answers repeats
alike. A run that starts from a given state adds a step: the stage's part comes from the leader,
until an iteration is committed; then nobody needs it any more, nor who has it.
"""

from dataclasses import replace

from decod.ids import NodeId
from decod.protocol.context import Context
from decod.protocol.effects import Effect, FetchState, Note, Send, Stop, StopReason
from decod.protocol.events import LeaderFound
from decod.protocol.identity import Identity
from decod.protocol.jobs import Build, Built
from decod.protocol.keeping import inventory
from decod.protocol.messages import Assign, Join, Prepared
from decod.protocol.view import Opening

_KNOCK_INTERVAL_S = 2.0
"""Pause between two repeats of an offer."""


class Joining:
    """What a node does until it is in the view."""

    def __init__(self, context: Context, identity: Identity, offer: Join) -> None:
        self._context = context
        self._identity = identity
        self._offer = offer
        self._initial_due = context.fetches_initial
        """What was built is not the state yet that the run starts from."""
        self._fetching = False
        self._assigned: Assign | None = None
        self._built: Built | None = None
        self._heard_s: float | None = None
        """When the leader was last heard; the first knock counts too."""
        self.deadline_s: float | None = None

    def heard(self, now_s: float, sender: NodeId) -> None:
        if sender == self._context.view.leader:
            self._heard_s = now_s

    def knock(self, now_s: float) -> list[Effect]:
        """Offer this node, or say that it is prepared."""
        if self._identity.node_id in self._context.view:
            self.deadline_s = None
            return []
        leader: NodeId = self._context.view.leader
        building = self._assigned is not None and self._built is None
        if self._heard_s is None or building or self._fetching or leader == self._context.node_id:
            # Who asks nothing gets no answers, however long it takes; who leads needs none.
            self._heard_s = now_s
        silent_s = now_s - self._heard_s
        if silent_s > self._context.config.leader_timeout_s:
            detail = f"the leader has not answered for {silent_s:.0f} s"
            return [Stop(StopReason.LEADER_LOST, detail)]
        self.deadline_s = now_s + _KNOCK_INTERVAL_S
        if self._assigned is None:
            return [Send(leader, self._offered())]
        if self._built is None:
            return []
        if self._initial_due:
            # Asked again meanwhile: the run may begin without this node.
            return [Send(leader, self._offered()), *self._fetch_initial()]
        return self._ready()

    def _ready(self) -> list[Effect]:
        if self._assigned is None or self._built is None:
            return []
        prepared = Prepared(self._assigned.stage_index, self._built.parameter_hash)
        return [Send(self._context.view.leader, prepared)]

    def _offered(self) -> Join:
        return replace(self._offer, kept=inventory(self._context))

    def redirected(self, now_s: float, event: LeaderFound) -> list[Effect]:
        """Another node leads the run by now: begin again there."""
        view = self._context.view
        if event.leader == view.leader:
            return []
        self._context.view = replace(view, leader=event.leader)
        self._assigned = self._heard_s = None
        self._fetching = False
        return self.knock(now_s)

    def admitted(self, opening: Opening) -> bool:
        """Whether this node is let in, and not who had its id before a restart."""
        member = opening.view.by_id.get(self._identity.node_id)
        ready = self._built is not None and not self._initial_due
        return (
            ready and member is not None and member.since_iteration == opening.committed.iteration
        )

    def entered(self) -> None:
        self.deadline_s = None

    def assigned(self, message: Assign) -> list[Effect]:
        """The leader has chosen a stage: build it."""
        if self._identity.node_id in self._context.view:
            return []
        if message == self._assigned:
            if not (message.begun and self._initial_due):
                return []
            self._initial_due = self._fetching = False
            return self._ready()
        self._assigned, self._built = message, None
        self._initial_due = self._context.fetches_initial and not message.begun
        self._context.why = message.reason
        fields = (("stage", message.stage_index), ("reason", message.reason))
        note = Note("stage.assigned", fields)
        return [note, *self._context.compute.submit(Build(message.stage_index))]

    def built(self, now_s: float, result: Built, *, initial: bool) -> list[Effect]:
        """The stage stands: with weights from the seed or, `initial`, with its given state."""
        self._built = result
        if initial:
            self._initial_due = self._fetching = False
        return self.knock(now_s)

    def fetch_failed(self) -> list[Effect]:
        """The leader could not give it; the next knock asks again."""
        self._fetching = False
        return []

    def _fetch_initial(self) -> list[Effect]:
        if self._fetching or self._assigned is None:
            return []
        self._fetching = True
        context = self._context
        stage_index = self._assigned.stage_index
        return [FetchState((context.view.leader,), stage_index, context.start_iteration)]
