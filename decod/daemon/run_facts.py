"""A node's part in a run, and what follows from its manifest: facts, and sizes of tensors."""

import hashlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from decod.clocks import wall_clock
from decod.config.node_config import NodeConfig
from decod.config.schema import (
    Manifest,
    activation_size_bytes,
    count_parameters,
    formats_of,
    plans_of,
    wire_element_bytes,
)
from decod.driver.arena import Sizes
from decod.ids import NodeId, RunId
from decod.membership.credential import Statement
from decod.membership.papers import Membership
from decod.protocol.core.context import RunFacts
from decod.protocol.core.view import Duty, Role
from decod.run.model_config import ModelDtype
from decod.run.run_config import Organisation, RunConfig
from decod.texts import base32
from decod.train.checkpoint.base import BaseSource, split_hashes
from decod.train.checkpoint.entries import size_bytes_of, state_tensors
from decod.train.checkpoint.initial_state import ChunkHashes
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.stage_states import StageNames, no_names

# --- the run's clock -----------------------------------------------------------------------------
# The wall clock by which a node's part of the DHT goes: its leader's, as far as it knows.


TOLERANCE_S = 60.0
"""Clocks of hosts that keep the time differ by less."""


class RunClock:
    """This host's wall clock, corrected by how much the leader's differed when it was asked.

    Records in the DHT name the instant at which they expire. A host whose clock is wrong would
    refuse the records of others, and others would refuse its own.
    """

    def __init__(self) -> None:
        self._off_s = 0.0

    def __call__(self) -> float:
        """Return seconds of the Unix epoch."""
        return wall_clock() - self._off_s

    def compare(self, leader_s: float) -> float:
        """Go by the leader's clock from now on, if this host's differs from it by too much.

        Args:
            leader_s: The leader's clock now, in seconds of the Unix epoch.

        Returns:
            By how many seconds this host's clock is ahead. 0 if that is tolerated.
        """
        off_s = wall_clock() - leader_s
        self._off_s = off_s if abs(off_s) > TOLERANCE_S else 0.0
        return self._off_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """A node's part in a run, of whatever kind."""

    membership: Membership
    run_id: RunId
    charter: Statement
    """A data node's word that the run and its description belong together."""
    contacts: tuple[str, ...] = ()
    """Addresses of nodes that may be there, as far as this node was told."""
    observed_address: str = ""
    """This host's IP address as the first peer saw it; empty if it is not to be used."""
    clock: RunClock = field(default_factory=RunClock)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart(NodePart):
    """A node's part in a run that trains a model in stages, as its command decided."""

    manifest: Manifest
    leader: NodeId
    leader_address: str = ""
    """Empty at the leader itself."""
    stage_index: int | None = None
    serves: bool = False
    """This host is reliable: where stages have servers, it is one."""
    duty: Duty = Duty.NONE
    """The one that it insists on, as a server."""
    data_dir: Path | None = None
    init_dir: Path | None = None
    checkpoint_dir: Folder | None = None
    """The checkpoint from which the run goes on. Its hash is the manifest's `initial_weights`."""
    checkpoint_chunks: ChunkHashes = field(default_factory=dict)
    """The hashes of its chunks, if this node has checked it."""

    @property
    def role(self) -> Role:
        """This node's role in the run. Its papers call clients relays, as all volunteers."""
        if self.membership.role is Role.DATA:
            return Role.DATA
        servers = self.run.organisation is Organisation.SERVERS
        return Role.CLIENT if servers and not self.serves else Role.RELAY

    @property
    def run(self) -> RunConfig:
        return self.manifest.run

    @property
    def beginning(self) -> str:
        """The event by which this node's life in the run begins."""
        if self.leader != self.membership.node_id:
            return "run.entered"
        return "run.started" if self.checkpoint_dir is None else "run.resumed"


def base_of(part: RunPart, config: NodeConfig) -> BaseSource | None:
    """Return where this host finds weights that its run does not train. None: it trains all."""
    hashes = split_hashes(part.manifest.base)
    return BaseSource(hashes, config.state_dir, config.base_dir) if hashes else None


def facts_of(manifest: Manifest) -> RunFacts:
    """Return what the core must know of a manifest beside its settings."""
    return RunFacts(
        manifest_sha256=manifest.sha256,
        activation_size_bytes=activation_size_bytes(manifest.run),
        formats=formats_of(manifest.run),
        start_iteration=manifest.start_iteration,
        initial_from_leader=manifest.initial_weights != "seed",
    )


def new_run_id(root: bytes, sha256: str) -> RunId:
    """Return an id for a new run.

    Args:
        root: The public key of the run's root.
        sha256: Of the run's description.
    """
    parts = (root, sha256.encode(), secrets.token_bytes(16))
    return RunId(base32(hashlib.sha256(b"".join(parts)).digest())[:26])


def num_nodes_least(run: RunConfig) -> int:
    """Return the smallest number of nodes, data nodes and relays, with which a run begins."""
    num_relays = run.stages.num_relay_stages * run.protocol.min_nodes_per_stage
    return run.batch.num_data_nodes + num_relays


def sizes_of(run: RunConfig) -> Sizes:
    """Return the sizes of this run's tensors and of their elements, in bytes."""
    return Sizes(
        activation_bytes=activation_size_bytes(run),
        wire_element_bytes=wire_element_bytes(run),
        sum_element_bytes=8 if run.model.dtype is ModelDtype.FLOAT64 else 4,
        of_stages=lambda blocks: plans_of(run.with_blocks(blocks)),
    )


def largest_state_bytes(run: RunConfig) -> int:
    """Return the size of the state of the largest stage."""
    states = (state_tensors(run, index) for index in range(run.stages.num_relay_stages + 1))
    return max(map(size_bytes_of, states))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """The sizes of tensors that a run allows."""

    activation_bytes: int
    """Exact size of an activation or its gradient."""
    model_bytes: int
    """Size of the gradients of all stages together, and so an upper bound for any part of them."""
    state_bytes: int = 0
    """Size of the state of the largest stage."""
    rounded: bool = False
    """Parameters travel rounded, where they go without the optimizer's state."""
    proven: bool = False
    """What travels from stage to stage has proofs, since work is audited."""
    names: StageNames = no_names
    """Returns the names of a stage's tensors."""


def stage_names(run: RunConfig, stage_index: int, blocks: Sequence[int]) -> Collection[str]:
    """Return the names of all tensors of a stage's state, in a cut as of `RunConfig.with_blocks`.

    None if there is no such stage, or the model can't be cut like this.
    """
    if not run.allows(blocks):
        return ()
    cut = run.with_blocks(blocks)
    return state_tensors(cut, stage_index) if stage_index <= cut.stages.num_relay_stages else ()


def tensor_sizes(run: RunConfig) -> TensorSizes:
    """Return the sizes that tensors from other nodes may have."""
    sizes = sizes_of(run)
    model_bytes = count_parameters(run.model) * sizes.sum_element_bytes
    return TensorSizes(
        activation_bytes=sizes.activation_bytes,
        model_bytes=model_bytes,
        state_bytes=largest_state_bytes(run),
        rounded=run.rounded,
        proven=run.audited,
        names=partial(stage_names, run),
    )
