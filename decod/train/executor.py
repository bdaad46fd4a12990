"""All computations of one stage. No sockets, and no clocks but torch's.

A stage begins with `build` or `load`. In each iteration, microbatches run forward and backward
(`decod.train.passes`), and their gradients add up (`decod.train.gradient_sum`). Then follow
`gather`, `propose` and `commit`, or `reset` if the iteration is repeated. The weights before and
after a step lie in `decod.train.committed_state`.

All parameters lie in one flat buffer in sorted order of names. So do gradients and moments. A sum,
a hash or a snapshot is then one pass over memory. The module's parameters are views of the buffer.

Legend: P parameters of the stage.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decod.clocks import Stopwatch
from decod.compression.plan import StagePlans
from decod.errors import TrainingError
from decod.model.adapter import hold, stage_of
from decod.model.shape import trained_shapes, whole_matrices
from decod.model.stage import Stage
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.train.checkpoint.entries import StateBytes, TensorEntry
from decod.train.committed_state import CommittedState, Proposal, SnapshotLayout, take_snapshot
from decod.train.diloco import DiLoCo
from decod.train.exchange import Exchange, Exchanges
from decod.train.executor_config import ExecutorConfig
from decod.train.gradient_sum import GradientSum
from decod.train.layout import Layout, SharedState
from decod.train.optimizers import clip_factor, learning_rate
from decod.train.passes import Passes
from decod.train.ranks import NO_RANKS, OtherRanks, make_shards, no_stage_built
from decod.train.reduction import (
    check_weights_total,
    divisor,
    square_sum,
)
from decod.train.start import (
    CheckpointSource,
    StateForm,
    blob_pieces,
    checkpoint_state,
    frozen_weights,
    initial_weights,
    loaded_state,
    mixed_weights,
    pieces_of,
)
from decod.train.token_source import TokenSource
from decod.train.update_rule import (
    Averaged,
    DelayedStep,
    ParametersOnly,
    StepEveryIteration,
    StepInput,
    UpdateRule,
)

if TYPE_CHECKING:
    from decod.train.weight_shards import Shards


@dataclass(frozen=True, slots=True)
class StageReport:
    """Description of a built stage."""

    num_parameters: int
    parameter_bytes: int
    """Size of the stage's gradient, in the dtype of its sum."""
    hash: str
    """Hash of the committed weights. See `Layout.hash`."""
    activation_bytes: int
    """Size of one microbatch's activation on its way between stages."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The averages that a step comes from."""

    num_ahead: int = 0
    """So many parts, the first ones, are of an average that has travelled."""
    spec: AverageSpec = WHOLE
    """The plan of the iteration's own average."""
    ahead_spec: AverageSpec = WHOLE
    """The plan of the average that has travelled."""
    missed: tuple[int, ...] = ()
    """The parts of it that lack this member's contribution."""
    missed_now: tuple[int, ...] = ()
    """The parts of the iteration's own average that lack it."""
    ends_phase: bool = True
    """Whether the iteration ends a local phase. If not, it has no average of its own."""


OWN_AVERAGE = Sources()


@dataclass(slots=True)
class _Built:
    """The parts of a built stage."""

    stage: Stage
    state: CommittedState[Any]
    gradient: GradientSum
    passes: Passes
    now: Exchanges
    """Averages of the iteration in hand."""
    ahead: Exchanges
    """Averages that travel while members train on."""
    shards: "Shards | None" = None
    """This device's part of the module, if that is spread over several."""
    used: list[Callable[[], None]] = field(default_factory=list)
    """What to do when the proposed step is final: each average keeps what it lacks."""


class StageExecutor:
    """Runs one stage. Errors leave the state unchanged, unless they say that it is spoiled.

    Args:
        config: The run, and the device.
        tokens: Source of tokens, needed only on stage 0.
        init_dir: Folder of a model to start from. None: weights are built from the seed.
        checkpoint: State to resume from, weights and moments. None: the run begins anew.
        watch: Measures copies of tensors to the device.
        rule: What a step does. None: as the run says.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        tokens: TokenSource | None = None,
        init_dir: Path | None = None,
        checkpoint: CheckpointSource | None = None,
        watch: Stopwatch | None = None,
        rule: UpdateRule[Any] | None = None,
    ) -> None:
        self.config = config
        self._stages = config.run.stages
        self.tokens = tokens
        self.rule = rule or make_rule(config)
        self._watch = watch or Stopwatch()
        self.effective_rank = 0.0
        """Directions of the newest average of the proposed step. 0: unknown."""
        self.metrics: dict[str, float] = {}
        """Numbers of the proposed step for people, by their names in
        `decod.journal.step_metrics`."""
        self.init_dir = init_dir
        self.checkpoint = checkpoint
        self.ranks: OtherRanks = NO_RANKS
        self._parts: _Built | None = None
        self._computed_with_P: Tensor | None = None

    # Building

    def build(
        self, stage_index: int, *, trial: bool = False, blocks: Sequence[int] = ()
    ) -> StageReport:
        """Build a stage in the run's first state. Any earlier stage is forgotten.

        Args:
            stage_index: The stage.
            trial: It is only to be measured: weights that are not trained are zeros.
            blocks: The number of blocks of each relay stage. None: as the run file says.

        Raises:
            ConfigError: The model cannot be cut like this.
            DataError: The model folder cannot be read or holds another model.
            CheckpointError: The checkpoint cannot be read or does not fit.
            NonFiniteError: The model in the folder is not finite.
            TrainingError: There is no such stage.
        """
        config = self.config = self.config.with_blocks(self._stages, blocks)
        if not 0 <= stage_index <= config.run.stages.num_relay_stages:
            raise TrainingError(
                f"stage_index is {stage_index}",
                why=f"stages are counted from 0 to {config.run.stages.num_relay_stages}",
                fix="check the run file",
            )
        stage = stage_of(config.run, stage_index)
        whole = whole_matrices(config.run, stage_index)
        layout = Layout(trained_shapes(config.run, stage_index), whole)
        state = CommittedState(layout, self.rule, *first_state(self, layout))
        self.ranks.build(stage_index, trial=trial, blocks=blocks)
        # Free before the next one's memory is taken.
        self._parts = self._computed_with_P = None
        shards = make_shards(config, stage, layout)
        base = None if trial else config.base
        hold(stage, config.run, frozen_weights(config.run, stage_index, base), config.device)
        self._place(stage, state, shards)
        sum_P = torch.zeros_like(state.committed.weights, device=config.sum_device)
        gradient = GradientSum(stage, layout, sum_P, self.ranks.add_sums, shards)
        passes = Passes(config, stage, state, gradient, tokens=self.tokens, watch=self._watch)
        exchanges = make_exchanges(config, layout), make_exchanges(config, layout)
        self._parts = _Built(stage, state, gradient, passes, *exchanges, shards)
        return StageReport(
            num_parameters=layout.num_elements,
            parameter_bytes=layout.num_elements * sum_P.element_size(),
            hash=state.hash,
            activation_bytes=config.activation_bytes,
        )

    def _place(self, stage: Stage, state: CommittedState[Any], shards: "Shards | None") -> None:
        """Point the module at the committed weights, and those of the other devices, too."""
        weights_P = state.committed.weights
        if shards is None:
            weights_P = in_module(self.config, weights_P, self._computed_with_P)
            self._computed_with_P = weights_P
            stage.place(dict(state.layout.views(weights_P)))
        self.ranks.take_weights(weights_P, shards)

    @property
    def _built(self) -> _Built:
        if self._parts is None:
            raise no_stage_built()
        return self._parts

    @property
    def passes(self) -> Passes:
        """The passes of the built stage."""
        return self._built.passes

    @property
    def num_elements(self) -> int:
        """Number of parameters of the built stage."""
        return self._built.state.layout.num_elements

    @property
    def anchor(self) -> int:
        """The last committed iteration that ended with an average; 0 before the first."""
        return self._built.state.anchor

    def measuring(self) -> AbstractContextManager[Stage]:
        """Lend the module for trial runs, whose gradients are thrown away."""
        self._built.state.require_settled()
        return self._built.gradient.lend()

    # State

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the stage has in common, by name, float32 or wider.

        They are views: do not change.
        """
        state = self._built.state
        return dict(state.layout.views(state.shared.weights))

    def snapshot(self, *, with_optimizer: bool, ahead: bool = False) -> SnapshotLayout:
        """Return a description of what the stage has in common, even while a step is proposed.

        `ahead`: of what `step_ahead` has computed, instead.
        """
        state = self._built.state
        dtype = self.config.dtype
        shared = self.rule.shared(state.ahead) if ahead else state.shared
        return take_snapshot(shared, state.layout, dtype, with_optimizer=with_optimizer)

    def load(
        self, blobs: Sequence[tuple[StateBytes, Sequence[TensorEntry]]], iteration: int
    ) -> str:
        """Replace the committed state. Drop microbatches, gradients and a proposed step.

        Args:
            blobs: In memory or in files, with their expected content. Not changed. Together they
                hold the stage.
            iteration: The iteration after which the state was taken.

        Returns:
            The hash of the weights.

        Raises:
            CheckpointError: Something does not fit. The state is unchanged.
        """
        state = self._built.state
        state.free_spare()
        form = form_of(self, state.layout)
        entries = [entry for _, each in blobs for entry in each]
        return self._replace(loaded_state(entries, pieces_of(blobs), form), iteration)

    def mix(
        self, donors: Sequence[tuple[int, StateBytes, Sequence[TensorEntry]]], iteration: int
    ) -> str:
        """Replace the committed weights by the mean of other stages'. The moments become zero.

        An adapter begins anew instead: the mean of two products is not the product of two means.

        Args:
            donors: Stage index, blob (not changed) and expected content of each.
            iteration: The iteration after which the states were taken.

        Returns:
            The hash of the weights.

        Raises:
            CheckpointError: Something does not fit. The state is unchanged.
        """
        run = self.config.run
        own = self._built.state.layout
        if not run.trains_all:
            return self._replace(_begun(self, form_of(self, own)), iteration)
        states = list[tuple[Layout, Tensor]]()
        for stage_index, blob, entries in donors:
            layout = Layout(trained_shapes(run, stage_index))
            form = replace(form_of(self, layout), device="cpu")
            states.append((layout, loaded_state(entries, blob_pieces(blob), form).weights))
        weights_P = mixed_weights(own, states)
        return self._replace(SharedState.without_moments(weights_P, self.rule.prefixes), iteration)

    def return_to_anchor(self) -> None:
        """Give up what this member has learnt by itself since the last average."""
        state = self._built.state
        self._replace(state.shared, state.anchor)

    def _replace(self, shared: SharedState, iteration: int) -> str:
        """Make another state the committed one. Return its hash."""
        built = self._built
        layout = self._built.state.layout
        built.state.replace(shared.to(self.config.state_device), iteration)
        built.now, built.ahead = (make_exchanges(self.config, layout) for _ in range(2))
        self._begin()
        return built.state.hash

    # Iterations

    def reset(self) -> None:
        """Restart the iteration: forget held microbatches, gradients and a proposed step."""
        built = self._built
        built.state.retract()
        built.passes.clear()
        built.gradient.clear()
        self.ranks.reset()

    def _begin(self) -> None:
        """Begin an iteration with another committed state."""
        self.reset()
        self._place(self._built.stage, self._built.state, self._built.shards)

    def exchange(self, spec: AverageSpec = WHOLE, *, ahead: bool = False) -> Exchange:
        """Return this member's part in an average. `ahead`: it travels while members train on."""
        return (self._built.ahead if ahead else self._built.now).of(spec)

    def gather(
        self,
        num_parts: int,
        iteration: int | None = None,
        *,
        spec: AverageSpec = WHOLE,
        ahead: bool = False,
    ) -> list[Tensor]:
        """Begin an average. Return this member's contribution, cut into parts as they travel.

        Args:
            num_parts: 0: this member contributes nothing.
            iteration: The one that ends with the average. None: that after the last committed.
            spec: What the average is of, and how it travels.
            ahead: The average travels: its iteration is committed.

        Returns:
            Tensors on the device that may share memory with the sum: copy them out at once.

        Raises:
            NonFiniteError: The sum holds NaN or infinity, or a backward pass failed halfway. Only
                `reset` helps.
            TrainingError: There is no contribution to an average that travels.
        """
        committed = self._built.state.committed
        iteration = self._built.state.iteration + 1 if iteration is None else iteration
        guide_V = self.rule.guide(committed)[self._built.now.here(spec)]
        if not num_parts:
            sum_V = torch.zeros_like(guide_V)
        elif ahead:
            sum_V = self.rule.sending(committed)
        else:
            sum_V = self._contribution(iteration, spec)
        exchange = self.exchange(spec, ahead=ahead)
        exchange.begin(sum_V, guide_V, iteration)
        return exchange.parts(0, num_parts, ()) if num_parts else []

    def _contribution(self, iteration: int, spec: AverageSpec = WHOLE) -> Tensor:
        state = self._built.state
        new = state.buffers_for(iteration)
        step = self._step_input(iteration)
        step = replace(step, own=self._averaged(spec))
        contribution_V: Tensor = self.rule.contribution(state.committed, new, step)
        return contribution_V.to(self.config.state_device)

    def _averaged(self, spec: AverageSpec, mean_V: Tensor | None = None) -> Averaged:
        return Averaged(self._built.now.here(spec), spec.fragment, mean_V)

    def _step_input(self, iteration: int) -> StepInput:
        gradient = self._built.gradient
        layout = self._built.state.layout
        gradient_P = gradient.whole()
        return StepInput(gradient_P, gradient.num_microbatches, iteration, layout.segments())

    def square_sum(self, mean_N: Tensor) -> float:
        """Return the sum of squares of an average; 0 if the run does not clip gradients.

        Raises:
            NonFiniteError: The sum is not finite.
        """
        clips = self.config.run.optimizer.clip_norm and not self.config.run.sync.steps_locally
        return square_sum(mean_N) if clips else 0.0

    def own_mean(
        self, weights_total: int, iteration: int | None = None, spec: AverageSpec = WHOLE
    ) -> Tensor:
        """Return the average of a node that is alone in its roster, (V,).

        Args:
            weights_total: Microbatches in this node's own sum.
            iteration: As for `gather`.
            spec: As for `gather`.

        Raises:
            NonFiniteError: The sum holds NaN or infinity.
        """
        check_weights_total(weights_total)
        iteration = self._built.state.iteration + 1 if iteration is None else iteration
        sum_V = self._contribution(iteration, spec)
        return sum_V / divisor(weights_total, sum_V)

    def propose(
        self,
        iteration: int,
        parts_N: Sequence[Tensor],
        *,
        weights_total: int | None = None,
        gradient_norm: float = 0.0,
        share: float = 1.0,
        how: Sources = OWN_AVERAGE,
    ) -> str:
        """Compute one optimizer step beside the committed state.

        A second proposal, for instance with a smaller roster, replaces the first.

        Args:
            iteration: The iteration that the step ends, from 1; later than the last committed.
            parts_N: All reduced parts in order; empty if this node is alone in its roster.
            weights_total: Microbatches in this node's own gradient; only without parts.
            gradient_norm: Norm of the whole model's average, if the run clips the gradient.
            share: Which part of the batch's positions have a target. The average is over all
                positions, and the gradient that over the targets: 1 / share times as long.
            how: Which average the parts are of. Without parts of its own, nor a weight, the
                iteration's average will travel.

        Returns:
            Hash of the weights after the step.

        Raises:
            NonFiniteError: Gradient or weights after the step are not finite.
            ShapeError: The parts do not make up the stage's gradient.
            TrainingError: The iteration is already committed.
        """
        built = self._built
        own = self._averaged(how.spec)
        delayed = self._averaged(how.ahead_spec)
        ahead_N = parts_N[: how.num_ahead]
        own_N = parts_N[how.num_ahead :]
        built.used = []
        self.effective_rank = 0.0
        self._measure(iteration)
        if ahead_N:
            exchange = self.exchange(how.ahead_spec, ahead=True)
            delayed = replace(delayed, mean=exchange.average(ahead_N, built.state.anchor))
            self._will_use(exchange, len(ahead_N), how.missed)
        if own_N or weights_total != 0 or not self.config.run.sync.overlap:
            assert how.ends_phase, "only an average that has travelled counts amid a phase"
            mean_V = self._mean(iteration, own_N, weights_total, how.spec)
            if share != 1:
                mean_V.div_(share)
            if (factor := clip_factor(self.config.run.optimizer, gradient_norm / share)) < 1:
                mean_V.mul_(factor)
            own = replace(own, mean=mean_V)
        if own_N:
            self._will_use(self.exchange(how.spec), len(own_N), how.missed_now)
        state = built.state
        new = state.buffers_for(iteration)
        step = self._step_input(iteration)
        step = replace(step, own=own, delayed=delayed, ends_phase=how.ends_phase)
        self.rule.average(state.committed, new, step)
        return state.propose(Proposal(iteration, new, averaged=True))

    def _measure(self, iteration: int) -> None:
        """Begin the metrics of a step."""
        rate = learning_rate(self.config.run.optimizer, iteration)
        self.metrics = {"learning_rate": rate}

    def _will_use(self, exchange: Exchange, num_means: int, missed: Sequence[int]) -> None:
        """Note that the proposed step comes from an average."""
        num_parts = num_means // self.config.run.sync.num_phases
        self._built.used.append(partial(exchange.used, missed, num_parts))
        self.effective_rank = self.effective_rank or exchange.effective_rank

    def step_ahead(self, iteration: int) -> None:
        """Compute what is known of an iteration's step when it begins, where steps are late.

        Args:
            iteration: The one that begins, from 1.

        Raises:
            TrainingError: It is already committed.
        """
        assert isinstance(self.rule, DelayedStep), "steps are not late"
        state = self._built.state
        new = state.buffers_for(iteration)
        self.rule.ahead(state.committed, new, iteration, state.layout.segments())
        state.ahead = new

    def step_locally(self, iteration: int) -> str:
        """Compute the end of an iteration without an average, beside the committed state.

        Args:
            iteration: The iteration, from 1; later than the last committed.

        Returns:
            Hash of the weights that all members of the stage have in common.

        Raises:
            NonFiniteError: A gradient, or a weight after the step, is not finite.
            TrainingError: The iteration is already committed, or the rule needs an average.
        """
        self._measure(iteration)
        state = self._built.state
        step = self._step_input(iteration)
        new = state.buffers_for(iteration)
        self.rule.local(state.committed, new, step)
        return state.propose(Proposal(iteration, new, averaged=False))

    def _mean(
        self,
        iteration: int,
        means_N: Sequence[Tensor],
        weights_total: int | None,
        spec: AverageSpec,
    ) -> Tensor:
        """Return the average of an iteration, (V,), in new memory."""
        if not means_N:
            return self.own_mean(weights_total or 0, iteration, spec)
        return self.exchange(spec).average(means_N, iteration)

    def retract(self) -> None:
        """Undo a proposed step. Microbatches and gradients stay, and more may be added."""
        self._built.state.retract()

    def commit(self, iteration: int) -> None:
        """Make the proposed step final. Free the iteration's microbatches and gradients.

        Raises:
            TrainingError: This iteration is not the proposed one.
        """
        built = self._built
        built.state.commit(iteration)
        for use in built.used:
            use()
        built.used = []
        self._begin()


def in_module(config: ExecutorConfig, weights_P: Tensor, before_P: Tensor | None) -> Tensor:
    """Return a step's weights as the module computes with them: cast to its dtype and device.

    Args:
        config: Names these.
        weights_P: The committed weights. They are returned themselves if they fit.
        before_P: Result of the step before, which is overwritten. None: take new memory.
    """
    if config.dtype == weights_P.dtype and config.device == config.state_device:
        return weights_P
    if before_P is None:
        before_P = torch.empty_like(weights_P, dtype=config.dtype, device=config.device)
    return before_P.copy_(weights_P)


def form_of(executor: StageExecutor, layout: Layout) -> StateForm:
    """Return the form of the state of a stage, where steps are taken."""
    config = executor.config
    return StateForm(layout, config.dtype, executor.rule.prefixes, config.state_device)


def first_state(executor: StageExecutor, layout: Layout) -> tuple[SharedState, int]:
    """Return the run's first state, where steps are taken, and its iteration."""
    form = form_of(executor, layout)
    if executor.checkpoint is not None:
        return checkpoint_state(executor.checkpoint, form)
    return _begun(executor, form), 0


def _begun(executor: StageExecutor, form: StateForm) -> SharedState:
    """Return a state before the first step: from the seed, or from the folder of a model."""
    run, folder = executor.config.run, executor.init_dir
    weights_P = initial_weights(run.model, form, seed=run.seed, folder=folder)
    return SharedState.without_moments(weights_P, form.prefixes)


def make_exchanges(config: ExecutorConfig, layout: Layout) -> Exchanges:
    """Return a member's part in a stage's averages."""
    wide = str(config.wide).removeprefix("torch.")
    shapes = tuple(layout.shapes.values())
    sync = config.run.sync
    plans = StagePlans(shapes, sync.fragments, sync.compression_config, wide=wide)
    return Exchanges(config.exchange, plans)


def make_rule(config: ExecutorConfig) -> UpdateRule[Any]:
    """Return what a step does in a run."""
    if config.is_client:
        return ParametersOnly(config.run.delay)
    if config.run.sync.steps_locally:
        return DiLoCo(config.run.optimizer, config.run.sync)
    if config.run.delay:
        return DelayedStep(config.run.optimizer)
    return StepEveryIteration(config.run.optimizer)
