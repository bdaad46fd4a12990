"""Every invariant catches a core that breaks it: each test breaks the real core in one way."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from decod.ids import MicrobatchId
from decod.protocol.core import effects as fx
from decod.protocol.core import jobs
from decod.protocol.core import messages as msg
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.sim.averages import Counts
from decod.sim.core import Machine, place_of
from decod.sim.elections import election_storm
from decod.sim.invariants import Checker, InvariantViolation
from decod.sim.scenario import Scenario
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation, Wrap, run_scenario
from tests.unit.protocol.cast import commits

Tamper = Callable[[NodeMachine, list[Effect]], Sequence[Effect]]

SMALL = Scenario(seed=5, num_relays=4, stages=StagesConfig(num_relay_stages=2), num_iterations=2)
"""Two relays in each of two stages, together from the start."""
SMALL = replace(SMALL, protocol=ProtocolConfig(min_nodes_per_stage=2))


class Broken:
    """The real core, with somebody between it and the world."""

    def __init__(self, wrapped: NodeMachine, tamper: Tamper) -> None:
        self.wrapped = wrapped
        self._tamper = tamper

    @property
    def deadline_s(self) -> float | None:
        return self.wrapped.deadline_s

    def start(self, now_s: float) -> list[Effect]:
        return list(self._tamper(self.wrapped, self.wrapped.start(now_s)))

    def step(self, now_s: float, event: Event) -> list[Effect]:
        return list(self._tamper(self.wrapped, self.wrapped.step(now_s, event)))


def breaking(victim: str, tamper: Tamper) -> Wrap:
    def wrap(name: str, machine: Machine) -> Machine:
        assert isinstance(machine, NodeMachine)
        return Broken(machine, tamper) if name == victim else machine

    return wrap


def violation(victim: str, tamper: Tamper, scenario: Scenario = SMALL) -> InvariantViolation:
    """Run with a broken node and return what the checker says of it."""
    with pytest.raises(InvariantViolation) as caught:
        run_scenario(scenario, wrap=breaking(victim, tamper))
    return caught.value


def test_the_scenario_is_sound_if_nobody_tampers() -> None:
    assert run_scenario(SMALL, wrap=breaking("relay0", lambda _core, x: x)).num_iterations == 2


def test_i1_sees_a_flow_without_inflow_or_offer() -> None:
    def forget_offers(core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        if isinstance(core.strategy.flows, RelayFlows):
            core.strategy.flows.outflows.unpaired.clear()
        return effects

    assert violation("relay0", forget_offers).invariant == "I1"


def test_i1_sees_more_flows_than_capacity() -> None:
    def overbook(core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        if isinstance(core.strategy.flows, RelayFlows) and core.strategy.flows.entries:
            flow_id, entry = next(iter(core.strategy.flows.entries.items()))
            for slot in range(100, 110):
                core.strategy.flows.entries[replace(flow_id, slot=slot)] = entry
        return effects

    found = violation("relay0", overbook)
    assert found.invariant == "I1"
    assert "capacity" in found.what


def test_i1_sees_a_flow_that_does_not_come_home() -> None:
    """The data node thinks that a flow is complete, but its relays know of no such flow."""

    def divert(core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        if isinstance(core.strategy.flows, DataFlows) and len(core.strategy.flows.complete) > 1:
            core.strategy.flows.outflows.paired.clear()
        return effects

    found = violation("data0", divert)
    assert found.invariant == "I1"
    assert "home" in found.what


def test_i2_sees_a_step_divided_by_the_wrong_number() -> None:
    def miscount(_core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        return [
            replace(effect, job=replace(effect.job, weights_total=effect.job.weights_total + 1))
            if isinstance(effect, fx.StartJob) and isinstance(effect.job, jobs.Propose)
            else effect
            for effect in effects
        ]

    alone = Scenario(seed=5, num_relays=1, stages=StagesConfig(num_relay_stages=1))
    assert violation("relay0", miscount, alone).invariant == "I2"


def test_i3_sees_an_iteration_that_one_commits_and_another_aborts() -> None:
    def split(_core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        sent = [e for e in effects if isinstance(e, fx.Send) and commits(e.message)]
        if not sent:
            return effects
        victim = sent[-1]
        assert commits(victim.message)
        told, reason = victim.message, "told otherwise"
        abort = replace(
            told,
            outcome=msg.Outcome.REPEATED,
            reason=reason,
            loss=0.0,
            num_tokens=0,
            hashes=(),
            view_version=0,
            view_term=0,
        )
        return [fx.Send(victim.to, abort) if effect is victim else effect for effect in effects]

    assert violation("data0", split).invariant == "I3"


def test_i6_sees_tensors_that_are_never_freed() -> None:
    def hoard(_core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        return [effect for effect in effects if not isinstance(effect, fx.FreeTensor)]

    assert violation("relay0", hoard).invariant == "I6"


def test_i7_sees_a_run_that_hangs() -> None:
    def swallow(_core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        return [effect for effect in effects if not isinstance(effect, fx.SendTensor)]

    found = violation("relay0", swallow, replace(SMALL, duration_max_s=120.0))
    assert found.invariant == "I7"


def test_i8_sees_a_chatterbox() -> None:
    def chatter(_core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        beats = [
            effect
            for effect in effects
            if isinstance(effect, fx.Send) and isinstance(effect.message, msg.Heartbeat)
        ]
        return effects + beats * 300

    assert violation("relay0", chatter).invariant == "I8"


def test_i8_sees_a_leader_that_tells_all_members_each_time() -> None:
    """They know them: an opening says what changes."""
    protocol = ProtocolConfig(min_nodes_per_stage=5, routing="greedy")
    many = replace(
        SMALL,
        num_relays=40,
        stages=replace(SMALL.stages, num_relay_stages=8),
        num_iterations=3,
        protocol=protocol,
    )

    def verbose(core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        return [_whole(core, effect) for effect in effects]

    found = violation("data0", verbose, many)
    assert found.invariant == "I8"
    assert "bytes" in found.what


def _whole(core: NodeMachine, effect: Effect) -> Effect:
    last = core.leadership.election.decisions.opened
    if last is None or not isinstance(effect, fx.Send) or not isinstance(effect.message, msg.Open):
        return effect
    return replace(effect, message=last)


def test_i8_sees_a_core_that_takes_its_time() -> None:
    ticks = itertools.count()
    with pytest.raises(InvariantViolation, match=r"I8 .* its core has computed for"):
        Simulation(SMALL, stopwatch=lambda: 0.1 * next(ticks)).run()


@pytest.mark.parametrize(
    "repeated", [fx.FreeTensor, fx.StartJob], ids=["freed twice", "started twice"]
)
def test_the_core_may_not_repeat_what_is_done_once(repeated: type[Effect]) -> None:
    def twice(_core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        return [e for effect in effects for e in [effect] * (1 + isinstance(effect, repeated))]

    assert violation("relay0", twice).invariant == "CORE"


def test_a_violation_names_the_node_and_the_command_that_replays_it() -> None:
    found = violation("relay0", lambda _core, x: [e for e in x if not isinstance(e, fx.FreeTensor)])
    assert found.node == "relay0"
    assert "I6 at relay0" in str(found)
    assert "python -m decod.sim --seed 5 --iterations 2" in str(found)


# --- steps that the core itself would not let through: the checker is asked directly -------------

M1, M2 = MicrobatchId(1, 0, 0), MicrobatchId(1, 0, 1)


def step(counts: Counts, *, parameter_hash: str = "x") -> SimulatedStep:
    return SimulatedStep(1, counts, len(counts), parameter_hash)


def committing(*steps: tuple[str, int, SimulatedStep]) -> None:
    """Tell a checker that hosts (by name and stage) have committed steps."""
    simulation = Simulation(SMALL)
    for name, stage_index, committed in steps:
        host = simulation.hosts[name]
        host.compute.stage_index = stage_index
        simulation.checker.committed(host, committed)


def test_i2_sees_a_microbatch_that_is_folded_in_twice() -> None:
    with pytest.raises(InvariantViolation, match=r"I2 .* folded in 2 times"):
        committing(("relay0", 1, step(((M1, 2),))))


def test_i2_sees_stages_that_differ() -> None:
    with pytest.raises(InvariantViolation, match=r"I2 .*lacks \['1/0/1'\].*compared with relay0"):
        committing(
            ("relay0", 1, step(((M1, 1), (M2, 1)))),
            ("relay1", 2, step(((M1, 1),))),
        )


def test_i3_sees_members_of_a_stage_that_differ() -> None:
    same = ((M1, 1),)
    committing(("relay0", 1, step(same)), ("relay1", 2, step(same, parameter_hash="y")))
    with pytest.raises(InvariantViolation, match=r"I3 .* differ from those of relay0"):
        committing(("relay0", 1, step(same)), ("relay1", 1, step(same, parameter_hash="y")))


@pytest.mark.parametrize("seed", [1, 5])
def test_a_place_that_is_not_looked_up_again_is_what_it_would_be(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, num = Checker._check_term, 0

    def check_twice(checker: Checker, host: SimHost, event: Event | None) -> None:
        nonlocal num
        check(checker, host, event)
        num += 1
        assert checker._whereabouts[host.node_id].place == place_of(host.machine)

    monkeypatch.setattr(Checker, "_check_term", check_twice)
    Simulation(election_storm(seed)).run()
    assert num > 1000
