"""A client's copy of its stage's parameters: fetched from the stage's servers for each iteration.

Where steps are late, servers know the parameters of the next iteration when one begins. A client
then fetches them while it works. It has to believe the servers: what these vote on is more than the
parameters.

It is never ahead of its stage, and keeps nothing for others: a client that was lost takes nothing
along but the work of its iteration. What it needs to enter a run is the parameters of its stage's
layers, without the optimizer's state.

Source: reliable and unreliable parameter servers, section 3.2.1, "Aggregation Process". Deviation:
there servers send their parts of the parameters as each has them. Here a client asks all of them
for different pieces, since it can then do without any one of them.
"""

from typing_extensions import override

from decod.protocol.core.context import Context
from decod.protocol.core.effects import FetchState
from decod.protocol.core.events import (
    JobFinished,
    StateFetched,
    StateFetchFailed,
    StateRequested,
)
from decod.protocol.core.jobs import Built, Job
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
        self._next: StateFetched | None = None
        """The parameters after the iteration in hand, if they are here already."""
        self._asked_for = -1
        """The iteration whose parameters are on their way. -1: none are."""

    def use(self, iteration: int, parameter_hash: str) -> None:
        """Get the parameters after an iteration, from what is here, on its way, or the servers."""
        self.lacks(iteration, parameter_hash)
        held = self._next
        self._next = None
        if held is not None and held.iteration == iteration:
            self._load(held)
            return
        if held is not None:
            self._context.tensors.release(held.tensor.id)
        self._asked = self._asked_for == iteration
        if not self._asked:
            self._ask(iteration, parameter_hash)

    def ask_ahead(self) -> None:
        """Ask for the parameters after the iteration in hand, which the servers know beforehand."""
        wanted = self.iteration + 1
        here = self._next is not None and self._next.iteration == wanted
        if not here and self._asked_for != wanted:
            self._ask(wanted, "")

    def ask_again(self) -> None:
        """Ask the servers once more for what this node lacks."""
        self._asked = True
        self._ask(self.iteration, self._wanted_hash)

    def forget(self) -> None:
        """The run goes back, or is over: nothing that was fetched means anything."""
        if self._next is not None:
            self._context.tensors.release(self._next.tensor.id)
        self._next = None
        self.loaded = False
        self._job = None
        self._asked = False
        self._asked_for = -1

    def _ask(self, iteration: int, parameter_hash: str) -> None:
        context = self._context
        self.again_s = None
        stage = context.member.stage_index
        servers = [member.node_id for member in context.view.roster(stage)]
        if not servers:
            self.give_up("its stage has no server")
            return
        # Each client begins with another server.
        start = context.view.clients[stage].index(context.member) % len(servers)
        donors = (*servers[start:], *servers[:start])
        self._asked_for = iteration
        self._asked = self._asked or iteration == self.iteration
        if not self._comparable:
            parameter_hash = ""
        self._out.note("parameters.requested", num_donors=len(servers), iteration=iteration)
        cut = context.view.cut
        wanted = FetchState(donors, stage, iteration, parameter_hash, with_optimizer=False, cut=cut)
        self._out.put(wanted)

    @property
    def _comparable(self) -> bool:
        """Whether what is voted on is the hash of nothing but the parameters that a client has."""
        return not (self._context.run.rounded or self._context.run.delay)

    @override
    def fetched(self, event: StateFetched) -> None:
        """Parameters have come: load them, or keep them until their iteration is committed."""
        self._context.tensors.add(event.tensor)
        if self._asked_for == event.iteration:
            self._asked_for = -1
        if self._wants(event):
            self._load(event)
        elif event.iteration == self.iteration + 1 and self._next is None:
            self._next = event
        else:
            self._context.tensors.release(event.tensor.id)

    @override
    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """Parameters have been loaded: the right ones, if they hash to what was voted on."""
        if job is not self._job or self.loaded:
            return
        assert isinstance(event.result, Built)
        if self._comparable and self._wanted_hash not in ("", event.result.parameter_hash):
            self.load_failed("its parameters are not those that were committed")
        else:
            super().job_done(now_s, job, event)

    @override
    def fetch_failed(self, event: StateFetchFailed) -> None:
        """No server gives the parameters."""
        if self._asked_for == event.iteration:
            self._asked_for = -1
        if not self.loaded and event.iteration == self.iteration:
            self.give_up(event.reason)

    @override
    def give_up(self, reason: str) -> None:
        """Nobody can give the parameters now: ask again."""
        self._asked = False
        self.again_s = self._context.now_s + _AGAIN_S

    @override
    def load_failed(self, reason: str) -> None:
        """What came was not what a server said: ask again."""
        self._out.note("state.failed", peer="", reason=reason)
        self.give_up(reason)

    @override
    def requested(self, event: StateRequested) -> None:
        """Give nobody anything: servers have it."""
        self._refuse([event], "it is a client, and has parameters only")


class ClientCopy(StageCopy):
    """One client's copy, in the place of a member's.

    Args:
        context: The node's.
        loaded: Called when parameters that were missing are there.
    """

    def __init__(self, context: Context, loaded: Loaded) -> None:
        super().__init__(context, loaded)
        self.state = self.stage = ClientState(context, self._is_here)
        self._hashes: dict[int, str] = {}
        """Of all stages, after the last commit that this node has heard of."""

    @override
    def told(self, decision: Open) -> None:
        self._hashes = dict(decision.hashes)

    @override
    def mended(self) -> None:
        if not self.loaded:
            self.state.ask_again()

    @property
    @override
    def deadline_s(self) -> float | None:
        return self.state.again_s

    @override
    def overdue(self, now_s: float) -> None:
        again_s = self.state.again_s
        if again_s is not None and again_s <= now_s:
            self.state.again_s = None
            if not self.loaded:
                self.state.ask_again()

    @override
    def enter(self, now_s: float, decision: Open, replay: Replay) -> None:
        """The node becomes a client: it has what the run began with, or fetches what is newer."""
        self.told(decision)
        iteration = decision.opening.anchor.number
        state = self.state
        if iteration == self._context.facts.start_iteration and replay.pristine:
            state.iteration = iteration
            state.loaded = True
        replay.end()

    @override
    def begin_era(
        self, opening: Opening, stage_before: int | None, *, stage_index: int, pristine: bool
    ) -> None:
        """The run goes back: this node fetches what its stage's servers go back to."""
        self._hashes = {}
        self.state.forget()

    @override
    def closed(self, now_s: float, opening: Opening, *, stepped: bool) -> None:
        """A client keeps nothing, and serves nobody."""

    @override
    def opened(self, opening: Opening) -> None:
        """An iteration begins: fetch what was committed, if that is not here."""
        state = self.state
        iteration = opening.anchor.number
        if not (state.loaded and state.iteration == iteration):
            told = self._hashes.get(self._context.member.stage_index, "")
            state.use(iteration, told)
        if self._context.run.delay and not opening.paused:
            state.ask_ahead()

    @override
    def end(self) -> None:
        """The run is over: let go of what was fetched."""
        self.state.forget()
