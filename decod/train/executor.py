"""One stage's tensors and everything that is done with them. No sockets, no clocks but torch's.

A stage's life: `build` (or `load`), then per iteration: microbatches forward and backward (their
gradients add up), `gather`, `reduce_part`, `propose`, and `commit`, or `reset` when the iteration
is repeated. A microbatch adds to the gradient once, however often it is sent: a repeated backward
gives the same gradient to the sender and adds nothing.

All parameters lie in one flat buffer in sorted order of names, and so do gradients and moments: a
sum, a hash or a snapshot is one pass over memory. A proposed step is written beside the committed
state; undoing it forgets it.

Legend: B sequences, T positions, D width, P parameters of the stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from decod.data.params import BatchConfig
from decod.errors import DataError, NonFiniteError, ShapeError, TrainingError
from decod.ids import MicrobatchId
from decod.model.config import ModelConfig, StagesConfig
from decod.model.folder import read_config, read_weights
from decod.model.initial import initial_weight
from decod.model.shape import stage_shapes
from decod.model.stage import TORCH_DTYPES, FirstStage, Stage, empty_stage
from decod.train.adamw import StageState, adamw_step
from decod.train.layout import Layout
from decod.train.params import OptimizerConfig, ReductionConfig
from decod.train.part import part_sizes
from decod.train.reduction import check_weights_total, cut, is_finite, reduce_part
from decod.train.snapshot import Snapshot, TensorEntry, read_state, take_snapshot


class TokenSource(Protocol):
    """Where a data node's tokens come from."""

    def microbatch(
        self, mb: MicrobatchId, batch: BatchConfig, seed: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        """Return (B, T + 1) token ids: a pure function of the arguments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """What a compute process must know about the run and its host."""

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
    """What was built."""

    num_parameters: int
    parameter_bytes: int
    """Bytes of the stage's gradient in the dtype in which it is summed."""
    hash: str
    """Of the committed weights. See `Layout.hash`."""
    activation_bytes: int
    """Bytes of one microbatch's activation between stages."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What is kept of a microbatch between its forward and its backward."""

    edge: GradientEdge
    """Where backward starts. Unlike the output itself it does not keep the output's memory."""
    entry: Tensor | None
    """The input whose gradient the previous stage waits for; None on stage 0."""


class StageExecutor:
    """Runs one stage. Errors leave the state as it was, unless they say that it is spoiled.

    Args:
        config: The run, and the device.
        tokens: Needed on stage 0 only.
        init_dir: Folder of a model to start from; None builds weights from the seed.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        tokens: TokenSource | None = None,
        init_dir: Path | None = None,
    ) -> None:
        self.config = config
        self.tokens = tokens
        self.init_dir = init_dir
        self.dtype = TORCH_DTYPES[config.model.dtype]
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        """Of sums, moments and master weights."""
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
        """Build a stage in its initial state; what was built before is forgotten.

        Raises:
            ConfigError: The model cannot be cut like this.
            DataError: The folder to start from cannot be read or holds another model.
            TrainingError: There is no such stage, or it needs tokens and has no source.
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
        weights_P = self._initial_weights(layout).to(config.device)
        zeros_P = torch.zeros_like(weights_P)
        self._install(stage, layout, StageState(weights_P, zeros_P, zeros_P.clone()))
        return StageReport(
            num_parameters=layout.num_elements,
            parameter_bytes=layout.num_elements * weights_P.element_size(),
            hash=layout.hash(weights_P),
            activation_bytes=torch.Size(self.activation_shape).numel() * self.dtype.itemsize,
        )

    def _initial_weights(self, layout: Layout) -> Tensor:
        weights_P = torch.empty(layout.num_elements, dtype=self.wide)
        if self.init_dir is None:
            for name, target in layout.views(weights_P):
                shape = layout.shapes[name]
                target.copy_(
                    initial_weight(self.config.model, seed=self.config.seed, name=name, shape=shape)
                )
            return weights_P
        model = self.config.model
        if read_config(self.init_dir, dtype=model.dtype) != model:
            raise DataError(
                f"{self.init_dir} holds another model than the run file describes",
                why="its weights would be read as something that they are not",
                fix="copy the model's fields from its config.json into the run file",
                code="E-DAT-017",
            )
        targets = dict(layout.views(weights_P))
        for name, tensor in read_weights(self.init_dir, model, targets):
            targets[name].copy_(tensor)
        if not is_finite(weights_P):
            raise NonFiniteError(
                f"weights in {self.init_dir} are not finite",
                why="every loss would be NaN from the first iteration on",
                fix="start from another model, or fetch this one again",
            )
        return weights_P

    def _install(self, stage: Stage, layout: Layout, state: StageState) -> None:
        self._layout = layout
        self._segments = layout.segments()
        self._committed = state
        self._spare: StageState | None = None
        """Buffers for the next proposed step."""
        self._proposed: tuple[int, StageState] | None = None
        self._gradient_P = torch.zeros_like(state.weights)
        self._held: dict[MicrobatchId, _Held] = {}
        self._tokens: dict[MicrobatchId, Tensor] = {}
        self._contributed: set[tuple[str, MicrobatchId]] = set()
        self._spoiled: str | None = None
        self._measuring = False
        self.iteration = 0
        self._stage = stage
        self._point_module_at_weights()
        for name, parameter in stage.parameters_by_name().items():
            target = self._gradient_P[layout.slices[name]].view(layout.shapes[name])
            if self.dtype == self.wide:
                # Autograd adds into an existing gradient in place.
                parameter.grad = target
            else:
                # Many small terms in bfloat16 would be lost: each goes to the float32 sum at once.
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._mover(target)
                )

    def _mover(self, target: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            if not self._measuring:
                assert parameter.grad is not None
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

    # Microbatches

    def embed(self, mb: MicrobatchId) -> Tensor:
        """Return what stage 0 sends to the first relay, (B, T, D); keeps what backward needs."""
        stage = self._ready_first()
        output_BTD = stage.embed(self._read_tokens(mb)[:, :-1])
        self._keep(mb, output_BTD, None)
        return output_BTD.detach()

    def forward(self, mb: MicrobatchId, input_BTD: Tensor) -> Tensor:
        """Return a relay's output, (B, T, D); keeps what backward needs.

        Args:
            mb: A microbatch that is held already is run anew.
            input_BTD: (B, T, D) in the model's dtype, any device. Copied.

        Raises:
            NonFiniteError: Input or output holds NaN or infinity; nothing is kept.
        """
        stage = self._ready()
        # Autograd keeps the input, and the sender reuses its memory: hence a copy.
        entry_BTD = self._take(input_BTD, "activation received", copy=True).requires_grad_()
        output_BTD = stage.run_blocks(entry_BTD)
        self._keep(mb, output_BTD, entry_BTD)
        return output_BTD.detach()

    def head(self, mb: MicrobatchId, input_BTD: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the last relay's output, (B, T, D), and the mean loss.

        The gradient of norm and head is added to the sum, once per microbatch.

        Raises:
            NonFiniteError: Input, loss or gradient holds NaN or infinity.
        """
        stage = self._ready_first()
        targets_BT = self._read_tokens(mb)[:, 1:]
        entry_BTD = self._take(input_BTD, "activation received").requires_grad_()
        loss = stage.loss(entry_BTD, targets_BT)
        self._require_finite(loss.detach(), f"loss of microbatch {mb}")
        gradient_BTD = self._run_backward(("head", mb), loss, entry_BTD, None)
        assert gradient_BTD is not None
        return gradient_BTD, float(loss.detach())

    def backward(self, mb: MicrobatchId, gradient_BTD: Tensor) -> Tensor:
        """Return the gradient of a relay's input, (B, T, D); frees the microbatch.

        Args:
            mb: Must be held.
            gradient_BTD: Gradient of this stage's output, (B, T, D). Not changed.

        Raises:
            NonFiniteError: `gradient_BTD` or a gradient of this stage is not finite.
            TrainingError: The microbatch is not held.
        """
        held = self._release(mb)
        assert held.entry is not None
        arrived_BTD = self._take(gradient_BTD, "gradient received")
        del self._held[mb]
        result_BTD = self._run_backward(("blocks", mb), held.edge, held.entry, arrived_BTD)
        assert result_BTD is not None
        return result_BTD

    def embed_backward(self, mb: MicrobatchId, gradient_BTD: Tensor) -> None:
        """Run stage 0's part before the relays backward; frees the microbatch. As `backward`."""
        self._ready_first()
        held = self._release(mb)
        arrived_BTD = self._take(gradient_BTD, "gradient received")
        del self._held[mb]
        self._tokens.pop(mb, None)
        self._run_backward(("blocks", mb), held.edge, None, arrived_BTD)

    def _ready(self) -> Stage:
        stage = self._built()
        if self._proposed is not None:
            raise TrainingError(
                f"iteration {self._proposed[0]} is proposed and not committed",
                why="a microbatch now would be computed with weights that may be undone",
                fix="commit or reset first",
                code="E-TRN-004",
            )
        return stage

    def _ready_first(self) -> FirstStage:
        stage = self._ready()
        if not isinstance(stage, FirstStage):
            raise TrainingError(
                "this is a relay's stage",
                why="only stage 0 has an embedding and a head",
                fix="send the job to a data node",
            )
        return stage

    def _read_tokens(self, mb: MicrobatchId) -> Tensor:
        """Return (B, T + 1) tokens on the device; they are kept until the microbatch is freed."""
        if mb in self._tokens:
            return self._tokens[mb]
        if self.tokens is None:
            raise TrainingError(
                "this node has no data",
                why="a data node reads its microbatches from shards",
                fix="give its data folder in the node file",
            )
        batch = self.config.batch
        array = self.tokens.microbatch(mb, batch, self.config.seed)
        tokens = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
        if tokens.shape != (batch.microbatch_size, batch.sequence_length + 1):
            raise ShapeError(
                f"tokens of microbatch {mb} are {tuple(tokens.shape)}",
                why="they do not fill a microbatch",
                fix="prepare the data again",
            )
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.config.model.vocab_size:
            raise DataError(
                f"microbatch {mb} holds tokens from {low} to {high}",
                why=f"the model's vocabulary has {self.config.model.vocab_size}",
                fix="raise model.vocab_size or prepare the data with the run's tokenizer",
                code="E-DAT-018",
            )
        self._tokens[mb] = tokens.to(self.config.device)
        return self._tokens[mb]

    def _take(self, tensor: Tensor, what: str, *, copy: bool = False) -> Tensor:
        """Return a received activation or gradient on the device, checked."""
        if tensor.shape != self.activation_shape or tensor.dtype != self.dtype:
            raise ShapeError(
                f"{what} is {tensor.dtype} {tuple(tensor.shape)}",
                why=f"this run exchanges {self.dtype} {self.activation_shape}",
                fix="drop the microbatch; the peer runs another configuration",
            )
        result = tensor.detach().to(self.config.device, copy=copy)
        self._require_finite(result, what)
        return result

    def _require_finite(self, tensor: Tensor, what: str) -> None:
        if not is_finite(tensor):
            raise NonFiniteError(
                f"{what} is not finite",
                why="it would spread to all weights in one step",
                fix="retry the microbatch elsewhere; if every node says so, lower optimizer.lr",
            )

    def _keep(self, mb: MicrobatchId, output_BTD: Tensor, entry_BTD: Tensor | None) -> None:
        self._require_finite(output_BTD.detach(), f"activation of microbatch {mb}")
        self._held[mb] = _Held(get_gradient_edge(output_BTD), entry_BTD)

    def _release(self, mb: MicrobatchId) -> _Held:
        self._ready()
        if mb not in self._held:
            raise TrainingError(
                f"microbatch {mb} is not held",
                why="its backward needs what its forward left",
                fix="run its forward again",
                code="E-TRN-005",
            )
        return self._held[mb]

    def _run_backward(
        self,
        part: tuple[str, MicrobatchId],
        start: Tensor | GradientEdge,
        entry_BTD: Tensor | None,
        gradient_BTD: Tensor | None,
    ) -> Tensor | None:
        """Return the gradient of `entry_BTD`, and add those of parameters if `part` is new."""
        starts: Any = [start]
        gradients = None if gradient_BTD is None else [gradient_BTD]
        if part in self._contributed:
            if entry_BTD is None:
                return None
            return torch.autograd.grad(starts, [entry_BTD], gradients)[0]
        # Whatever stops autograd halfway leaves a sum of which nobody knows what is in it.
        self._spoiled = f"the backward of microbatch {part[1]} failed"
        torch.autograd.backward(starts, gradients)
        result_BTD = None if entry_BTD is None else entry_BTD.grad
        if result_BTD is not None:
            self._require_finite(result_BTD, f"gradient of microbatch {part[1]}")
        self._spoiled = None
        self._contributed.add(part)
        return result_BTD

    # Iterations

    def reset(self) -> None:
        """Forget held microbatches, gradients and a proposed step: the iteration starts again."""
        self._built()
        self._proposed = None
        self._held.clear()
        self._tokens.clear()
        self._contributed.clear()
        self._gradient_P.zero_()
        self._spoiled = None

    def gather(self, num_parts: int) -> list[Tensor]:
        """Return the sum of gradients over microbatches, cut in parts, in the wire's dtype.

        Returns:
            Tensors on the device that may share memory with the sum: copy them out at once.

        Raises:
            NonFiniteError: The sum holds NaN or infinity.
            TrainingError: A backward failed halfway; only `reset` helps.
        """
        gradient_P = self._own_gradient()
        return cut(gradient_P.to(self.wire_dtype), num_parts)

    def _own_gradient(self) -> Tensor:
        self._built()
        if self._spoiled is not None:
            raise NonFiniteError(
                f"the gradient is spoiled: {self._spoiled}",
                why="nobody knows which part of that microbatch it holds",
                fix="reset and repeat the iteration",
                code="E-TRN-006",
            )
        self._require_finite(self._gradient_P, "gradient of this stage")
        return self._gradient_P

    def reduce_part(
        self, inputs_N: Sequence[Tensor], *, weights_total: int, part: int, num_parts: int
    ) -> Tensor:
        """Return the mean gradient of one part; see `decod.train.reduction.reduce_part`."""
        size = part_sizes(self.num_elements, num_parts)[part]
        if any(part_N.numel() != size for part_N in inputs_N):
            raise ShapeError(
                f"part {part} of {num_parts} came with {[x.numel() for x in inputs_N][:8]}",
                why=f"it has {size} elements",
                fix="repeat the round; a member cut its gradient differently",
            )
        return reduce_part(
            inputs_N, weights_total=weights_total, dtype=self.wide, device=self.config.device
        )

    @property
    def num_elements(self) -> int:
        """Parameters of the built stage."""
        self._built()
        return self._layout.num_elements

    def propose(
        self, iteration: int, parts_N: Sequence[Tensor], *, weights_total: int | None = None
    ) -> tuple[str, float]:
        """Compute one optimizer step beside the committed state.

        Proposing again, for instance with a smaller roster, replaces the proposal.

        Args:
            iteration: The iteration that the step ends, from 1; later than the last committed.
            parts_N: All reduced parts in order; none if this node is alone in its roster.
            weights_total: Microbatches in this node's own gradient; only without parts.

        Returns:
            Hash of the weights after the step, and the gradient's norm.

        Raises:
            NonFiniteError: Gradient or weights after the step are not finite.
            ShapeError: The parts do not make up the stage's gradient.
            TrainingError: The iteration is over already.
        """
        gradient_P = self._reduced_gradient(parts_N, weights_total)
        if iteration <= self.iteration:
            raise TrainingError(
                f"iteration {iteration} is proposed after {self.iteration} was committed",
                why="a step is taken once",
                fix="repeat with the current iteration",
            )
        norm = float(torch.linalg.vector_norm(gradient_P))
        new = self._proposed[1] if self._proposed is not None else self._spare
        new = self._committed.empty_like() if new is None else new
        self._proposed, self._spare = None, new
        adamw_step(
            self._committed,
            new,
            gradient_P,
            segments=self._segments,
            optimizer=self.config.optimizer,
            iteration=iteration,
        )
        self._require_finite(new.weights, f"stage after iteration {iteration}")
        digest = self._layout.hash(new.weights)
        self._proposed = (iteration, new)
        return digest, norm

    def _reduced_gradient(self, parts_N: Sequence[Tensor], weights_total: int | None) -> Tensor:
        if not parts_N:
            num_microbatches = weights_total or 0
            check_weights_total(num_microbatches)
            return self._own_gradient() / num_microbatches
        sizes = part_sizes(self.num_elements, len(parts_N))
        if [part.numel() for part in parts_N] != sizes:
            raise ShapeError(
                f"parts of {[part.numel() for part in parts_N][:8]} elements",
                why=f"this stage's gradient has {sum(sizes)}, cut in {len(sizes)}",
                fix="repeat the round",
            )
        gradient_P = torch.cat([part.to(self.config.device, self.wide) for part in parts_N])
        self._require_finite(gradient_P, "reduced gradient")
        return gradient_P

    def commit(self, iteration: int) -> None:
        """Make the proposed step final; microbatches and gradients of the iteration are freed.

        Raises:
            TrainingError: This iteration is not the proposed one.
        """
        self._built()
        if self._proposed is None or self._proposed[0] != iteration:
            proposed = "none" if self._proposed is None else str(self._proposed[0])
            raise TrainingError(
                f"commit of iteration {iteration}, but proposed is {proposed}",
                why="only a step that all members agreed on becomes final",
                fix="propose it first",
                code="E-TRN-007",
            )
        self._spare, self._committed = self._committed, self._proposed[1]
        self.iteration = iteration
        self.reset()
        self._point_module_at_weights()

    # State

    def weights(self) -> dict[str, Tensor]:
        """Return the committed weights by name, as views of float32 or wider: do not change."""
        self._built()
        return dict(self._layout.views(self._committed.weights))

    def snapshot(self, *, with_optimizer: bool) -> Snapshot:
        """Return a description of the committed state, also while a step is proposed."""
        self._built()
        return take_snapshot(
            self._committed, self._layout, self.dtype, with_optimizer=with_optimizer
        )

    def load(self, blob: Tensor, entries: Sequence[TensorEntry], iteration: int) -> str:
        """Replace the committed state; drops microbatches, gradients and a proposed step.

        Args:
            blob: uint8 on CPU, not changed.
            entries: What it must hold.
            iteration: The iteration after which it was taken.

        Returns:
            The hash of the weights.

        Raises:
            CheckpointError: Something does not fit; the state is unchanged.
        """
        stage = self._built()
        state = read_state(blob, entries, self._layout, self.dtype)
        device = self.config.device
        self._committed = StageState(
            state.weights.to(device), state.mean.to(device), state.square.to(device)
        )
        assert self._stage is stage
        self.iteration = iteration
        self.reset()
        self._point_module_at_weights()
        return self._layout.hash(self._committed.weights)

    @contextmanager
    def measuring(self) -> Iterator[Stage]:
        """Lend the module for trial runs: gradients go nowhere while the context lasts."""
        stage = self._ready()
        parameters = list(stage.parameters())
        gradients = [parameter.grad for parameter in parameters]
        self._measuring = True
        try:
            for parameter in parameters:
                parameter.grad = None
            yield stage
        finally:
            self._measuring = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
