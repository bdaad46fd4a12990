"""PipeDream and DAPPLE in virtual time: pipelines whose schedule is fixed beforehand.

Both run one forward and one backward pass in turn (1F1B). A device has its passes in a fixed order:
some forward passes to warm up, then a backward and a forward pass in turn, and at last the
remaining backward passes. A pass waits for its place in that order and for its tensors. A link
carries one tensor at a time in each direction, and devices compute meanwhile. After its last
backward pass a stage averages its gradients along a ring. The batch ends with the slowest stage.

- PipeDream gives every device of a stage whole microbatches, in turn. It warms up with as many
  forward passes as its public code.
- DAPPLE splits every microbatch over all devices of a stage. It has two policies for the number of
  forward passes to warm up with: S - i of stage i of S, or 2 (S - i) - 1 if transfers are slow. The
  better of the two counts here.

Both take one step for each batch here. PipeDream's own steps overlap, on stale parameters: what it
learns from a batch is another thing, so batches could not be compared.

If a host disconnects, the batch is void. PipeDream begins again from the last checkpoint of all
stages, which its public code writes once for each epoch. DAPPLE says nothing of failures. The model
is generous to both: there is a checkpoint for every batch, to write and load it is free, a loss is
known at once, and the lost host is back at once. To wait for it until the next batch begins would
have no end, since the batch cannot end without the host. There are two readings of several losses:

- `each`: every host that disconnects in the batch interrupts it, at its own instant. So all systems
  meet the same losses. None strikes twice in a batch, however long that takes.
- `once`: after the first interruption the batch is spared. That is a lower bound, since the other
  systems meet all losses.

Neither lets the other devices of a stage do a lost device's share: the devices of a stage are a
ring that is set up once.

Source: PipeDream (arXiv:1806.03377), section 3, and its public code (`runtime.py`); PipeDream (SOSP
2019), section 4, "Checkpointing". DAPPLE (arXiv:2007.01045), sections III and V-B.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from decod.lab.planner.dapple import plan_dapple
from decod.lab.planner.pipedream import plan_pipedream
from decod.lab.planner.pipelines import Pipeline, PipelineProblem, all_reduce_s, pieces
from decod.lab.sim.server_instances import Instance

_Pass = tuple[bool, int]
"""Whether a pass is backward, and its microbatch."""

_Event = tuple[float, int, int, _Pass, bool]
"""When, a running number, the device, a pass, and whether a piece of its input arrives. Otherwise
the pass ends."""


def one_forward_one_backward(microbatches: Sequence[int], num_warmup: int) -> list[_Pass]:
    """Return a device's passes in their order.

    Args:
        microbatches: Of this device, in their order.
        num_warmup: Forward passes before the first backward pass. At least 1.
    """
    num = min(num_warmup, len(microbatches))
    order: list[_Pass] = [(False, microbatch) for microbatch in microbatches[:num]]
    for index, microbatch in enumerate(microbatches):
        order.append((True, microbatch))
        if index + num < len(microbatches):
            order.append((False, microbatches[index + num]))
    return order


@dataclass(slots=True)
class _Device:
    stage: int
    order: deque[_Pass]
    """Passes that have not begun."""
    share: float
    """Of a microbatch that its passes compute."""
    running: bool = False
    missing: defaultdict[_Pass, int] = field(default_factory=lambda: defaultdict(int))
    """Pieces of a pass's input that have not arrived, of passes that need some."""


class Timeline:
    """One batch on a pipeline.

    Args:
        problem: Devices and links.
        pipeline: The stages.
        split: Whether a stage splits every microbatch, instead of taking whole ones in turn.
        warmups: Number of forward passes that each stage's devices warm up with.

    Attributes:
        ends_s: When each device has done its last pass.
    """

    def __init__(
        self, problem: PipelineProblem, pipeline: Pipeline, *, split: bool, warmups: Sequence[int]
    ) -> None:
        self._problem = problem
        self._pipeline = pipeline
        self._split = split
        self._events: list[_Event] = []
        self._number = 0
        self._free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        """When each link can carry the next tensor."""
        self._devices: dict[int, _Device] = {}
        self.ends_s: dict[int, float] = {}
        for stage, num_warmup in enumerate(warmups):
            self._set_up(stage, num_warmup)
        self._run()

    def _set_up(self, stage: int, num_warmup: int) -> None:
        devices = self._pipeline[stage].devices
        num = self._problem.num_microbatches
        for index, device in enumerate(devices):
            own = range(num) if self._split else range(index, num, len(devices))
            order = one_forward_one_backward(own, num_warmup)
            share = 1 / len(devices) if self._split else 1.0
            self._devices[device] = _Device(stage, deque(order), share)
            self.ends_s[device] = 0.0
        for microbatch in range(num):
            for backward, other in ((False, stage - 1), (True, stage + 1)):
                if 0 <= other < len(self._pipeline):
                    for _, receiver, _ in self._routes(other, stage, microbatch):
                        self._devices[receiver].missing[backward, microbatch] += 1

    def _routes(self, begin: int, end: int, microbatch: int) -> list[tuple[int, int, float]]:
        """Return the sender, the receiver and the share of each piece between two stages."""
        senders, receivers = self._pipeline[begin].devices, self._pipeline[end].devices
        if self._split:
            found = pieces(len(senders), len(receivers))
            return [(senders[a], receivers[b], share) for a, b, share in found]
        sender = senders[microbatch % len(senders)]
        return [(sender, receivers[microbatch % len(receivers)], 1.0)]

    def _run(self) -> None:
        for device in self._devices:
            self._start(device, 0.0)
        while self._events:
            now_s, _, device, found, arrives = heapq.heappop(self._events)
            state = self._devices[device]
            if arrives:
                state.missing[found] -= 1
            else:
                state.running = False
                self.ends_s[device] = now_s
                self._send(device, found, now_s)
            self._start(device, now_s)
        for device, state in self._devices.items():
            assert not state.order, f"device {device} waits for ever: {state.order[0]}"

    def _start(self, device: int, now_s: float) -> None:
        state = self._devices[device]
        if state.running or not state.order or state.missing.get(state.order[0], 0):
            return
        found = state.order.popleft()
        times_s = self._problem.backward_s if found[0] else self._problem.forward_s
        duration_s = state.share * self._pipeline[state.stage].num_layers * times_s[device]
        state.running = True
        self._plan(now_s + duration_s, device, found, arrives=False)

    def _send(self, device: int, found: _Pass, now_s: float) -> None:
        backward, microbatch = found
        stage = self._devices[device].stage
        other = stage - 1 if backward else stage + 1
        if not 0 <= other < len(self._pipeline):
            return
        for sender, receiver, share in self._routes(stage, other, microbatch):
            if sender != device:
                continue
            num_bytes = share * self._problem.activation_bytes
            wire_s = num_bytes / self._problem.bandwidth_bytes_per_s[sender][receiver]
            sent_s = max(now_s, self._free_s[sender, receiver]) + wire_s
            self._free_s[sender, receiver] = sent_s
            arrival_s = sent_s + self._problem.latency_s[sender][receiver]
            self._plan(arrival_s, receiver, found, arrives=True)

    def _plan(self, time_s: float, device: int, found: _Pass, *, arrives: bool) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, device, found, arrives))


def batch_s(
    instance: Instance, pipeline: Pipeline, *, split: bool, warmups: Sequence[int]
) -> float:
    """Return how long a batch without losses takes, averages included.

    If all layers share their parameters, all hosts average, after the last pass of all.
    """
    problem = instance.problem
    ends_s = Timeline(problem, pipeline, split=split, warmups=warmups).ends_s
    if instance.model.shares_layers:
        devices = [device for stage in pipeline for device in stage.devices]
        return max(ends_s.values()) + all_reduce_s(problem, devices, instance.model.layer_bytes)
    return max(
        max(ends_s[device] for device in stage.devices)
        + all_reduce_s(problem, stage.devices, stage.num_layers * problem.layer_bytes)
        for stage in pipeline
    )


def pipedream_warmups(pipeline: Pipeline) -> list[int]:
    """Return the number of passes that fill the pipeline behind each stage."""
    numbers = [len(stage.devices) for stage in pipeline]
    return [sum(numbers[index + 1 :]) // num + 1 for index, num in enumerate(numbers)]


def pipedream_s(instance: Instance) -> float:
    """Return how long PipeDream takes for a batch without losses."""
    pipeline = plan_pipedream(instance.problem)
    assert pipeline is not None, f"{instance.name}: the model does not fit"
    return batch_s(instance, pipeline, split=False, warmups=pipedream_warmups(pipeline))


def dapple_s(instance: Instance) -> float:
    """Return how long DAPPLE takes for a batch without losses."""
    pipeline = plan_dapple(instance.problem)
    assert pipeline is not None, f"{instance.name}: the model does not fit"
    num = len(pipeline)
    return min(
        batch_s(instance, pipeline, split=True, warmups=warmups)
        for warmups in (
            [num - index for index in range(num)],
            [2 * (num - index) - 1 for index in range(num)],
        )
    )


def interrupted_s(undisturbed_s: float, losses: Mapping[str, float], *, each: bool) -> float:
    """Return how long a batch takes that begins again when it is interrupted.

    Args:
        undisturbed_s: Time of an attempt.
        losses: By host, when it disconnects: a share of that time.
        each: Whether all of them interrupt the batch, or only the first.
    """
    if not losses:
        return undisturbed_s
    last = max(losses.values()) if each else min(losses.values())
    return (1 + last) * undisturbed_s


RIGID: Mapping[str, Callable[[Instance], float]] = {"pipedream": pipedream_s, "dapple": dapple_s}
"""Time of a batch without losses in seconds, by system."""
