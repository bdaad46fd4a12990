"""The protocol's numbers: timeouts, degrees, limits. Part of the manifest, so all share them."""

from dataclasses import dataclass

from decod.errors import ConfigError

PROTOCOL_VERSION = 19
"""Grows when members of two releases can no longer train together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """How much of the relays' work is done again elsewhere, to see whether it is right."""

    share: float = 0.02
    """Share of the iterations in which a relay's work is audited. 0: in none."""
    share_in_probation: float = 0.2
    """The same of a relay that is new in the run."""
    tolerance: float = 0.05
    """How far a tensor may be from what an auditor computes, as a share of its length. It covers
    what devices and their kernels do differently."""

    def __post_init__(self) -> None:
        for name in ("share", "share_in_probation", "tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"audits.{name} is {getattr(self, name)}",
                    why="it is a share",
                    fix="give a number from 0 to 1, or leave it out to get the default",
                )


NO_AUDITS = AuditConfig(share=0.0, share_in_probation=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
    """Relations that must hold are checked in `__post_init__`."""

    heartbeat_interval_s: float = 1.0
    """How often a node tells its watchers that it lives."""
    heartbeat_timeout_s: float = 5.0
    """Silence after which a watcher suspects a node. Raise it when hosts stall under load."""
    probe_timeout_s: float = 3.0
    """How long a suspect has to answer the leader before it is removed."""
    answer_timeout_s: float = 5.0
    """How long a RequestFlow may stay unanswered before the requester asks again."""
    routing: str = "flow"
    """How flows are found: a name in `protocol.flows.registry`."""
    negotiation_interval_s: float = 0.5
    """Length of a round in the search for better flows: above the time of one exchange."""
    complete_timeout_s: float = 30.0
    """Least time for a COMPLETE before its peer is suspected; grows with measured times."""
    iteration_timeout_s: float = 300.0
    """Longest an iteration may go without any progress before the leader repeats it."""
    admission_interval_s: float = 1.0
    """How often the leader looks at waiting candidates."""
    max_peers_per_stage: int = 8
    """Nodes of an adjacent stage that a node deals with. Bounds its control messages."""
    tree_fanout: int = 4
    """Children of a node in its stage's tree, along which announcements go and reports return."""
    num_watchers: int = 2
    """Nodes that watch each node's heartbeat."""
    min_nodes_per_stage: int = 1
    """Relays that every stage needs before the first iteration starts."""
    min_data_nodes: int = 1
    """Data nodes that the first iteration waits for."""
    utilisation_interval_s: float = 2.0
    """Least time between two of the leader's utilisation queries."""
    election_timeout_s: float = 2.0
    """Silence of the leader after which a data node asks all members whether it answers them. If
    it does not for half as long again, another is elected. Raise it when leaders stall."""
    keep_max_bytes: int = 2 << 30
    """Activations and gradients that a node keeps till the end of the iteration, so that others can
    take a lost node's place. What does not fit is not kept, and a loss repeats the iteration."""
    snapshot_every_iterations: int = 20
    """How often each node writes its stage's state to its own disk, and some hosts of other stages
    copy it to theirs: from these a stage is rebuilt when all its nodes are lost, and the run goes
    back by so many iterations at most, or twice that. 0: never; then there is the leader's
    checkpoint, or a mix of the neighbours' weights."""
    leader_timeout_s: float = 60.0
    """How long a node goes on without hearing from the leader before it gives up."""

    def __post_init__(self) -> None:
        for name in (
            "heartbeat_interval_s",
            "heartbeat_timeout_s",
            "probe_timeout_s",
            "answer_timeout_s",
            "negotiation_interval_s",
            "complete_timeout_s",
            "iteration_timeout_s",
            "admission_interval_s",
            "utilisation_interval_s",
            "election_timeout_s",
            "leader_timeout_s",
        ):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(
                    f"protocol.{name} is {getattr(self, name)}",
                    why="a wait of no length or over a day is never meant",
                    fix="give seconds between 0 and 86400",
                )
        for name in (
            "max_peers_per_stage",
            "tree_fanout",
            "num_watchers",
            "min_nodes_per_stage",
            "min_data_nodes",
        ):
            if not 1 <= getattr(self, name) <= 1000:
                raise ConfigError(
                    f"protocol.{name} is {getattr(self, name)}",
                    why="at least one is needed and more than 1000 is a slip",
                    fix="leave it out to get the default",
                )
        if not 0 <= self.keep_max_bytes <= 1 << 44:
            raise ConfigError(
                f"protocol.keep_max_bytes is {self.keep_max_bytes}",
                why="it is a size in bytes, at most 16 TiB",
                fix="leave it out to get the default, or give 0 to keep nothing",
            )
        if not 0 <= self.snapshot_every_iterations <= 1_000_000:
            raise ConfigError(
                f"protocol.snapshot_every_iterations is {self.snapshot_every_iterations}",
                why="it is a number of iterations",
                fix="leave it out to get the default, or give 0 to keep no states",
            )
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                f"protocol.heartbeat_timeout_s is {self.heartbeat_timeout_s}",
                why="one late heartbeat would make a live node a suspect",
                fix="give at least twice protocol.heartbeat_interval_s",
            )
