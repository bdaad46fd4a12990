"""All computations of one stage. No sockets, and no clocks but torch's.

A stage begins with `build` or `load`. In each iteration, microbatches run forward and backward, and
their gradients add up. Then follow `gather`, `reduce_part`, `propose` and `commit`, or `reset` if
the iteration is repeated. A microbatch counts once in the gradient, however often it is sent: a
repeated backward pass gives the sender the same gradient and adds nothing.

A proposed step is written beside the committed state. To undo it is to forget it.

Legend: B sequences, T positions, D width, P parameters of the stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.ids import MicrobatchId
from decod.model.stage import FirstStage, Stage
from decod.planner.partition import part_sizes
from decod.train.adamw import AdamWState, clip_factor
from decod.train.output import Output
from decod.train.reduction import (
    check_weights_total,
    cut,
    divisor,
    reduce_part,
    require_finite,
    square_sum,
)
from decod.train.stage_memory import Proposal, SavedPass, StageMemory
from decod.train.token_source import read_tokens


class StageExecutor(StageMemory):
    """Runs one stage. Errors leave the state unchanged, unless they say that it is spoiled."""

    # Microbatches

    def embed(self, mb: MicrobatchId) -> Tensor:
        """Return stage 0's output for the first relay, (B, T, D). Keep the graph for backward."""
        stage = self._ready_first()
        output_BTD = stage.embed(self._read_tokens(mb)[:, :-1])
        self._keep(mb, output_BTD, None)
        return output_BTD.detach()

    def forward(self, mb: MicrobatchId, input_BTD: Tensor) -> Tensor:
        """Return a relay's output, (B, T, D). Keep the graph for backward.

        Args:
            mb: The microbatch. If it is held already, it runs anew.
            input_BTD: (B, T, D) in the model's dtype, any device. Copied.

        Raises:
            NonFiniteError: Input or output holds NaN or infinity. Nothing is kept.
        """
        stage = self._ready()
        entry_BTD = self._take(input_BTD, "activation received", copy=True).requires_grad_()
        output_BTD = stage.run_blocks(entry_BTD)
        self._keep(mb, output_BTD, entry_BTD)
        return output_BTD.detach()

    def head(self, mb: MicrobatchId, input_BTD: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the last relay's output, (B, T, D), and the mean loss.

        Adds the gradient of norm and head to the sum, once per microbatch.

        Raises:
            NonFiniteError: Input, loss or gradient holds NaN or infinity.
        """
        stage = self._ready_first()
        targets_BT = self._read_tokens(mb)[:, 1:]
        entry_BTD = self._take(input_BTD, "activation received").requires_grad_()
        loss = stage.loss(entry_BTD, targets_BT)
        require_finite(loss.detach(), f"loss of microbatch {mb}")
        gradient_BTD = self._run_backward(("head", mb), loss, entry_BTD)
        assert gradient_BTD is not None
        return gradient_BTD, float(loss.detach())

    def backward(self, mb: MicrobatchId, gradient_BTD: Tensor) -> Tensor:
        """Return the gradient of a relay's input, (B, T, D), and free the microbatch.

        Args:
            mb: The microbatch, which must be held.
            gradient_BTD: Gradient of this stage's output, (B, T, D). Copied.

        Raises:
            NonFiniteError: `gradient_BTD` or a gradient of this stage is not finite.
            TrainingError: The microbatch is not held.
        """
        held = self._release(mb)
        assert held.entry is not None
        start = held.output.given(self._take(gradient_BTD, "gradient received", copy=True))
        del self._held[mb]
        result_BTD = self._run_backward(("blocks", mb), start, held.entry)
        assert result_BTD is not None
        return result_BTD

    def embed_backward(self, mb: MicrobatchId, gradient_BTD: Tensor) -> None:
        """Run stage 0's blocks and embedding backward, and free the microbatch. As `backward`."""
        self._ready_first()
        held = self._release(mb)
        start = held.output.given(self._take(gradient_BTD, "gradient received", copy=True))
        del self._held[mb]
        self._tokens.pop(mb, None)
        self._run_backward(("blocks", mb), start, None)

    def _ready(self) -> Stage:
        stage = self._built()
        if self._proposed is not None:
            raise TrainingError(
                f"iteration {self._proposed.iteration} is proposed and not committed",
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
        """Return (B, T + 1) tokens on the device. They are kept until the microbatch is freed."""
        if mb not in self._tokens:
            config = self.config
            tokens = read_tokens(self.tokens, mb, config.batch, config.model, seed=config.seed)
            self._tokens[mb] = tokens.to(config.device)
        return self._tokens[mb]

    def _take(self, tensor: Tensor, what: str, *, copy: bool = False) -> Tensor:
        """Check a received activation or gradient, and return it on the device.

        Its memory is reused once this job has been answered. Anything that autograd or postponed
        products keep for longer must be a copy.
        """
        if tensor.shape != self.activation_shape or tensor.dtype != self.dtype:
            raise ShapeError(
                f"{what} is {tensor.dtype} {tuple(tensor.shape)}",
                why=f"this run exchanges {self.dtype} {self.activation_shape}",
                fix="drop the microbatch; the peer runs another configuration",
            )
        with self.watch.measure("copy"):
            result = tensor.detach().to(self.config.device, copy=copy)
        require_finite(result, what)
        return result

    def _keep(self, mb: MicrobatchId, output_BTD: Tensor, entry_BTD: Tensor | None) -> None:
        require_finite(output_BTD.detach(), f"activation of microbatch {mb}")
        self._held[mb] = SavedPass(Output(output_BTD), entry_BTD)

    def _release(self, mb: MicrobatchId) -> SavedPass:
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
    ) -> Tensor | None:
        """Return the gradient of `entry_BTD`. Add parameter gradients if `part` is new."""
        self.finish_backward()
        starts: Any = [start]
        if part in self._contributed:
            if entry_BTD is None:
                return None
            result: Tensor = torch.autograd.grad(starts, [entry_BTD])[0]
            self._later.clear()
            return result
        with self._adding(part[1]):
            torch.autograd.backward(starts)
            result_BTD = None if entry_BTD is None else entry_BTD.grad
            if result_BTD is not None:
                require_finite(result_BTD, f"gradient of microbatch {part[1]}")
        self._contributed.add(part)
        self._unfinished = part[1]
        return result_BTD

    def finish_backward(self) -> bool:
        """Add the products that the last backward pass postponed. Return whether there were any.

        Everything that needs the sum calls this first. If it runs right after the gradient was
        sent, it overlaps with the work of other nodes. See `decod.model.later`.
        """
        if self._stage is None or not self._later:
            return False
        with self._adding(self._unfinished):
            self._later.compute()
        return True

    @contextmanager
    def _adding(self, mb: MicrobatchId) -> Iterator[None]:
        """Mark the sum as spoiled if the block fails, because its content is then unknown."""
        try:
            yield
        except BaseException:
            self._spoiled = f"the backward of microbatch {mb} failed"
            self._later.clear()
            raise

    def drop(self, mb: MicrobatchId) -> None:
        """Forget a held microbatch, if there is one. The sum contains nothing of it."""
        self._held.pop(mb, None)
        self._tokens.pop(mb, None)

    # Iterations

    def gather(self, num_parts: int) -> list[Tensor]:
        """Return this member's contribution to an average, cut into parts, in the wire's dtype.

        Returns:
            Tensors on the device that may share memory with the sum: copy them out at once.

        Raises:
            NonFiniteError: The sum holds NaN or infinity, or a backward pass failed halfway. Only
                `reset` helps.
        """
        gradient_P = self._own_gradient()
        return cut(gradient_P.to(self.wire_dtype), num_parts)

    def _own_gradient(self) -> Tensor:
        self._built()
        self.finish_backward()
        if self._spoiled is not None:
            raise NonFiniteError(
                f"the gradient is spoiled: {self._spoiled}",
                why="nobody knows which part of that microbatch it holds",
                fix="reset and repeat the iteration",
                code="E-TRN-006",
            )
        require_finite(self._gradient_P, "gradient of this stage")
        return self.rule.contribution(self._gradient_P)

    def reduce_part(
        self, inputs_N: Sequence[Tensor], *, weights_total: int, part: int, num_parts: int
    ) -> Tensor:
        """Return the mean gradient of one part; see `decod.train.reduction.reduce_part`."""
        size = part_sizes(self.num_elements, num_parts)[part]
        if any(part_N.numel() != size for part_N in inputs_N):
            raise ShapeError(
                f"part {part} of {num_parts} came with {[x.numel() for x in inputs_N][:8]}",
                why=f"it has {size} elements",
                fix="repeat the iteration; a member cut its gradient differently",
            )
        return reduce_part(
            inputs_N, weights_total=weights_total, dtype=self.wide, device=self.config.device
        )

    def square_sum(self, mean_N: Tensor) -> float:
        """Return the sum of squares of an average; 0 if the run does not clip gradients.

        Raises:
            NonFiniteError: The sum is not finite.
        """
        return square_sum(mean_N) if self.config.optimizer.clip_norm else 0.0

    def own_mean(self, weights_total: int) -> Tensor:
        """Return the mean gradient of a node that is alone in its roster, (P,).

        Args:
            weights_total: Microbatches in this node's own sum.

        Raises:
            NonFiniteError: The sum holds NaN or infinity.
        """
        check_weights_total(weights_total)
        gradient_P = self._own_gradient()
        return gradient_P / divisor(weights_total, gradient_P)

    def propose(
        self,
        iteration: int,
        parts_N: Sequence[Tensor],
        *,
        weights_total: int | None = None,
        gradient_norm: float = 0.0,
    ) -> str:
        """Compute one optimizer step beside the committed state.

        A second proposal, for instance with a smaller roster, replaces the first.

        Args:
            iteration: The iteration that the step ends, from 1; later than the last committed.
            parts_N: All reduced parts in order; empty if this node is alone in its roster.
            weights_total: Microbatches in this node's own gradient; only without parts.
            gradient_norm: Norm of the whole model's gradient, if the run clips it.

        Returns:
            Hash of the weights after the step.

        Raises:
            NonFiniteError: Gradient or weights after the step are not finite.
            ShapeError: The parts do not make up the stage's gradient.
            TrainingError: The iteration is already committed.
        """
        gradient_P = self._reduced_gradient(parts_N, weights_total)
        new = self._buffers_for(iteration)
        if (factor := clip_factor(self.config.optimizer, gradient_norm)) < 1:
            gradient_P.mul_(factor)
        self.rule.average(
            self._committed, new, gradient_P, segments=self._segments, iteration=iteration
        )
        return self._propose(Proposal(iteration, new, averaged=True))

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
        self._own_gradient()
        new = self._buffers_for(iteration)
        self.rule.local(self._committed, new, self._gradient_P, iteration=iteration)
        return self._propose(Proposal(iteration, new, averaged=False))

    def _buffers_for(self, iteration: int) -> AdamWState:
        """Return the buffers that a proposed step may overwrite."""
        if iteration <= self.iteration:
            raise TrainingError(
                f"iteration {iteration} is proposed after {self.iteration} was committed",
                why="a step is taken once",
                fix="repeat with the current iteration",
            )
        new = self._proposed.state if self._proposed is not None else self._spare
        new = self._committed.empty_like() if new is None else new
        self._proposed, self._spare = None, new
        return new

    def _propose(self, proposal: Proposal) -> str:
        weights_P = proposal.state.weights
        require_finite(weights_P, f"stage after iteration {proposal.iteration}")
        digest = self._layout.hash(weights_P)
        self._proposed = proposal
        return digest

    def _reduced_gradient(self, parts_N: Sequence[Tensor], weights_total: int | None) -> Tensor:
        """Return the stage's mean gradient, (P,), in new memory."""
        if not parts_N:
            return self.own_mean(weights_total or 0)
        sizes = part_sizes(self.num_elements, len(parts_N))
        if [part.numel() for part in parts_N] != sizes:
            raise ShapeError(
                f"parts of {[part.numel() for part in parts_N][:8]} elements",
                why=f"this stage's gradient has {sum(sizes)}, cut in {len(sizes)}",
                fix="repeat the iteration",
            )
        gradient_P = torch.cat([part.to(self.config.device, self.wide) for part in parts_N])
        require_finite(gradient_P, "reduced gradient")
        return gradient_P

    def retract(self) -> None:
        """Undo a proposed step. Microbatches and gradients stay, and more may be added."""
        self._built()
        if self._proposed is not None:
            self._spare, self._proposed = self._proposed.state, None

    def commit(self, iteration: int) -> None:
        """Make the proposed step final. Free the iteration's microbatches and gradients.

        Raises:
            TrainingError: This iteration is not the proposed one.
        """
        self._built()
        proposal = self._proposed
        if proposal is None or proposal.iteration != iteration:
            proposed = "none" if proposal is None else str(proposal.iteration)
            raise TrainingError(
                f"commit of iteration {iteration}, but proposed is {proposed}",
                why="only a step that all members agreed on becomes final",
                fix="propose it first",
                code="E-TRN-007",
            )
        self.rule.committed(self._gradient_P, averaged=proposal.averaged)
        self._spare, self._committed = self._committed, proposal.state
        self.iteration = iteration
        self.reset()
        self._point_module_at_weights()

    @contextmanager
    def measuring(self) -> Iterator[Stage]:
        """Lend the module for trial runs, whose gradients are thrown away."""
        stage = self._ready()
        parameters = list(stage.parameters())
        self.finish_backward()
        gradients = [parameter.grad for parameter in parameters]
        later, stage.later = stage.later, None
        self._measuring = True
        try:
            for parameter in parameters:
                parameter.grad = None
            yield stage
        finally:
            self._measuring = False
            stage.later = later
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
