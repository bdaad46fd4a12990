"""A client's parameters: fetched from its stage's servers, for each iteration."""

from dataclasses import replace
from typing import Any

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.core.effects import Effect, FetchState, RefuseState
from decod.protocol.core.events import StateFetched, StateFetchFailed, StateRequested
from decod.protocol.core.jobs import Built, Load
from decod.protocol.core.messages import Open
from decod.protocol.core.view import Opening
from decod.protocol.state.client_copy import ClientCopy
from decod.protocol.state.replay import Replay
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.run_config import Organisation
from decod.run.training_config import ServersConfig
from tests.unit.protocol.cast import (
    B1A,
    B1B,
    C1A,
    F1A,
    F1B,
    ITERATION,
    committed,
    freed,
    jobs_of,
    notes_of,
    settle,
    tensor,
)
from tests.unit.protocol.servers_cast import Bench, stage

HASH, OTHER = "a" * 64, "b" * 64


class CopyBench(Bench):
    """c1a, the first client of stage 1."""

    def __init__(self, *, delay: int = 0) -> None:
        super().__init__(C1A, stage())
        settle(self.context, organisation=Organisation.SERVERS, servers=ServersConfig(delay=delay))
        self.num_loaded = 0
        self.copy = ClientCopy(self.context, self._loaded)

    def _loaded(self, _: float) -> list[Effect]:
        self.num_loaded += 1
        return []

    def enter(self, iteration: int = 0, *, parameter_hash: str = HASH) -> list[Effect]:
        """Become a member at the opening behind an iteration."""
        nobody: Any = None  # A client replays nothing.
        replay = Replay(self.context, "c1a:7700", nobody, incarnation=0)
        told = self._decided(iteration, parameter_hash)
        effects = self.copy.enter(0.0, told, replay)
        return effects + self.copy.opened(told.opening)

    def commit(
        self, iteration: int, *, parameter_hash: str = HASH, paused: bool = False
    ) -> list[Effect]:
        """Hear that an iteration was committed and the next is open."""
        told = self._decided(iteration, parameter_hash)
        self.copy.told(told)
        opening = replace(told.opening, paused=paused)
        return self.copy.closed(0.0, opening, stepped=False) + self.copy.opened(opening)

    def _decided(self, iteration: int, parameter_hash: str) -> Open:
        before, now = Iteration(iteration, 1), Iteration(iteration + 1, 1)
        opening = Opening(now, before, self.context.view)
        return committed(before, opening, hashes=((1, parameter_hash),))

    def come(self, iteration: int) -> list[Effect]:
        """Get what was asked for."""
        self._num_tensors += 1
        blob = tensor(self._num_tensors)
        return self.copy.fetched(StateFetched(1, iteration, "{}", blob))

    def load(self, iteration: int, *, parameter_hash: str = HASH) -> list[Effect]:
        """End the loading of parameters."""
        return self.end(Load(iteration, "{}"), result=Built(parameter_hash), num_outputs=0)

    def fail(self, iteration: int) -> list[Effect]:
        return self.copy.fetch_failed(0.0, StateFetchFailed(1, iteration, "busy"))


def asked(effects: list[Effect]) -> list[tuple[int, str]]:
    """Return the iterations whose parameters are asked for, and what they must hash to."""
    wanted = [effect for effect in effects if isinstance(effect, FetchState)]
    assert not any(effect.with_optimizer for effect in wanted)
    return [(effect.iteration, effect.parameter_hash) for effect in wanted]


# --- the way in -----------------------------------------------------------------------------------


def test_a_client_of_the_beginning_has_what_it_has_built() -> None:
    bench = CopyBench()
    assert bench.enter(0) == []
    assert bench.copy.loaded


def test_a_later_client_fetches_the_parameters_without_the_optimizer() -> None:
    bench = CopyBench()
    effects = bench.enter(5)
    assert asked(effects) == [(5, HASH)]
    assert not bench.copy.loaded
    assert jobs_of(bench.come(5)) == [Load(5, "{}")]
    bench.load(5)
    assert (bench.copy.loaded, bench.num_loaded) == (True, 1)


def test_clients_begin_with_different_servers() -> None:
    def donors(node: str) -> tuple[NodeId, ...]:
        bench = Bench(NodeId(node), stage())
        copy = ClientCopy(bench.context, lambda _: [])
        (wanted,) = (e for e in copy.state.use(1, HASH) if isinstance(e, FetchState))
        return wanted.donors

    assert donors("c1a") == (B1A, B1B, F1A, F1B)
    assert donors("c1b") == (B1B, F1A, F1B, B1A)


# --- each iteration -------------------------------------------------------------------------------


def test_after_each_commit_the_new_parameters_are_fetched() -> None:
    bench = CopyBench()
    bench.enter(0)
    assert asked(bench.commit(1)) == [(1, HASH)]
    assert not bench.copy.loaded


def test_an_iteration_that_is_repeated_goes_on_with_the_same_parameters() -> None:
    bench = CopyBench()
    bench.enter(0)
    assert bench.commit(0) == []
    assert bench.copy.loaded


def test_parameters_of_another_iteration_are_let_go_of() -> None:
    bench = CopyBench()
    bench.enter(5)
    effects = bench.come(3)
    assert (jobs_of(effects), len(freed(effects))) == ([], 1)


def test_parameters_that_come_twice_are_loaded_once() -> None:
    bench = CopyBench()
    bench.enter(5)
    bench.come(5)
    assert jobs_of(bench.come(5)) == []


def test_parameters_with_another_hash_are_not_used() -> None:
    bench = CopyBench()
    bench.enter(5)
    bench.come(5)
    assert "state.failed" in notes_of(bench.load(5, parameter_hash=OTHER))
    assert (bench.copy.loaded, bench.num_loaded) == (False, 0)
    assert bench.copy.deadline_s is not None, "it asks again"


def test_rounded_parameters_are_not_compared() -> None:
    bench = CopyBench()
    settle(bench.context, model=ModelConfig(dtype=ModelDtype.BFLOAT16))
    assert asked(bench.enter(5)) == [(5, "")]
    bench.come(5)
    bench.load(5, parameter_hash=OTHER)
    assert bench.copy.loaded


def test_of_a_stage_whose_hash_is_not_known_anything_is_taken() -> None:
    bench = CopyBench()
    bench.copy.opened(Opening(ITERATION, Iteration(4, 1), bench.context.view))
    bench.come(4)
    bench.load(4)
    assert bench.copy.loaded


# --- failures -------------------------------------------------------------------------------------


def test_servers_that_could_not_give_the_parameters_are_asked_again_after_a_pause() -> None:
    bench = CopyBench()
    bench.enter(5)
    assert bench.fail(5) == []
    again_s = bench.copy.deadline_s
    assert again_s == 0.5
    assert bench.copy.overdue(again_s - 0.1) == []
    assert asked(bench.copy.overdue(again_s)) == [(5, HASH)]
    assert bench.copy.deadline_s is None


def test_a_failure_of_another_iteration_changes_nothing() -> None:
    bench = CopyBench()
    bench.enter(5)
    assert bench.fail(4) == []
    assert bench.copy.deadline_s is None


def test_a_device_that_refuses_the_parameters_gets_them_again() -> None:
    bench = CopyBench()
    bench.enter(5)
    bench.come(5)
    assert "state.failed" in notes_of(bench.refuse(Load(5, "{}")))
    assert asked(bench.copy.overdue(0.5)) == [(5, HASH)]


def test_a_client_whose_stage_has_lost_its_servers_asks_later() -> None:
    bench = CopyBench()
    bench.lose("f1a", "f1b", "b1a", "b1b")
    assert asked(bench.enter(5)) == []
    assert bench.copy.deadline_s == 0.5


def test_what_is_loaded_is_not_asked_for_again() -> None:
    """With late steps, the next parameters may be here before those of the iteration in hand."""
    bench = CopyBench(delay=1)
    bench.enter(5)
    bench.come(6)
    bench.fail(5)
    bench.commit(6)
    bench.load(6)
    assert bench.copy.loaded
    assert bench.copy.overdue(0.5) == []
    assert bench.copy.deadline_s is None, "or the node would be woken for it again and again"


def test_a_client_without_servers_asks_for_the_next_parameters_when_it_needs_them() -> None:
    bench = CopyBench(delay=1)
    bench.lose("f1a", "f1b", "b1a", "b1b")
    bench.enter(0)
    assert bench.copy.overdue(0.5) == []
    assert bench.copy.deadline_s is None


def test_nobody_gets_anything_from_a_client() -> None:
    bench = CopyBench()
    bench.enter(0)
    effects = bench.copy.stage.requested(StateRequested(7, 1, 0, with_optimizer=False))
    assert effects == [RefuseState(7, "it is a client, and has parameters only")]


# --- the run goes back ----------------------------------------------------------------------------


def test_when_the_run_goes_back_the_parameters_are_fetched_anew() -> None:
    bench = CopyBench()
    bench.enter(0)
    opening = Opening(Iteration(3, 1, 1), Iteration(2, 1, 1), bench.context.view)
    bench.copy.begin_era(opening, 1, stage_index=1, pristine=False)
    assert not bench.copy.loaded
    assert asked(bench.copy.opened(opening)) == [(2, "")]


def test_parameters_that_are_loaded_when_the_run_goes_back_do_not_count() -> None:
    bench = CopyBench()
    bench.enter(5)
    bench.come(5)
    opening = Opening(Iteration(3, 1, 1), Iteration(2, 1, 1), bench.context.view)
    bench.copy.begin_era(opening, 1, stage_index=1, pristine=False)
    bench.load(5)
    assert (bench.copy.loaded, bench.num_loaded) == (False, 0)


# --- late steps -----------------------------------------------------------------------------------


def test_with_late_steps_the_next_parameters_are_fetched_while_the_client_works() -> None:
    bench = CopyBench(delay=1)
    assert asked(bench.enter(0)) == [(1, "")]
    assert bench.copy.loaded
    assert jobs_of(bench.come(1)) == [], "they are for later"
    effects = bench.commit(1)
    assert jobs_of(effects) == [Load(1, "{}")]
    assert asked(effects) == [(2, "")]
    bench.load(1, parameter_hash=OTHER)
    assert bench.copy.loaded, "what is voted on is more than the parameters"


def test_next_parameters_that_are_on_their_way_are_not_asked_for_twice() -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    assert asked(bench.commit(1)) == [(2, "")]
    assert jobs_of(bench.come(1)) == [Load(1, "{}")]


def test_next_parameters_that_are_here_are_not_asked_for_again() -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    bench.come(1)
    assert bench.commit(0) == []


def test_next_parameters_that_come_twice_are_kept_once() -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    bench.come(1)
    assert len(freed(bench.come(1))) == 1


def test_next_parameters_that_nobody_gave_are_asked_for_when_they_are_needed() -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    assert bench.fail(1) == []
    assert bench.copy.loaded
    assert asked(bench.commit(1))[0] == (1, "")


def test_kept_parameters_of_an_iteration_that_was_passed_over_are_let_go_of() -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    bench.come(1)
    effects = bench.commit(4)
    assert len(freed(effects)) == 1
    assert asked(effects)[0] == (4, "")


def test_a_paused_run_fetches_nothing_ahead() -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    assert asked(bench.commit(1, paused=True)) == []


@pytest.mark.parametrize("kept", [True, False])
def test_at_the_end_what_was_kept_is_let_go_of(*, kept: bool) -> None:
    bench = CopyBench(delay=1)
    bench.enter(0)
    if kept:
        bench.come(1)
    assert len(freed(bench.copy.end())) == kept
    assert bench.num_held == 0
