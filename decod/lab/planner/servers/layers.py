"""Layers for stages, by their power to compute."""

from collections.abc import Sequence


def layers_by_power(
    powers: Sequence[float], num_layers: int, limits: Sequence[float] | None = None
) -> list[int] | None:
    """Return the number of layers of each stage, as near to its part of the power as can be.

    Every stage gets a layer. Layers then go one by one to the stage that is the least busy with
    one more, so that the busiest stage has the least possible work.

    Args:
        powers: Of each stage, layers per second. A stage of power 0 gets one layer only.
        num_layers: Of all stages together.
        limits: Most layers that each stage can hold. None: any number.

    Returns:
        None if the layers are fewer than the stages, or the limits are too low.
    """
    num_stages = len(powers)
    room = list(limits) if limits is not None else [float(num_layers)] * num_stages
    if num_layers < num_stages or min(room) < 1 or sum(room) < num_layers:
        return None
    layers = [1] * num_stages
    for _ in range(num_layers - num_stages):
        open_to = [index for index in range(num_stages) if layers[index] < room[index]]
        # Stages without power compare by their layers, behind all others.
        best = min(
            open_to,
            key=lambda index: (
                powers[index] <= 0,
                (layers[index] + 1) / (powers[index] if powers[index] > 0 else 1.0),
            ),
        )
        layers[best] += 1
    return layers
