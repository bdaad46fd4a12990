"""One stage's memory: weights, moments, gradients and held microbatches.

All parameters lie in one flat buffer in sorted order of names. So do gradients and moments. A sum,
a hash or a snapshot is then one pass over memory. The module's parameters are views of the buffer.

Legend: P parameters of the stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decod.data.params import BatchConfig
from decod.errors import TrainingError
from decod.ids import MicrobatchId
from decod.model.config import ModelConfig, StagesConfig
from decod.model.later import WeightProducts
from decod.model.shape import stage_shapes
from decod.model.stage import TORCH_DTYPES, Stage, empty_stage
from decod.stopwatch import Stopwatch
from decod.train.adamw import AdamWState
from decod.train.checkpoint.entries import TensorEntry
from decod.train.layout import Layout
from decod.train.mixing import mixed_weights
from decod.train.output import Output
from decod.train.params import OptimizerConfig, ReductionConfig
from decod.train.snapshot import SnapshotLayout, read_state, take_snapshot
from decod.train.start import CheckpointSource, checkpoint_state, initial_weights
from decod.train.token_source import TokenSource
from decod.train.update_rule import AdamWEveryIteration, UpdateRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """A compute process's knowledge of the run and its host."""

    model: ModelConfig
    stages: StagesConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    reduction: ReductionConfig
    seed: int
    device: str = "cpu"
    """A torch device: `cpu` or `cuda:0`."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """Description of a built stage."""

    num_parameters: int
    parameter_bytes: int
    """Size of the stage's gradient, in the dtype of its sum."""
    hash: str
    """Hash of the committed weights. See `Layout.hash`."""
    activation_bytes: int
    """Size of one microbatch's activation between stages."""


@dataclass(frozen=True, slots=True)
class SavedPass:
    """The part of a microbatch's forward pass that its backward pass needs."""

    output: Output
    entry: Tensor | None
    """The input whose gradient the previous stage waits for. None on stage 0."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The state after a step that is not final."""

    iteration: int
    state: AdamWState
    averaged: bool
    """Whether the step came from an average."""


class StageMemory:
    """Builds, loads, resets and hands out a stage's state. Computes no passes.

    Args:
        config: The run, and the device.
        tokens: Source of tokens, needed only on stage 0.
        init_dir: Folder of a model to start from. None: weights are built from the seed.
        checkpoint: State to resume from, weights and moments. None: the run begins anew.
        watch: Measures copies of tensors to the device.
        rule: What a step does. None: AdamW in every iteration.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        tokens: TokenSource | None = None,
        init_dir: Path | None = None,
        checkpoint: CheckpointSource | None = None,
        watch: Stopwatch | None = None,
        rule: UpdateRule | None = None,
    ) -> None:
        self.config = config
        self.rule = rule or AdamWEveryIteration(config.optimizer)
        self.watch = watch or Stopwatch()
        self.tokens = tokens
        self.init_dir = init_dir
        self.checkpoint = checkpoint
        self.dtype = TORCH_DTYPES[config.model.dtype]
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        """Dtype of sums, moments and master weights."""
        self.wire_dtype: torch.dtype = (
            torch.float64
            if self.dtype == torch.float64
            else getattr(torch, config.reduction.wire_dtype.value)
        )
        batch = config.batch
        self.activation_shape = (
            batch.microbatch_size,
            batch.sequence_length,
            config.model.hidden_size,
        )
        self.iteration = 0
        """The last committed iteration; 0 before the first."""
        self._stage: Stage | None = None

    # Building

    def build(self, stage_index: int) -> StageReport:
        """Build a stage in the run's first state. Any earlier stage is forgotten.

        Raises:
            ConfigError: The model cannot be cut like this.
            DataError: The model folder cannot be read or holds another model.
            CheckpointError: The checkpoint cannot be read or does not fit.
            NonFiniteError: The model in the folder is not finite.
            TrainingError: There is no such stage.
        """
        config = self.config
        if not 0 <= stage_index <= config.stages.num_relay_stages:
            raise TrainingError(
                f"stage_index is {stage_index}",
                why=f"stages are counted from 0 to {config.stages.num_relay_stages}",
                fix="check the run file",
            )
        stage = empty_stage(config.model, config.stages, stage_index)
        layout = Layout(stage_shapes(config.model, config.stages, stage_index))
        state, iteration = self._first_state(layout)
        self._install(stage, layout, state)
        self.iteration = iteration
        return StageReport(
            num_parameters=layout.num_elements,
            parameter_bytes=layout.num_elements * state.weights.element_size(),
            hash=layout.hash(state.weights),
            activation_bytes=torch.Size(self.activation_shape).numel() * self.dtype.itemsize,
        )

    def _first_state(self, layout: Layout) -> tuple[AdamWState, int]:
        """Return the run's first state, on the device, and its iteration."""
        if self.checkpoint is not None:
            state, iteration = checkpoint_state(self.checkpoint, layout, self.dtype)
            return self._on_device(state), iteration
        config = self.config
        weights_P = initial_weights(
            config.model, layout, seed=config.seed, dtype=self.wide, folder=self.init_dir
        ).to(config.device)
        zeros_P = torch.zeros_like(weights_P)
        return AdamWState(weights_P, zeros_P, zeros_P.clone()), 0

    def _on_device(self, state: AdamWState) -> AdamWState:
        device = self.config.device
        return AdamWState(state.weights.to(device), state.mean.to(device), state.square.to(device))

    def _install(self, stage: Stage, layout: Layout, state: AdamWState) -> None:
        self._layout = layout
        self._segments = layout.segments()
        self._committed = state
        self._spare: AdamWState | None = None
        """Buffers for the next proposed step."""
        self._proposed: Proposal | None = None
        self._gradient_P = torch.zeros_like(state.weights)
        self._held: dict[MicrobatchId, SavedPass] = {}
        self._tokens: dict[MicrobatchId, Tensor] = {}
        self._contributed: set[tuple[str, MicrobatchId]] = set()
        self._spoiled: str | None = None
        self._measuring = False
        self.iteration = 0
        self._stage = stage
        self._point_module_at_weights()
        sums = list[tuple[Tensor, Tensor]]()
        for name, parameter in stage.parameters_by_name().items():
            target = self._gradient_P[layout.slices[name]].view(layout.shapes[name])
            sums.append((parameter, target))
            if self.dtype == self.wide:
                # Autograd adds into an existing gradient in place.
                parameter.grad = target
            else:
                # A bfloat16 sum would lose many small terms, so each goes to the float32 sum at
                # once.
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._mover(target)
                )
        self._later = WeightProducts(sums)
        stage.later = self._later

    def _mover(self, target: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            # A postponed product leaves no gradient here.
            if not self._measuring and parameter.grad is not None:
                target.add_(parameter.grad)
            parameter.grad = None

        return move

    def _point_module_at_weights(self) -> None:
        stage = self._built()
        weights_P = self._committed.weights
        stage.place(dict(self._layout.views(weights_P.to(self.dtype))))

    def _built(self) -> Stage:
        if self._stage is None:
            raise TrainingError(
                "no stage is built", why="there is nothing to compute with", fix="build one first"
            )
        return self._stage

    @property
    def num_elements(self) -> int:
        """Number of parameters of the built stage."""
        self._built()
        return self._layout.num_elements

    def reset(self) -> None:
        """Restart the iteration: forget held microbatches, gradients and a proposed step."""
        self._built()
        self._proposed = None
        self._held.clear()
        self._tokens.clear()
        self._contributed.clear()
        self._later.clear()
        self._gradient_P.zero_()
        self._spoiled = None

    # State

    def weights(self) -> dict[str, Tensor]:
        """Return the committed weights by name, float32 or wider. They are views: do not change."""
        self._built()
        return dict(self._layout.views(self._committed.weights))

    def snapshot(self, *, with_optimizer: bool) -> SnapshotLayout:
        """Return a description of the committed state, even while a step is proposed."""
        self._built()
        return take_snapshot(
            self._committed, self._layout, self.dtype, with_optimizer=with_optimizer
        )

    def load(self, blob: Tensor, entries: Sequence[TensorEntry], iteration: int) -> str:
        """Replace the committed state. Drop microbatches, gradients and a proposed step.

        Args:
            blob: uint8 on CPU, not changed.
            entries: Expected content of the blob.
            iteration: The iteration after which the state was taken.

        Returns:
            The hash of the weights.

        Raises:
            CheckpointError: Something does not fit. The state is unchanged.
        """
        self._built()
        return self._adopt(read_state(blob, entries, self._layout, self.dtype), iteration)

    def mix(
        self, donors: Sequence[tuple[int, Tensor, Sequence[TensorEntry]]], iteration: int
    ) -> str:
        """Replace the committed weights by the mean of other stages'. The moments become zero.

        Args:
            donors: Stage index, blob (uint8 on CPU, not changed) and expected content of each.
            iteration: The iteration after which the states were taken.

        Returns:
            The hash of the weights.

        Raises:
            CheckpointError: Something does not fit. The state is unchanged.
        """
        self._built()
        config, states = self.config, list[tuple[Layout, Tensor]]()
        for stage_index, blob, entries in donors:
            layout = Layout(stage_shapes(config.model, config.stages, stage_index))
            states.append((layout, read_state(blob, entries, layout, self.dtype).weights))
        weights_P = mixed_weights(self._layout, states)
        zeros_P = torch.zeros_like(weights_P)
        return self._adopt(AdamWState(weights_P, zeros_P, zeros_P.clone()), iteration)

    def _adopt(self, state: AdamWState, iteration: int) -> str:
        """Make another state the committed one. Return the hash of its weights."""
        self._committed = self._on_device(state)
        self.iteration = iteration
        self.reset()
        self._point_module_at_weights()
        return self._layout.hash(self._committed.weights)
