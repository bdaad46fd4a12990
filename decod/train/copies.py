"""Copies between the host and an accelerator, on streams of their own.

A device computes in the order in which it is told to. A copy in that order would wait for all that
was told before, such as the products that a backward pass has put off, and a wait for the copy
would wait for them too. Copies in and out therefore have a stream each. The host only ever waits
for an event, never for the whole device. On a CPU nothing of this exists, and on devices without
streams a copy is one of the things that the device does in order.

Copies are asynchronous only if the host's memory is pinned (`decod.worker.device`). From and to
other memory the driver copies piece by piece, while the calling thread waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from decod.devices import device_named, device_of

_STAGED_BYTES = 32 << 20
"""Host memory for each of the two copies of `on_host` that are under way."""


@cache
def _stream(device: torch.device, direction: Literal["in", "out"]) -> torch.Stream:
    """Return the device's stream for copies in one direction."""
    assert direction in ("in", "out")
    return torch.Stream(device)


@contextmanager
def arriving(source: Tensor, device: str) -> Iterator[None]:
    """Run the block beside what the device computes. Later work there waits for it.

    What the block makes and the caller goes on to use must be handed to `arrived`.

    Args:
        source: What is copied. If it lies on the device, the block waits for its content.
        device: Where it goes.
    """
    if not device_named(device).has_streams:
        yield
        return
    side = _stream(torch.device(device), "in")
    computing = torch.accelerator.current_stream(device)
    if not source.is_cpu:
        side.wait_stream(computing)
    with side:
        yield
    computing.wait_stream(side)


def arrived(tensor: Tensor) -> Tensor:
    """Keep memory that was taken in `arriving` until the device has computed with it."""
    if device_of(tensor).has_streams:
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


def number(scalar: Tensor) -> float:
    """Return a tensor of one element as a number, once it is known.

    On an accelerator this waits for what was told before on the current stream, and for no more.
    """
    if not device_of(scalar).has_streams:
        return float(scalar)
    target = torch.empty((), dtype=scalar.dtype, pin_memory=True)
    target.copy_(scalar.reshape(()), non_blocking=True)
    torch.accelerator.current_stream(scalar.device).record_event().synchronize()
    return float(target)


class Departure:
    """A copy of a result to the host, under way beside later work of the device.

    Args:
        target: On the host. Undefined until `wait` returns.
        value: Not to be changed by later work.
    """

    def __init__(self, target: Tensor, value: Tensor) -> None:
        self._computed: torch.Event | None = None
        self._copied: torch.Event | None = None
        if not device_of(value).has_streams:
            target.copy_(value)
            return
        side = _stream(value.device, "out")
        self._computed = torch.accelerator.current_stream(value.device).record_event()
        side.wait_event(self._computed)
        with side:
            target.copy_(value, non_blocking=True)
        value.record_stream(side)
        self._copied = side.record_event()

    def wait_for_value(self) -> None:
        """Wait until the device has computed the value."""
        if self._computed is not None:
            self._computed.synchronize()

    def wait(self) -> None:
        """Wait until the copy is there."""
        if self._copied is not None:
            self._copied.synchronize()


def on_host(flat: Tensor) -> Iterator[Tensor]:
    """Yield a flat tensor piece by piece, on the host. A piece is valid until the next.

    From an accelerator, the next piece travels while the caller works on this one, and the host
    needs memory for two pieces only.
    """
    if flat.is_cpu:
        yield flat
        return
    size = _STAGED_BYTES // flat.element_size()
    pieces = torch.split(flat, size)
    pinned = device_of(flat).has_streams
    staged = [torch.empty(size, dtype=flat.dtype, pin_memory=pinned) for _ in pieces[:2]]
    coming: list[tuple[Tensor, Departure]] = []
    for index, piece in enumerate(pieces):
        target = staged[index % 2][: len(piece)]
        coming.append((target, Departure(target, piece)))
        if len(coming) == 2:
            yield _here(*coming.pop(0))
    for each in coming:
        yield _here(*each)


def _here(target: Tensor, departure: Departure) -> Tensor:
    departure.wait()
    return target
