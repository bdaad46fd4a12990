"""Hosts, the links between them, and the work of an iteration: what every planner begins with.

The problem says nothing about how the work is organised. Planners of different organisations share
it, so that their answers can be compared: `planner.servers` is the first.

A host's position in `TrainingProblem.hosts` is its index. Matrices are lists of rows, and a row
belongs to the sending host. They are lists because planners look at single entries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from decod.ids import NodeId


class HostKind(StrEnum):
    """What others may rely on."""

    DATA = "data"
    """Reads the data, and holds the embedding and the head."""
    RELIABLE = "reliable"
    """Stays until the end of the run, or returns."""
    UNRELIABLE = "unreliable"
    """May leave at any time, without notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHost:
    """A host, and the limits of its device, its memory and its access to the network."""

    host_id: NodeId
    kind: HostKind
    speed_layers_per_s: float
    """Forward and backward passes through one layer, of one microbatch, in a second. 0: the host
    computes nothing. Not used for data nodes."""
    uplink_bytes_per_s: float
    """Most that the host sends to all others together. Above 0."""
    downlink_bytes_per_s: float
    """Most that the host receives from all others together. Above 0."""
    num_layers_max: int | None = None
    """Most layers that fit into its memory. None: any number."""
    num_microbatches_max: int | None = None
    """Most microbatches that it holds at a time, as `--capacity` of a node. None: any number."""
    lost_ratio: float = 0.0
    """Of unreliable hosts: the chance that it is lost in the course of an iteration. Below 1."""
    memory_bytes: float | None = None
    """Of its device. None: any. `num_layers_max` follows from it in the servers organisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """The work of one iteration. All layers are alike."""

    num_layers: int
    """Without embedding and head."""
    num_microbatches: int
    """Of all data nodes together. They have equal shares."""
    activation_bytes: float
    """Of one microbatch between two layers. Its gradient has the same size."""
    layer_bytes: float
    """Parameters of one layer. Its gradient has the same size."""
    delay: int = 1
    """1: the optimizer's step overlaps with the next batch. 0: the next batch waits for it."""
    head_s: float = 0.0
    """Embedding, head and loss of one microbatch at a data node, forward and backward."""
    step_s: float = 0.0
    """The optimizer's step for one layer, at a host that keeps its state."""


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """Hosts, links and work. `config` checks problems from files; this class trusts its caller."""

    hosts: Sequence[TrainingHost]
    """At least one data node and one reliable host. Ids differ."""
    latencies_s: Sequence[Sequence[float]]
    """(hosts, hosts). One way, from the row's host to the column's. 0 on the diagonal."""
    bandwidths_bytes_per_s: Sequence[Sequence[float]]
    """(hosts, hosts). Of each link alone. 0 where there is no link."""
    work: TrainingWork

    def indexes(self, kind: HostKind) -> list[int]:
        """Return the indexes of all hosts of a kind, in order."""
        return [index for index, host in enumerate(self.hosts) if host.kind == kind]

    def with_another(self, index: int) -> "TrainingProblem":
        """Return the same with one more host, whose links are those of a given one.

        The link between the two is a typical one of these.
        """
        like = self.hosts[index]

        def grown(rows: Sequence[Sequence[float]]) -> list[list[float]]:
            others = [number for k, number in enumerate(rows[index]) if k != index]
            between = median(others) if others else rows[index][index]
            wider = [[*row, row[index]] for row in rows]
            wider[index][-1] = between
            last = [*rows[index], rows[index][index]]
            last[index] = between
            return [*wider, last]

        return replace(
            self,
            hosts=[*self.hosts, replace(like, host_id=NodeId(f"{like.host_id}, again"))],
            latencies_s=grown(self.latencies_s),
            bandwidths_bytes_per_s=grown(self.bandwidths_bytes_per_s),
        )

    def positions(self) -> dict[NodeId, int]:
        """Return each host's index by its id."""
        return {host.host_id: index for index, host in enumerate(self.hosts)}

    def transfer_s(self, begin: int, end: int, size_bytes: float) -> float:
        """Return how long a message takes on an idle link. `inf` if there is none."""
        if begin == end:
            return 0.0
        bandwidth = min(
            self.bandwidths_bytes_per_s[begin][end],
            self.hosts[begin].uplink_bytes_per_s,
            self.hosts[end].downlink_bytes_per_s,
        )
        if bandwidth <= 0:
            return math.inf
        return self.latencies_s[begin][end] + size_bytes / bandwidth
