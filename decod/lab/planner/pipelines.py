"""Training pipelines that are laid out beforehand: what their planners know, and what they answer.

A model is a row of equal layers. A stage is a run of layers on one device, or on several that
divide the microbatches among them. All times are in seconds, and all sizes in bytes.

The planners are `decod.lab.planner.pipedream` and `decod.lab.planner.dapple`. Both were made for
equal devices. Here they get the true times of devices and links, which is generous towards them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Matrix = tuple[tuple[float, ...], ...]
"""A value for each ordered pair of devices: `matrix[sender][receiver]`."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A run of layers, and the devices that each hold all of them."""

    num_layers: int
    devices: tuple[int, ...]
    """Indexes of devices."""


Pipeline = tuple[PlannedStage, ...]
"""The stages in the order in which activations pass them."""


@dataclass(frozen=True, kw_only=True)
class PipelineProblem:
    """A model to cut into stages, and the devices for them."""

    num_layers: int
    num_microbatches: int
    """Of a batch, after which all parameters take one step."""
    forward_s: tuple[float, ...]
    """Time of one layer and microbatch, by device."""
    backward_s: tuple[float, ...]
    num_layers_max: tuple[int, ...]
    """Most layers that fit into each device."""
    latency_s: Matrix
    """One-way latencies."""
    bandwidth_bytes_per_s: Matrix
    activation_bytes: float
    """Of a microbatch between two layers. Its gradient has the same size."""
    layer_bytes: float
    """Gradients of a layer, which a stage's devices average after a batch. 0: they are not averaged
    stage by stage."""
    machines: tuple[tuple[int, ...], ...]
    """Devices that are close to one another."""

    @property
    def num_devices(self) -> int:
        return len(self.forward_s)

    @cached_property
    def layer_s(self) -> tuple[float, ...]:
        """Time of one layer and microbatch, forward and backward, by device."""
        return tuple(map(sum, zip(self.forward_s, self.backward_s, strict=True)))

    def transfer_s(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Return how long a tensor takes on an idle link."""
        rate = self.bandwidth_bytes_per_s[sender][receiver]
        return self.latency_s[sender][receiver] + num_bytes / rate


def ring_of(problem: PipelineProblem, devices: Sequence[int], num_bytes: float) -> list[int]:
    """Return the devices in the order of a ring: each time on to the closest one that is left.

    Args:
        problem: The devices and links.
        devices: At least one. The ring begins with the first.
        num_bytes: Size of the tensor by whose time links are compared.
    """
    ring, left = [devices[0]], list(devices[1:])
    while left:
        here = ring[-1]
        closest = min(left, key=lambda device: problem.transfer_s(here, device, num_bytes))
        left.remove(closest)
        ring.append(closest)
    return ring


def all_reduce_s(problem: PipelineProblem, devices: Sequence[int], num_bytes: float) -> float:
    """Return how long the devices of a stage take to average a tensor along a ring.

    In each of 2 (n - 1) steps every device sends an n-th of the tensor to the next one. The slowest
    link sets the pace.
    """
    num = len(devices)
    if num == 1 or not num_bytes:
        return 0.0
    part_bytes = num_bytes / num
    ring = ring_of(problem, devices, part_bytes)
    links = zip(ring, [*ring[1:], ring[0]], strict=True)
    return 2 * (num - 1) * max(problem.transfer_s(a, b, part_bytes) for a, b in links)


def pieces(num_senders: int, num_receivers: int) -> list[tuple[int, int, float]]:
    """Return how a microbatch travels that each stage has split into equal parts.

    Returns:
        The index of a sender, that of a receiver, and the share of the microbatch between them.
        Shares add up to 1.
    """
    found = []
    whole = num_senders * num_receivers
    for sender in range(num_senders):
        for receiver in range(num_receivers):
            begin = max(sender * num_receivers, receiver * num_senders)
            end = min((sender + 1) * num_receivers, (receiver + 1) * num_senders)
            if begin < end:
                found.append((sender, receiver, (end - begin) / whole))
    return found
