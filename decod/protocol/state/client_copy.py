"""A client's copy of its stage's parameters: fetched from the stage's servers after each commit.

It is never ahead of its stage, and keeps nothing for others: a client that was lost takes nothing
along but the work of its iteration. What it needs to enter a run is the parameters of its stage's
layers, without the optimizer's state.

Source: reliable and unreliable parameter servers, section 3.2.1, "Aggregation Process". Deviation:
there servers send their parts of the parameters as each has them. Here a client asks all of them
for different pieces, since it can then do without any one of them.
"""

from collections import deque

from typing_extensions import override

from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, FetchState, Note, RefuseState
from decod.protocol.core.events import StateFetched, StateFetchFailed, StateRequested
from decod.protocol.core.messages import Open
from decod.protocol.core.view import Opening
from decod.protocol.state.replay import Replay
from decod.protocol.state.stage_copy import StageCopy
from decod.protocol.state.stage_state import Loaded, StageState

_AGAIN_S = 0.5
"""Pause before servers are asked again that could not give the parameters yet."""


class ClientState(StageState):
    """The parameters that one client holds.

    Args:
        context: The node's.
        loaded: Called when parameters that were fetched stand on the device.
    """

    def __init__(self, context: Context, loaded: Loaded) -> None:
        super().__init__(context, loaded)
        self.again_s: float | None = None
        """When the servers are asked again."""

    def want(self, iteration: int, parameter_hash: str) -> list[Effect]:
        """Fetch the parameters after an iteration."""
        self.lacks(iteration, parameter_hash)
        return self.ask()

    def ask(self) -> list[Effect]:
        """Ask the servers for what this node lacks."""
        context, self.again_s = self._context, None
        stage = context.member.stage_index
        servers = [member.node_id for member in context.view.roster(stage)]
        # Each client begins with another server.
        start = context.view.clients[stage].index(context.member) % max(1, len(servers))
        self._donors = deque(servers[start:] + servers[:start])
        self._num_loads_left, self._asked = len(servers), True
        if not servers:
            return self.give_up("its stage has no server")
        wanted = FetchState(
            tuple(self._donors), stage, self.iteration, self._wanted_hash, with_optimizer=False
        )
        fields = (("num_donors", len(servers)), ("iteration", self.iteration))
        return [Note("state.requested", fields), wanted]

    @override
    def give_up(self, reason: str) -> list[Effect]:
        """Nobody can give the parameters now: ask again."""
        self._asked, self.again_s = False, self._context.now_s + _AGAIN_S
        return []

    @override
    def load_failed(self, reason: str) -> list[Effect]:
        """What came was not what a server said: ask again."""
        fields = (("peer", ""), ("reason", reason))
        return [Note("state.failed", fields), *self.give_up(reason)]

    @override
    def requested(self, event: StateRequested) -> list[Effect]:
        """Give nobody anything: servers have it."""
        return [RefuseState(event.request_id, "it is a client, and has parameters only")]


class ClientCopy(StageCopy):
    """One client's copy, in the place of a member's.

    Args:
        context: The node's.
        loaded: Called when parameters that were missing are there.
    """

    def __init__(self, context: Context, loaded: Loaded) -> None:
        super().__init__(context, loaded)
        self.state = self.stage = ClientState(context, self._is_here)
        self._context = context
        self._hashes: dict[int, str] = {}
        """Of all stages, after the last commit that this node has heard of."""

    def told(self, decision: Open) -> None:
        """What was committed is known."""
        self._hashes = dict(decision.hashes)

    @property
    @override
    def deadline_s(self) -> float | None:
        return self.state.again_s

    @override
    def overdue(self, now_s: float) -> list[Effect]:
        late = self.state.again_s is not None and self.state.again_s <= now_s
        return self.state.ask() if late and not self.loaded else []

    @override
    def enter(self, now_s: float, decision: Open, replay: Replay) -> list[Effect]:
        """The node becomes a client: it has what the run began with, or fetches what is newer."""
        self.told(decision)
        iteration, state = decision.opening.anchor.number, self.state
        if iteration == self._context.start_iteration and replay.pristine:
            state.iteration, state.loaded = iteration, True
        return replay.end()

    @override
    def begin_era(
        self, opening: Opening, stage_before: int | None, *, stage_index: int, pristine: bool
    ) -> list[Effect]:
        """The run goes back: this node fetches what its stage's servers go back to."""
        self.state.loaded, self._hashes = False, {}
        return []

    @override
    def closed(self, now_s: float, opening: Opening, *, stepped: bool) -> list[Effect]:
        """A client keeps nothing, and serves nobody."""
        return []

    @override
    def opened(self, opening: Opening) -> list[Effect]:
        """An iteration begins: fetch what was committed, if that is not here."""
        state, iteration = self.state, opening.anchor.number
        if state.loaded and state.iteration == iteration:
            return []
        return state.want(iteration, self._hashes.get(self._context.member.stage_index, ""))

    @override
    def fetched(self, event: StateFetched) -> list[Effect]:
        """Parameters that this node asked for have come."""
        return self.state.fetched(event)

    @override
    def fetch_failed(self, now_s: float, event: StateFetchFailed) -> list[Effect]:
        """No server gives the parameters."""
        return self.state.fetch_failed(event)
