"""The passes of one stage's microbatches, forward and backward.

Activations and gradients come and go as they travel. A stage computes with what a receiver can read
from the bytes, and never with what the sender had before coding. Forward and backward passes, first
ones and repeated ones, then see the same numbers. The backward pass treats coding as the identity:
the gradient of what arrived counts as the gradient of what was sent.

With `ExecutorConfig.recompute`, a forward pass keeps its input instead of a graph, and the backward
pass begins with the forward pass again. Both run the same operations on the same weights, which
only change when no microbatch is held. So gradients are the same, bit for bit.

Source of recomputation: Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174), section
4.1. Deviation: a whole stage is one segment, because it is the held microbatches that take the
memory, and only one is recomputed at a time.

Legend: B sequences, T positions, D width, C bytes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decod.clocks import Stopwatch
from decod.compression.codecs import Noise, decode, encode
from decod.compression.plan import CompressionError
from decod.data.index import BEGINS, TARGET
from decod.errors import NonFiniteError, ShapeError, TrainingError
from decod.ids import MicrobatchId
from decod.model.autograd import Output
from decod.model.stage import FirstStage, Stage
from decod.protocol.core.jobs import ACTIVATION_RECEIVED, GRADIENT_RECEIVED, Loss
from decod.train.copies import arrived, arriving, number
from decod.train.executor_config import ExecutorConfig
from decod.train.gradient_sum import GradientSum
from decod.train.reduction import cut, require_finite
from decod.train.token_source import NO_TARGET, ReadTokens, TokenSource, begun_places, read_tokens


class ActivationCodec:
    """Codes what leaves a stage, and decodes and checks what arrives.

    Args:
        config: The run, and the device.
        watch: Measures copies of tensors to the device.
    """

    def __init__(self, config: ExecutorConfig, watch: Stopwatch) -> None:
        self._config = config
        self._watch = watch
        self._coding = config.activation_coding

    def sent(
        self,
        value_BTD: Tensor,
        what: str,
        places_BT: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Return a tensor as it travels: itself, or (C,) uint8 in new memory.

        Args:
            value_BTD: An activation or gradient on the device, (B, T, D). Finite. Not changed.
            what: Its name, for errors.
            places_BT: Of an activation whose documents are read apart: see `Stage.run_blocks`.
            seed: Of a gradient, for noise.

        Raises:
            NonFiniteError: It holds numbers too large for the format.
        """
        coded = self._coded(value_BTD, what, seed)
        if not self._config.run.batch.reads_apart:
            return coded
        if places_BT is None:
            marks_N = coded.new_zeros(value_BTD.shape[:2].numel(), dtype=torch.uint8)
        else:
            marks_N = (places_BT == 0).to(torch.uint8).view(-1)
        return torch.cat((coded.reshape(-1).view(torch.uint8), marks_N))

    def _coded(self, value_BTD: Tensor, what: str, seed: int | None) -> Tensor:
        if self._coding is None:
            return value_BTD
        noise = None
        if seed is not None:
            noise = Noise(seed, self._config.own_rows.first * value_BTD[0].numel())
        try:
            return encode(self._coding, value_BTD.reshape(-1), noise=noise)
        except CompressionError as error:
            raise NonFiniteError(
                f"{what} can't be sent: {error}",
                why="it would spread to all weights in one step",
                fix="retry the microbatch elsewhere; if every node says so, lower optimizer.lr",
            ) from error

    def travelled(self, value_BTD: Tensor, what: str, seed: int | None = None) -> Tensor:
        """Return what a receiver would read of a tensor, (B, T, D). Arguments as for `sent`."""
        coded = self._coded(value_BTD, what, seed)
        return value_BTD if self._coding is None else self._decoded(coded, what)

    def places(self, activation: Tensor, what: str) -> Tensor | None:
        """Return the place of each position in its document, (B, T), on the device.

        None: documents are not read apart.

        Args:
            activation: As it came, of which `received` has checked dtype and shape. Not changed.
            what: Its name, for errors.

        Raises:
            ShapeError: It does not tell where documents begin.
        """
        config = self._config
        if not config.run.batch.reads_apart:
            return None
        marks_BT = activation[-config.activation_runs[-1] :].view(config.activation_shape[:2])
        if int(marks_BT.max()) > 1:
            raise ShapeError(
                f"{what} holds a mark of {int(marks_BT.max())}",
                why="a mark says with 0 or 1 whether a position begins a document",
                fix="drop the microbatch; the peer runs another configuration",
            )
        return begun_places(marks_BT.to(config.device) * BEGINS)

    def received(self, tensor: Tensor, what: str, *, copy: bool = False) -> Tensor:
        """Return a tensor that has travelled, (B, T, D), on the device.

        The tensor's memory is reused once this job has been answered. Anything that autograd or
        postponed products keep for longer must be a copy.

        Args:
            tensor: What came, with `ExecutorConfig.activation_wire`'s dtype and shape. Not changed.
            what: Its name, for errors.
            copy: Whether the result must have memory of its own.

        Raises:
            NonFiniteError: It holds NaN or infinity, or an impossible scale.
            ShapeError: Dtype or shape is another.
        """
        config = self._config
        dtype, shape = config.activation_wire
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ShapeError(
                f"{what} is {tensor.dtype} {tuple(tensor.shape)}",
                why=f"this run exchanges {dtype} {shape}",
                fix="drop the microbatch; the peer runs another configuration",
            )
        if config.run.batch.reads_apart:
            tensor = tensor[: -config.activation_runs[-1]]
            if self._coding is None:
                tensor = tensor.view(config.dtype).view(config.activation_shape)
        with arriving(tensor, config.device):
            with self._watch.measure("copy"):
                here = tensor.detach().to(
                    config.device,
                    # To the host it would return before the copy is there.
                    non_blocking=config.device != "cpu",
                    copy=copy and self._coding is None,
                )
            result = here if self._coding is None else self._decoded(here, what)
            # Waits for the copy, and not for what the device computes meanwhile.
            require_finite(result, what)
        return arrived(result)

    def _decoded(self, coded_C: Tensor, what: str) -> Tensor:
        assert self._coding is not None
        shape = self._config.activation_shape
        try:
            decoded_N = decode(self._coding, coded_C, shape.numel())
        except CompressionError as error:
            raise NonFiniteError(
                f"{what} can't be read: {error}",
                why="it would spread to all weights in one step",
                fix="retry the microbatch elsewhere; the peer sends what no device can compute",
            ) from error
        return decoded_N.to(self._config.dtype).view(shape)


def mean_loss(parts: Sequence[Loss], num_positions: int) -> Loss:
    """Return the mean loss over a microbatch's targets.

    Args:
        parts: Of each device: its part of the mean over all positions, and how many of its own have
            a target.
        num_positions: Of the microbatch.
    """
    loss = sum(each.loss for each in parts)
    num_targets = sum(each.num_tokens for each in parts)
    if 0 < num_targets < num_positions:
        loss *= num_positions / num_targets
    return Loss(loss, num_targets)


@dataclass(frozen=True, slots=True)
class SavedPass:
    """The part of a microbatch's forward pass that its backward pass needs."""

    output: Output | None
    """None: it is computed again, or there is no backward pass."""
    entry: Tensor | None
    """The input whose gradient the previous stage waits for. None on stage 0."""
    places: Tensor | None
    """Of a relay's positions in their documents. See `ReadTokens`."""


class SettledWeights(Protocol):
    """Knows whether the weights are final."""

    def require_settled(self) -> None:
        """Raise a TrainingError while a step is proposed."""


class Passes:
    """Runs microbatches, and keeps what their backward passes need.

    Every method that runs one raises a TrainingError while a step is proposed.

    Args:
        config: The run, and the device.
        stage: The module.
        state: Its weights.
        gradient: The sum that backward passes add to.
        tokens: Source of tokens, needed only on stage 0.
        watch: Measures copies of tensors to the device, reading, and the head's backward.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        stage: Stage,
        state: SettledWeights,
        gradient: GradientSum,
        *,
        tokens: TokenSource | None,
        watch: Stopwatch,
    ) -> None:
        self._config = config
        self._stage = stage
        self._state = state
        self._gradient = gradient
        self._source = tokens
        self._watch = watch
        stage.share = config.own_rows.share
        self._codec = ActivationCodec(config, watch)
        self._whole_codec = ActivationCodec(config.whole, watch)
        self._held: dict[MicrobatchId, SavedPass] = {}
        self._tokens: dict[MicrobatchId, ReadTokens] = {}

    def look_at(self, tensor: Tensor, *, is_gradient: bool) -> None:
        """Check a tensor before several devices begin to compute with their rows of it.

        Otherwise some might add to their sums what others refuse.

        Args:
            tensor: An activation or a gradient as it came, of all rows.
            is_gradient: Which of them it is.

        Raises:
            NonFiniteError: It holds NaN or infinity.
            TrainingError: A step is proposed. Only the first device knows that.
        """
        self._state.require_settled()
        self.read(tensor, GRADIENT_RECEIVED if is_gradient else ACTIVATION_RECEIVED)
        if not is_gradient:
            self._whole_codec.places(tensor, ACTIVATION_RECEIVED)

    def make_ready(self, mb: MicrobatchId) -> None:
        """Read a microbatch's tokens for `embed` or `head`, before devices wait for each other.

        Otherwise some might wait for one whose data are damaged.

        Raises:
            DataError: They can't be read.
            TrainingError: A step is proposed. Only the first device knows that.
        """
        self._first_stage()
        self._read_tokens(mb)

    def embed(self, mb: MicrobatchId) -> Tensor:
        """Return stage 0's output for the first relay. Keep for backward what `forward` keeps."""
        self._first_stage()
        return self._run_forward(mb, None, None)

    def forward(self, mb: MicrobatchId, activation: Tensor) -> Tensor:
        """Return a relay's output. Keep the graph for backward, or what it is made from.

        Args:
            mb: The microbatch. If it is held already, it runs anew.
            activation: As it came, on any device. Copied.

        Raises:
            NonFiniteError: Input or output holds NaN or infinity. Nothing is kept.
        """
        self._state.require_settled()
        entry_BTD = self._codec.received(activation, ACTIVATION_RECEIVED, copy=True)
        places_BT = self._codec.places(activation, ACTIVATION_RECEIVED)
        return self._run_forward(mb, entry_BTD.requires_grad_(), places_BT)

    def head(self, mb: MicrobatchId, activation: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the last relay's output, and the loss.

        The loss is the mean over all positions of the microbatch, of which those without a target
        add nothing. With some of its rows, it is their part of the mean: the parts of all devices
        add up to it. The mean over all targets of the batch is made of this when the batch is
        whole (`StageExecutor.propose`).

        Adds the gradient of norm and head to the sum, once per microbatch.

        Raises:
            NonFiniteError: Input, loss or gradient holds NaN or infinity.
        """
        stage = self._first_stage()
        read = self._read_tokens(mb)
        entry_BTD = self._codec.received(activation, ACTIVATION_RECEIVED).requires_grad_()
        num_positions = self._config.run.batch.tokens_per_microbatch
        if read.num_targets == read.targets.numel():
            loss = stage.loss(entry_BTD, read.targets)
        elif read.num_targets:
            chosen_BT = read.targets != NO_TARGET
            loss = stage.loss(entry_BTD[chosen_BT][None], read.targets[chosen_BT][None])
        else:
            loss = entry_BTD.sum() * 0
        if read.num_targets != num_positions:
            loss = loss * (read.num_targets / num_positions)
        require_finite(self._gradient.total(loss.detach()), f"loss of microbatch {mb}")
        with self._watch.measure("backward"):
            gradient_BTD = self._gradient.backward(("head", mb), loss, entry_BTD)
        return self._sent_back(mb, gradient_BTD), number(loss.detach())

    def backward(self, mb: MicrobatchId, gradient: Tensor) -> Tensor:
        """Return the gradient of a relay's input, and free the microbatch.

        Args:
            mb: The microbatch, which must be held.
            gradient: Gradient of this stage's output, as it came. Copied.

        Raises:
            NonFiniteError: `gradient` or a gradient of this stage is not finite.
            TrainingError: The microbatch is not held.
        """
        return self._sent_back(mb, self._run_backward(mb, gradient))

    def embed_backward(self, mb: MicrobatchId, gradient: Tensor) -> None:
        """Run stage 0's blocks and embedding backward, and free the microbatch. As `backward`."""
        self._first_stage()
        self._run_backward(mb, gradient)

    def replay(
        self, mb: MicrobatchId, activation: Tensor, gradient: Tensor, *, counts: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Repeat both passes of a microbatch that another member of the stage has worked on.

        A step may be proposed: the module has the weights from before.

        Args:
            mb: The microbatch.
            activation: What the other got from the stage before, as it travelled.
            gradient: What it got from the stage behind, as it travelled.
            counts: Otherwise only the first device's gradient counts, and the result is of no use.

        Returns:
            What it should have sent on and back, (B, T, D) each as a receiver reads it, and the
            gradient of the parameters, (P,).

        Raises:
            NonFiniteError: An input or result holds NaN or infinity.
        """
        codec = self._whole_codec
        config = self._config
        num_rows = 1 if config.sharded else config.own_rows.num
        entry_BTD = codec.received(activation, "activation to audit")
        back_BTD = codec.received(gradient, "gradient to audit")
        places_BT = codec.places(activation, "activation to audit")
        outputs = list[Tensor]()
        back_again = list[Tensor]()
        apart_P: Tensor | None = None
        # As many rows at a time as this device computes of a microbatch. All devices of a stage
        # that is spread replay every row together. The gradients are those of the first alone.
        if not counts:
            back_BTD = torch.zeros_like(back_BTD)
        for first in range(0, len(entry_BTD), num_rows):
            rows = slice(first, first + num_rows)
            entry = entry_BTD[rows].requires_grad_()
            places = None if places_BT is None else places_BT[rows]
            *made, piece_P = self._gradient.apart(entry, back_BTD[rows], places)
            outputs.append(made[0])
            back_again.append(made[1])
            apart_P = piece_P if apart_P is None else apart_P.add_(piece_P)
        assert apart_P is not None, "a microbatch has rows"
        what = f"replay of microbatch {mb}"
        sent_on = codec.travelled(torch.cat(outputs), what)
        sent_back = codec.travelled(torch.cat(back_again), what, self._seed(mb))
        return sent_on, sent_back, apart_P

    def read(self, tensor: Tensor, what: str = "tensor to audit") -> Tensor:
        """Return an activation or a gradient as a receiver reads it, (B, T, D), of all rows.

        Raises:
            NonFiniteError: It holds NaN or infinity.
        """
        return self._whole_codec.received(tensor, what)

    def same_documents(self, activation: Tensor, other: Tensor) -> bool:
        """Return whether two activations, as they travelled, tell of the same documents."""
        what = "activation to audit"
        mine, theirs = (self._whole_codec.places(each, what) for each in (activation, other))
        return mine is None or theirs is None or torch.equal(mine, theirs)

    def own_parts(self, num_parts: int) -> list[Tensor]:
        """Return this member's sum of gradients, cut into the parts of an average."""
        return cut(self._gradient.whole(), num_parts) if num_parts else []

    def spoil(self, reason: str) -> None:
        """Make the sum of gradients unusable until the iteration begins anew."""
        self._gradient.spoil(reason)

    def drop(self, mb: MicrobatchId) -> None:
        """Forget a held microbatch, if there is one. The sum contains nothing of it."""
        self._held.pop(mb, None)
        self._tokens.pop(mb, None)

    def clear(self) -> None:
        """Forget all held microbatches."""
        self._held.clear()
        self._tokens.clear()

    def _first_stage(self) -> FirstStage:
        self._state.require_settled()
        if not isinstance(self._stage, FirstStage):
            raise TrainingError(
                "this is a relay's stage",
                why="only stage 0 has an embedding and a head",
                fix="send the job to a data node",
            )
        return self._stage

    def num_targets(self, mb: MicrobatchId) -> int:
        """Return how many of this device's positions of a microbatch have a target."""
        return self._read_tokens(mb).num_targets

    def _read_tokens(self, mb: MicrobatchId) -> ReadTokens:
        """Return this device's tokens. They are kept until the microbatch is freed."""
        if mb not in self._tokens:
            config = self._config
            run = config.run
            with self._watch.measure("data"):
                read = read_tokens(self._source, mb, run.batch, run.model, seed=run.seed)
                tokens, marks = map(config.own_rows.of, read)
                chosen = marks[:, 1:] & TARGET == TARGET
                num_targets = int(chosen.sum())
            here = self._here(tokens)
            targets = here[:, 1:]
            if num_targets < chosen.numel():
                targets = self._here(tokens[:, 1:].where(chosen, NO_TARGET))
            places = None
            if run.batch.reads_apart:
                places = self._here(begun_places(marks[:, :-1]))
            self._tokens[mb] = ReadTokens(here, targets, num_targets, places)
        return self._tokens[mb]

    def _here(self, ids: Tensor) -> Tensor:
        with arriving(ids, self._config.device):
            here = ids.to(self._config.device, non_blocking=True)
        return arrived(here)

    def _run_forward(
        self, mb: MicrobatchId, entry_BTD: Tensor | None, places_BT: Tensor | None
    ) -> Tensor:
        """Keep what the backward pass needs. Return the output as it travels."""
        if entry_BTD is None:
            places_BT = self._read_tokens(mb).places
        recomputes = self._config.recompute
        with torch.set_grad_enabled(not recomputes):
            output_BTD = self._output(mb, entry_BTD, places_BT)
        value_BTD = output_BTD.detach()
        what = f"activation of microbatch {mb}"
        require_finite(value_BTD, what)
        sent = self._codec.sent(value_BTD, what, places_BT)
        # Stage 0 without trained parameters has no backward pass.
        keeps = output_BTD.requires_grad
        self._held[mb] = SavedPass(Output(output_BTD) if keeps else None, entry_BTD, places_BT)
        return sent

    def _output(
        self, mb: MicrobatchId, entry_BTD: Tensor | None, places_BT: Tensor | None
    ) -> Tensor:
        """Return the output of this stage's blocks, (B, T, D). No entry: stage 0 reads tokens."""
        if entry_BTD is not None:
            return self._stage.run_blocks(entry_BTD, places_BT)
        assert isinstance(self._stage, FirstStage)
        return self._stage.embed(self._read_tokens(mb).tokens[:, :-1], places_BT)

    def _sent_back(self, mb: MicrobatchId, gradient_BTD: Tensor | None) -> Tensor:
        assert gradient_BTD is not None
        return self._codec.sent(gradient_BTD, f"gradient of microbatch {mb}", seed=self._seed(mb))

    def _seed(self, mb: MicrobatchId) -> int:
        """Return the seed of a gradient's noise: the same whenever the passes are repeated."""
        # Each stage has other blocks.
        name = f"{self._config.run.seed} {mb} {next(iter(self._stage.layers), '')}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])

    def _run_backward(self, mb: MicrobatchId, gradient: Tensor) -> Tensor | None:
        """Run a held microbatch backward, and free it."""
        self._state.require_settled()
        if mb not in self._held:
            raise TrainingError(
                f"microbatch {mb} is not held",
                why="its backward needs what its forward left",
                fix="run its forward again",
                code="E-TRN-005",
            )
        held = self._held[mb]
        gradient_BTD = self._codec.received(gradient, GRADIENT_RECEIVED, copy=True)
        if held.entry is None and self._gradient.is_empty:
            self.drop(mb)
            return None
        output = held.output or Output(self._output(mb, held.entry, held.places))
        start = output.given(gradient_BTD)
        self.drop(mb)
        return self._gradient.backward(("blocks", mb), start, held.entry)
