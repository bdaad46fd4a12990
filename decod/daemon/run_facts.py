"""A node's part in a run, and what follows from its manifest: facts, and sizes of tensors."""

from dataclasses import dataclass, field
from pathlib import Path

from decod.config.schema import (
    Manifest,
    RunConfig,
    activation_size_bytes,
    audits_of,
    count_parameters,
    delay_of,
    formats_of,
    moments_of,
    plans_of,
    wire_element_bytes,
)
from decod.daemon.incoming import TensorSizes
from decod.daemon.run_clock import RunClock
from decod.driver.jobs import Sizes
from decod.ids import NodeId, RunId
from decod.membership.credential import Statement
from decod.membership.papers import Membership
from decod.model.config import ModelDtype
from decod.protocol.core.identity import (
    AverageFormat,
    Organisation,
    RunFacts,
    RunShape,
    SyncFacts,
)
from decod.protocol.core.params import NO_AUDITS
from decod.protocol.core.view import Duty, Role
from decod.train.checkpoint.entries import size_bytes_of, state_tensors
from decod.train.checkpoint.initial import ChunkHashes
from decod.train.checkpoint.places import Folder
from decod.train.params import SyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """This node's part in the run, as its command decided."""

    membership: Membership
    run_id: RunId
    manifest: Manifest
    charter: Statement
    """A data node's word that the two belong together."""
    leader: NodeId
    leader_address: str = ""
    """Empty at the leader itself."""
    observed_address: str = ""
    """This host's IP address as the first peer saw it; empty if it is not to be used."""
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
    clock: RunClock = field(default_factory=RunClock)

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
    def has_several_data_nodes(self) -> bool:
        return self.run.batch.num_data_nodes > 1

    @property
    def beginning(self) -> str:
        """The event by which this node's life in the run begins."""
        if self.leader != self.membership.node_id:
            return "run.entered"
        return "run.started" if self.checkpoint_dir is None else "run.resumed"

    @property
    def gives_initial(self) -> bool:
        """Whether all others take their initial state from this node."""
        return self.init_dir is not None or self.checkpoint_dir is not None


def facts_of(manifest: Manifest) -> RunFacts:
    """Return the facts of a manifest that the core needs."""
    run = manifest.run
    dtype = run.model.dtype
    return RunFacts(
        shape=RunShape(
            num_relay_stages=run.stages.num_relay_stages,
            num_data_nodes=run.batch.num_data_nodes,
            num_iterations=run.num_iterations,
            manifest_sha256=manifest.sha256,
            start_iteration=manifest.start_iteration,
            audits=audits_of(run),
            organisation=run.organisation,
            delay=delay_of(run),
            sync=sync_facts_of(run.sync, formats_of(run)),
        ),
        num_microbatches=run.batch.num_microbatches,
        activation_size_bytes=activation_size_bytes(run),
        clips=run.optimizer.clip_norm > 0 and not run.sync.steps_locally,
        rounded=dtype.num_bytes < (8 if dtype is ModelDtype.FLOAT64 else 4),
        initial_from_leader=manifest.initial_weights != "seed",
    )


def sync_facts_of(sync: SyncConfig, formats: tuple[AverageFormat, ...] = ()) -> SyncFacts:
    """Return what the core needs to know of a run's averages."""
    return SyncFacts(
        every=sync.every,
        steps_locally=sync.steps_locally,
        num_phases=sync.num_phases,
        compresses=sync.compression_config is not None,
        overlaps=sync.overlap,
        num_fragments=sync.fragments,
        quorum_ratio=sync.quorum,
        adapt=sync.adapt,
        rank=sync.rank if sync.compression.has_factors else 0,
        formats=formats,
        rereads=sync.reread,
    )


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
        of_stages=plans_of(run),
    )


def largest_state_bytes(run: RunConfig) -> int:
    """Return the size of the state of the largest stage."""
    moments, indices = moments_of(run), range(run.stages.num_relay_stages + 1)
    states = (state_tensors(run.model, run.stages, index, moments) for index in indices)
    return max(map(size_bytes_of, states))


def tensor_sizes(run: RunConfig) -> TensorSizes:
    """Return the sizes that tensors from other nodes may have."""
    sizes = sizes_of(run)
    model_bytes = count_parameters(run.model) * sizes.sum_element_bytes
    dtype = run.model.dtype
    return TensorSizes(
        activation_bytes=sizes.activation_bytes,
        model_bytes=model_bytes,
        state_bytes=largest_state_bytes(run),
        rounded=dtype.num_bytes < sizes.sum_element_bytes,
        proven=audits_of(run) != NO_AUDITS,
    )
