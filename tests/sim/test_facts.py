"""What a leader knows of votes, which it compares with what members write into a store."""

from dataclasses import replace

from decod.protocol.core.effects import Effect
from decod.protocol.core.era import Hashes
from decod.protocol.facts import NodeFacts
from decod.protocol.node_machine import NodeMachine
from decod.sim.simulation import Simulation
from tests.sim.test_invariants import SMALL, breaking


def test_a_leader_knows_what_each_stage_voted_on_at_the_last_commit() -> None:
    known: dict[int, set[Hashes]] = {}

    def look(core: NodeMachine, effects: list[Effect]) -> list[Effect]:
        leading = NodeFacts(core).leading
        if leading is not None and leading.committed and leading.view.members:
            known.setdefault(leading.committed, set()).add(leading.hashes)
        return effects

    simulation = Simulation(replace(SMALL, num_iterations=4), wrap=breaking("data0", look))
    simulation.run()
    found = simulation.checker._iterations.items()
    voted = {
        iteration: tuple(sorted((stage, hash_) for stage, (hash_, _) in each.hashes.items()))
        for (_, iteration), each in found
        if each.hashes
    }
    assert known.keys() == {1, 2, 3, 4}
    for iteration, hashes in known.items():
        # Once the run has ended, nobody asks any more.
        assert hashes - {()} == {voted[iteration]}
        assert iteration == 4 or () not in hashes
