"""Who still needs which tensor: reference counts over the tensors that this node holds (I6)."""

from decod.ids import TensorId
from decod.protocol.core.effects import Effect, FreeTensor
from decod.protocol.core.events import Tensor


class TensorStore:
    """Counts references; a tensor is freed when the last one is released."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._references: dict[TensorId, int] = {}
        self._sizes: dict[TensorId, int] = {}

    def __len__(self) -> int:
        return len(self._references)

    def add(self, tensor: Tensor) -> TensorId:
        """Take a tensor over from the driver, with one reference."""
        assert tensor.id not in self._references, tensor
        self._references[tensor.id] = 1
        self._sizes[tensor.id] = tensor.size_bytes
        self.size_bytes += tensor.size_bytes
        return tensor.id

    def size_of(self, tensor: TensorId) -> int:
        """Return a held tensor's size in bytes."""
        return self._sizes[tensor]

    def retain(self, tensor: TensorId) -> TensorId:
        assert tensor in self._references, f"{tensor} has been freed already"
        self._references[tensor] += 1
        return tensor

    def release(self, *tensors: TensorId) -> list[Effect]:
        effects: list[Effect] = []
        for tensor in tensors:
            assert self._references.get(tensor, 0) > 0, f"{tensor} has been freed already"
            self._references[tensor] -= 1
            if self._references[tensor] == 0:
                del self._references[tensor]
                self.size_bytes -= self._sizes.pop(tensor)
                effects.append(FreeTensor(tensor))
        return effects

    def hand_over(self, tensor: TensorId) -> None:
        """Give a tensor to the driver for good; it must be this machine's alone."""
        assert self._references.pop(tensor) == 1, tensor
        self.size_bytes -= self._sizes.pop(tensor)
