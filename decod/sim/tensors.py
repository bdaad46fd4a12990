"""The tensors that a simulated host holds, their users and their sizes.

The core owns a tensor until it frees it. The driver may still read a freed tensor for a send in
progress. Every wrong use is a `MisuseError` that names the tensor.
"""

from dataclasses import dataclass

from decod.ids import TensorId
from decod.protocol.core.events import Tensor
from decod.sim.averages import MisuseError
from decod.sim.profile import ComputeProfile, Content


@dataclass(slots=True)
class StoredTensor:
    """A tensor that a host holds."""

    content: Content
    size_bytes: int
    num_sends: int = 0
    num_jobs: int = 0
    freed: bool = False
    """Whether the core has freed it. The driver may still read it for a send."""


class TensorTable:
    """Tensors by id.

    Attributes:
        stored_bytes: Size of all tensors here now.
        stored_peak_bytes: Largest size so far.
    """

    def __init__(self, profile: ComputeProfile) -> None:
        self.stored_bytes = 0
        self.stored_peak_bytes = 0
        self._profile = profile
        self._tensors: dict[TensorId, StoredTensor] = {}
        self._next_id = 1

    def __contains__(self, tensor: TensorId) -> bool:
        return tensor in self._tensors

    @property
    def contents(self) -> list[Content]:
        """The contents of all tensors here."""
        return [entry.content for entry in self._tensors.values()]

    @property
    def num_idle(self) -> int:
        """Number of tensors that the core owns and that no job and no send uses."""
        return sum(
            not (entry.freed or entry.num_jobs or entry.num_sends)
            for entry in self._tensors.values()
        )

    def content(self, tensor: TensorId) -> Content:
        return self._tensors[tensor].content

    def clear(self) -> None:
        """Forget everything, because the host has died."""
        self._tensors.clear()
        self.stored_bytes = 0

    def add(self, content: Content) -> Tensor:
        """Store a tensor, owned by the core from now on."""
        tensor_id = TensorId(self._next_id)
        self._next_id += 1
        size_bytes = self._profile.num_bytes(content)
        self._tensors[tensor_id] = StoredTensor(content, size_bytes)
        self.stored_bytes += size_bytes
        self.stored_peak_bytes = max(self.stored_peak_bytes, self.stored_bytes)
        return Tensor(tensor_id, size_bytes)

    def usable(self, tensor: TensorId, user: object) -> StoredTensor:
        """Return a tensor that the core may use.

        Raises:
            MisuseError: The tensor was freed, or never existed.
        """
        stored = self._tensors.get(tensor)
        if stored is None or stored.freed:
            raise MisuseError(f"{user} uses tensor {tensor}, which is freed or was never there")
        return stored

    def free(self, tensor: TensorId, user: object) -> None:
        """Take in that the core no longer needs a tensor.

        Raises:
            MisuseError: The tensor was freed already, or a job still reads it.
        """
        stored = self.usable(tensor, user)
        if stored.num_jobs:
            raise MisuseError(f"{user} while a job still reads it ({stored.content})")
        stored.freed = True
        self._forget_unread(tensor, stored)

    def end_send(self, tensor: TensorId) -> int:
        """Count one send as over, and return the tensor's size in bytes."""
        stored = self._tensors[tensor]
        stored.num_sends -= 1
        self._forget_unread(tensor, stored)
        return stored.size_bytes

    def end_job(self, inputs: tuple[TensorId, ...]) -> None:
        """Count one job as over."""
        for tensor in inputs:
            self._tensors[tensor].num_jobs -= 1

    def _forget_unread(self, tensor: TensorId, stored: StoredTensor) -> None:
        if stored.freed and stored.num_sends == 0:
            del self._tensors[tensor]
            self.stored_bytes -= stored.size_bytes
