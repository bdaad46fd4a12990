"""`RunConfig`: the settings of a run, as all of its members share them.

The run file, the core, the trainer and the simulator take them in this form.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from decod.errors import ConfigError
from decod.run.adapter_config import AdapterConfig, AdapterKind
from decod.run.model_config import ModelConfig, ModelDtype
from decod.run.protocol_config import NO_AUDITS, AuditConfig, ProtocolConfig
from decod.run.stages_config import StagesConfig, blocks_text, stage_blocks
from decod.run.training_config import (
    ActivationsConfig,
    BatchConfig,
    OptimizerConfig,
    ReductionConfig,
    ServersConfig,
    SyncConfig,
)

_NAME = re.compile(r"[a-z0-9-]{1,32}\Z")


class Organisation(StrEnum):
    """How the members of a stage share its work."""

    PIPELINE = "pipeline"
    """Each takes whole microbatches, and keeps the stage's whole state."""
    SERVERS = "servers"
    """Servers keep the state and share the work out; clients come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that all nodes of a run must share."""

    name: str = "my-run"
    """What the run is called in `decod status`. 1 to 32 characters of a-z, 0-9 and -."""
    seed: int = 0
    """Start of everything random: initial weights and the order of the data. From 0, below 2^63."""
    organisation: Organisation = Organisation.PIPELINE
    """How the members of a stage share its work. With servers, reliable hosts (`decod join
    --server`) keep the stage's state and give out its work, and all others work for them."""
    num_iterations: int = 0
    """Iterations after which the run ends; 0 means that it goes on until it is stopped."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The language model, in the words of a Hugging Face config.json."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """What is trained of the model: all of it, or an adapter."""
    stages: StagesConfig = field(default_factory=StagesConfig)
    """How the model is cut over the hosts."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What one iteration trains on."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Applied by every stage to its own parameters."""
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    """How activations and their gradients travel between stages."""
    reduction: ReductionConfig = field(default_factory=ReductionConfig)
    """How the members of a stage add up their gradients."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """How the members of a stage keep together: at each iteration, or seldom."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    """How servers step, if stages are organised as servers."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    """Timeouts and limits. The defaults suit hosts spread over the internet."""
    audits: AuditConfig = field(default_factory=AuditConfig)
    """How much of the relays' work is done again by others, to find liars."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ConfigError(
                f"name is {ascii(self.name)[:60]}",
                why="it appears in file names and on terminals",
                fix="give 1 to 32 characters of a-z, 0-9 and -",
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(
                f"seed is {self.seed}",
                why="generators take 63 bits",
                fix="give a number from 0 to 9223372036854775807",
            )
        if not 0 <= self.num_iterations <= 1 << 40:
            raise ConfigError(
                f"num_iterations is {self.num_iterations}",
                why="it is a count, and no run reaches 2^40",
                fix="give 0 to go on until stopped, or the number of iterations",
            )

    def with_blocks(self, blocks: Sequence[int]) -> "RunConfig":
        """Return the run with another cut.

        Args:
            blocks: The number of blocks of each relay stage. None: as this run is cut.
        """
        if not blocks:
            return self
        stages = replace(self.stages, num_relay_stages=len(blocks), blocks=blocks_text(blocks))
        return replace(self, stages=stages)

    def stage_blocks(self, blocks: Sequence[int] = ()) -> tuple[range, ...]:
        """Return the blocks of every stage, stage 0 first, in a cut as of `with_blocks`.

        Raises:
            ConfigError: The model can't be cut like this.
        """
        return stage_blocks(self.model, self.with_blocks(blocks).stages)

    def num_stages(self, blocks: Sequence[int] = ()) -> int:
        """Return the number of stages in a cut as of `with_blocks`, stage 0 among them."""
        return 1 + (len(blocks) or self.stages.num_relay_stages)

    def allows(self, blocks: Sequence[int]) -> bool:
        """Return whether the model can be cut like this."""
        try:
            return not blocks or bool(self.stage_blocks(blocks))
        except ConfigError:
            return False

    @property
    def trains_all(self) -> bool:
        """Whether all parameters of the model are trained, and not only an adapter."""
        return self.adapter.kind is AdapterKind.NONE

    @property
    def num_base_parts(self) -> int:
        """Parts of the weights that are not trained: all outside the blocks, and each block. 0:
        there are none.
        """
        return 0 if self.trains_all else self.model.num_hidden_layers + 1

    @property
    def delay(self) -> int:
        """Iterations by which a step is late. Where stages have no servers, none is."""
        return self.servers.delay if self.organisation is Organisation.SERVERS else 0

    @property
    def audited(self) -> bool:
        """Whether relays' work is audited.

        It is not where members of a stage have parameters of their own, or what they contribute is
        coded: nobody can tell then what another should have computed. Nor is it where stages have
        servers: a client's work has no path to be audited along.
        """
        possible = not self.sync.steps_locally and not self.sync.compresses
        possible = possible and self.organisation is Organisation.PIPELINE
        return possible and self.audits != NO_AUDITS

    @property
    def clips(self) -> bool:
        """Whether a step scales the gradient by its norm over all stages."""
        return self.optimizer.clip_norm > 0 and not self.sync.steps_locally

    @property
    def rounded(self) -> bool:
        """Whether parameters are rounded: without the optimizer's state, they hash otherwise."""
        return self.model.dtype is ModelDtype.BFLOAT16
