"""How activations and their gradients travel between stages, as the device sees it.

A stage computes with what a receiver can read from the bytes, and never with what the sender had
before coding. Forward and backward passes, first ones and repeated ones, then see the same numbers.
The backward pass treats coding as the identity: the gradient of what arrived counts as the gradient
of what was sent.

Legend: B sequences, T positions, D width, C bytes.
"""

from torch import Tensor

from decod.clocks import Stopwatch
from decod.compression.codecs import decode, encode
from decod.compression.coding import CompressionError
from decod.errors import NonFiniteError, ShapeError
from decod.train.copies import arrived, arriving
from decod.train.executor_config import ExecutorConfig
from decod.train.reduction import require_finite


class ActivationCodec:
    """Codes what leaves a stage, and decodes and checks what arrives.

    Args:
        config: The run, and the device.
        watch: Measures copies of tensors to the device.
    """

    def __init__(self, config: ExecutorConfig, watch: Stopwatch) -> None:
        self._config, self._watch = config, watch
        self._coding = config.activation_coding

    def sent(self, value_BTD: Tensor, what: str) -> Tensor:
        """Return a tensor as it travels: itself, or (C,) uint8 in new memory.

        Args:
            value_BTD: An activation or gradient on the device, (B, T, D). Finite. Not changed.
            what: Its name, for errors.

        Raises:
            NonFiniteError: It holds numbers too large for the format.
        """
        if self._coding is None:
            return value_BTD
        try:
            return encode(self._coding, value_BTD.reshape(-1))
        except CompressionError as error:
            raise NonFiniteError(
                f"{what} can't be sent: {error}",
                why="it would spread to all weights in one step",
                fix="retry the microbatch elsewhere; if every node says so, lower optimizer.lr",
            ) from error

    def travelled(self, value_BTD: Tensor, what: str) -> Tensor:
        """Return what a receiver would read of a tensor, (B, T, D). Arguments as for `sent`."""
        sent = self.sent(value_BTD, what)
        return value_BTD if self._coding is None else self._decoded(sent, what)

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
