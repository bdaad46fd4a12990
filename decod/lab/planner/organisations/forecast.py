"""What is predicted of an organisation: the time, its parts, what it waits for, and the layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from decod.ids import NodeId
from decod.lab.planner.bottleneck import Bottleneck


class OrganisationName(StrEnum):
    """The ways to train that are compared."""

    PIPELINE = "pipeline"
    """Stages of relays, and an average of gradients in each iteration."""
    SERVERS = "servers"
    """Stages of servers and clients."""
    DILOCO = "diloco"
    """The pipeline, whose members step by themselves and average seldom."""
    COLLABORATIVE = "collaborative"
    """Each host trains the whole model, and all average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """The parts of an iteration, in seconds. They add up to the whole."""

    compute_s: float
    """The busiest device, beyond the first microbatch."""
    communication_s: float
    """What passes wait for links beyond that."""
    fill_s: float
    """A microbatch's way through all idle stages and back."""
    aggregation_s: float
    """Averages and steps that training waits for."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s + self.fill_s + self.aggregation_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedHost:
    """A host in a stage."""

    host_id: NodeId
    duty: str
    """`relay`, `server` (both duties), `frontal`, `backward`, `client` or `peer`."""
    num_microbatches: int
    """Of an iteration, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage and its hosts."""

    num_layers: int
    hosts: tuple[PlacedHost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The prediction for one variant of an organisation."""

    organisation: OrganisationName
    variant: str
    """In words, such as `every 50, int4, overlap`. Empty: there is one only."""
    parts: TimeParts
    bottleneck: Bottleneck
    stages: tuple[PlacedStage, ...]
    exact: bool
    """Whether the steps are those of one host with the whole batch."""
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Keys of the run file, or arguments of the collaborative optimizer."""
    remarks: tuple[str, ...] = ()

    @property
    def iteration_s(self) -> float:
        return self.parts.total_s
