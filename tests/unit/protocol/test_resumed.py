"""A run that goes on from a checkpoint: the same protocol, from a later iteration on."""

from tests.unit.protocol.cast import D0, R1A
from tests.unit.protocol.world import World


def resumed(*, num_iterations: int) -> World:
    """Returns a run that goes on after iteration 40, with a data node and a relay."""
    world = World(
        num_iterations=num_iterations, initial_from_leader=True, start_iteration=40, num_stages=1
    )
    world.start("d0")
    world.start("r1a", stage_index=1)
    return world


def test_a_resumed_run_can_lose_a_stage_before_its_first_commit() -> None:
    """The leader still has what it needs; after a commit only the members would."""
    world = resumed(num_iterations=42)
    world.turn_until(lambda: world.hosts[R1A].machine.in_view)
    world.kill("r1a")
    world.wait(30.0)
    assert world.hosts[D0].alive
    world.start("r1b", stage_index=1)
    world.wait(5.0)
    assert "d0 has the result of iteration 42" in world.seen
