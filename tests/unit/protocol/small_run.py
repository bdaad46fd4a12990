"""A leader and a few relays that are about to train, and what tests do to them."""

from decod.ids import NodeId
from decod.protocol.core.effects import Stop
from tests.unit.protocol.cast import CONFIG, configured
from tests.unit.protocol.world import World

LINGER_S = 2 * CONFIG.heartbeat_interval_s
"""Longer than a node stays when its run has ended."""


def training(*relays: str, num_iterations: int = 2, **config: float) -> World:
    """Return a world in which d0 and the relays are about to train their first microbatch."""
    names = relays or ("r1a",)
    world = World(
        config=configured(min_nodes_per_stage=len(names), **config), num_iterations=num_iterations
    )
    world.start("d0")
    for name in names:
        world.start(name, stage_index=1)
    world.settle(["ForwardActivation", f"to={names[0]}"])
    world.seen.clear()
    return world


def stops(world: World, name: str) -> Stop:
    stop = world.hosts[NodeId(name)].stop
    assert stop is not None
    return stop
