"""What an iteration waits for, whatever the organisation."""

from dataclasses import dataclass
from enum import StrEnum

from decod.ids import NodeId


class ResourceKind(StrEnum):
    """What can keep an iteration waiting."""

    DEVICE = "device"
    """One host's device."""
    WORKERS = "workers"
    """All workers of a stage together: their devices, or their links."""
    UPLINK = "uplink"
    DOWNLINK = "downlink"
    LINK = "link"
    """One link between two hosts."""
    HEAD = "head"
    """The device of a data node."""
    MEMORY = "memory"
    """The microbatches that a stage can hold."""
    WAY = "way"
    """Nothing is busy all the time: a microbatch's way through all stages and back is too long."""
    STEP = "step"
    """The optimizer's step and the parameters' way to the clients."""
    AVERAGE = "average"
    """Averaging takes longer than the passes."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The resource that an iteration waits for."""

    kind: ResourceKind
    stage_index: int | None
    """From 0. None if it belongs to no single stage."""
    host_id: NodeId | None
    peer_id: NodeId | None
    """The receiver, for a LINK."""
    busy_s: float
    """How long it is busy, or how long the way takes."""
