"""A first leader that dies while it is sending."""

from collections.abc import Callable

from decod.protocol.core import effects as fx
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import Event
from decod.protocol.core.messages import Message
from decod.sim.core import Machine
from decod.sim.scenario import Scenario
from decod.sim.simulation import Simulation


class Mortal:
    """A machine whose host dies in the midst of some messages: so many of them still go out.

    Args:
        machine: Of the leader.
        counts: Whether a message, or a tensor's, is one of them.
        num_sent: How many leave.
    """

    def __init__(self, machine: Machine, counts: Callable[[Message], bool], num_sent: int) -> None:
        self.wrapped = machine
        self.die: Callable[[], None] = lambda: None
        self._counts, self._num_left = counts, num_sent
        self._dead = False

    @property
    def deadline_s(self) -> float | None:
        return self.wrapped.deadline_s

    def start(self, now_s: float) -> list[Effect]:
        return self.wrapped.start(now_s)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        effects = self.wrapped.step(now_s, event)
        if self._dead:
            return []
        for index, effect in enumerate(effects):
            if not isinstance(effect, (fx.Send, fx.SendTensor)) or not self._counts(effect.message):
                continue
            if self._num_left == 0:
                self._dead = True
                self.die()
                return effects[:index]
            self._num_left -= 1
        return effects


def simulation_with_mortal(
    scenario: Scenario, counts: Callable[[Message], bool], num_sent: int, *, vanish: bool = False
) -> Simulation:
    """Return a run whose first leader will die so; `vanish`: its whole host does."""
    mortals: list[Mortal] = []

    def wrap(name: str, machine: Machine) -> Machine:
        if name != "data0":
            return machine
        mortals.append(Mortal(machine, counts, num_sent))
        mortals[-1].die = lambda: simulation.kernel.after(0.0, kill)
        return mortals[-1]

    def kill() -> None:
        simulation.leader.kill(vanish=vanish)

    simulation = Simulation(scenario, wrap=wrap)
    return simulation
