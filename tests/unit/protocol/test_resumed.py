"""A run that goes on from a checkpoint: the same protocol, from a later iteration on."""

from tests.unit.protocol.cast import D0, R1A, R1B
from tests.unit.protocol.world import World


def resumed(*, num_iterations: int) -> World:
    """Returns a run that goes on after iteration 40, with a data node and a relay."""
    world = World(
        num_iterations=num_iterations, initial_from_leader=True, start_iteration=40, num_stages=1
    )
    world.start("d0")
    world.start("r1a", stage_index=1)
    return world


def test_a_resumed_run_begins_with_the_iteration_after_its_checkpoint() -> None:
    world = resumed(num_iterations=42)
    world.settle()
    assert any(line.startswith("r1a does Load iteration=40") for line in world.seen)
    proposed = [line for line in world.seen if line.startswith("d0 does Propose")]
    assert [line.split()[3] for line in proposed] == ["iteration=41", "iteration=42"]
    embedded = [line for line in world.seen if line.startswith("d0 does Embed ")]
    assert [line.split()[3] for line in embedded] == ["microbatch=41/0/0", "microbatch=42/0/0"]
    assert "d0 has the result of iteration 42" in world.seen
    assert not any("state.requested" in line for line in world.seen), "all hold it already"


def test_who_enters_a_resumed_run_later_loads_what_it_has_learnt_since() -> None:
    world = resumed(num_iterations=43)
    world.turn_until(lambda: world.hosts[R1A].iteration == 41)
    world.start("r1b", stage_index=1)
    world.settle()
    loaded = [line for line in world.seen if line.startswith("r1b notes state.loaded")]
    assert loaded
    assert loaded[0] != "r1b notes state.loaded iteration=40"
    assert world.hosts[R1B].iteration == world.hosts[R1A].iteration == 43


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
