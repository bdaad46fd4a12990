"""A client's parameters: fetched from its stage's servers, for each iteration."""

from dataclasses import replace
from typing import Any

from decod.ids import Iteration
from decod.protocol.core.effects import Effect, FetchState, RefuseState
from decod.protocol.core.events import StateFetched, StateFetchFailed, StateRequested
from decod.protocol.core.jobs import Built, Load
from decod.protocol.core.messages.decision_messages import Open
from decod.protocol.core.view import Opening
from decod.protocol.state.client_copy import ClientCopy
from decod.protocol.state.replay import Replay
from decod.run.run_config import Organisation
from decod.run.training_config import ServersConfig
from tests.unit.protocol.cast import C1A, committed, notes_of, settle, tensor
from tests.unit.protocol.servers_cast import Bench, stage

HASH, OTHER = "a" * 64, "b" * 64


class CopyBench(Bench):
    """c1a, the first client of stage 1."""

    def __init__(self, *, delay: int = 0) -> None:
        super().__init__(C1A, stage())
        settle(self.context, organisation=Organisation.SERVERS, servers=ServersConfig(delay=delay))
        self.num_loaded = 0
        self.copy = ClientCopy(self.context, self._loaded)

    def _loaded(self, _: float) -> None:
        self.num_loaded += 1

    def enter(self, iteration: int = 0, *, parameter_hash: str = HASH) -> list[Effect]:
        """Become a member at the opening behind an iteration."""
        nobody: Any = None  # A client replays nothing.
        replay = Replay(self.context, "c1a:7700", nobody, incarnation=0)
        told = self._decided(iteration, parameter_hash)
        self.copy.enter(0.0, told, replay)
        self.copy.opened(told.opening)
        return self.context.out.taken()

    def commit(
        self, iteration: int, *, parameter_hash: str = HASH, paused: bool = False
    ) -> list[Effect]:
        """Hear that an iteration was committed and the next is open."""
        told = self._decided(iteration, parameter_hash)
        self.copy.told(told)
        opening = replace(told.opening, paused=paused)
        self.copy.closed(0.0, opening, stepped=False)
        self.copy.opened(opening)
        return self.context.out.taken()

    def _decided(self, iteration: int, parameter_hash: str) -> Open:
        before, now = Iteration(iteration, 1), Iteration(iteration + 1, 1)
        opening = Opening(now, before, self.context.view)
        return committed(before, opening, hashes=((1, parameter_hash),))

    def come(self, iteration: int) -> list[Effect]:
        """Get what was asked for."""
        self._num_tensors += 1
        blob = tensor(self._num_tensors)
        self.copy.fetched(StateFetched(1, iteration, "{}", blob))
        return self.context.out.taken()

    def load(self, iteration: int, *, parameter_hash: str = HASH) -> list[Effect]:
        """End the loading of parameters."""
        return self.end(Load(iteration, ("{}",)), result=Built(parameter_hash), num_outputs=0)

    def fail(self, iteration: int) -> list[Effect]:
        self.copy.fetch_failed(0.0, StateFetchFailed(1, iteration, "busy"))
        return self.context.out.taken()

    def overdue(self, now_s: float) -> list[Effect]:
        self.copy.overdue(now_s)
        return self.context.out.taken()


def asked(effects: list[Effect]) -> list[tuple[int, str]]:
    """Return the iterations whose parameters are asked for, and what they must hash to."""
    wanted = [effect for effect in effects if isinstance(effect, FetchState)]
    assert not any(effect.with_optimizer for effect in wanted)
    return [(effect.iteration, effect.parameter_hash) for effect in wanted]


# --- each iteration -------------------------------------------------------------------------------


def test_parameters_with_another_hash_are_not_used() -> None:
    bench = CopyBench()
    bench.enter(5)
    bench.come(5)
    assert "state.failed" in notes_of(bench.load(5, parameter_hash=OTHER))
    assert (bench.copy.loaded, bench.num_loaded) == (False, 0)
    assert bench.copy.deadline_s is not None, "it asks again"


# --- failures -------------------------------------------------------------------------------------


def test_servers_that_could_not_give_the_parameters_are_asked_again_after_a_pause() -> None:
    bench = CopyBench()
    bench.enter(5)
    assert bench.fail(5) == []
    again_s = bench.copy.deadline_s
    assert again_s == 0.5
    assert bench.overdue(again_s - 0.1) == []
    assert asked(bench.overdue(again_s)) == [(5, HASH)]
    assert bench.copy.deadline_s is None


def test_a_client_whose_stage_has_lost_its_servers_asks_later() -> None:
    bench = CopyBench()
    bench.lose("f1a", "f1b", "b1a", "b1b")
    assert asked(bench.enter(5)) == []
    assert bench.copy.deadline_s == 0.5


def test_a_client_without_servers_asks_for_the_next_parameters_when_it_needs_them() -> None:
    bench = CopyBench(delay=1)
    bench.lose("f1a", "f1b", "b1a", "b1b")
    bench.enter(0)
    assert bench.overdue(0.5) == []
    assert bench.copy.deadline_s is None


def test_nobody_gets_anything_from_a_client() -> None:
    bench = CopyBench()
    bench.enter(0)
    bench.copy.stage.requested(StateRequested(7, 1, 0, with_optimizer=False))
    assert bench.context.out.taken() == [RefuseState(7, "it is a client, and has parameters only")]


# --- the run goes back ----------------------------------------------------------------------------


def test_parameters_that_are_loaded_when_the_run_goes_back_do_not_count() -> None:
    bench = CopyBench()
    bench.enter(5)
    bench.come(5)
    opening = Opening(Iteration(3, 1, 1), Iteration(2, 1, 1), bench.context.view)
    bench.copy.begin_era(opening, 1, stage_index=1, pristine=False)
    bench.load(5)
    assert (bench.copy.loaded, bench.num_loaded) == (False, 0)
