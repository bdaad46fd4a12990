"""Copies from CUDA devices that run beside the loop's own kernels. On a CPU there is nothing to do.

The node may ask for a contribution while the loop's forward pass has filled the device's queue. On
the loop's stream the copy would wait for all of it.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class SideStream:
    """One more stream on each CUDA device of some tensors.

    Args:
        tensors: What is copied from.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in devices
        }
        self._marks: dict[torch.device, torch.cuda.Event] = {}

    def mark(self) -> None:
        """What is to be copied has just been changed, on the current streams."""
        for device in self._streams:
            self._marks[device] = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Run what follows beside the loop's kernels, after the last mark. Wait for it at the end.

        The caller holds the lock under which the tensors change.
        """
        with ExitStack() as stack:
            for device, stream in self._streams.items():
                if device in self._marks:
                    stream.wait_event(self._marks[device])
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._streams.values():
                stream.synchronize()
