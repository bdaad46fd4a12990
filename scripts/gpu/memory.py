"""Memory of a stage on the device, beside what decod's own plan expects."""

import torch
from torch import Tensor

from decod.config.needs import stage_needs
from decod.protocol.core import jobs
from gpu.relay import Relay, run_of
from gpu.result import Measure
from gpu.setting import Setting

DIFFERENCE_MAX = 0.1
"""Target: the share by which memory in use may differ from the plan."""

_NUM_HELD = 4
"""Microbatches between forward and backward."""


def check_memory(setting: Setting) -> list[Measure]:
    """Compare memory in use with the plan: of the state after two steps, and with microbatches."""
    run = run_of(setting, "1b", setting.pick(4, 2), setting.pick(4, 2))
    relay = Relay(setting, run)
    measured = relay.ask(jobs.Measure())
    for _ in range(2):
        relay.forward(0)
        relay.backward(0)
        relay.step(1)
    state_bytes = _used_bytes(setting, relay)
    planned_bytes = stage_needs(run, 1).device_bytes
    found = [
        Measure("state, planned", planned_bytes / 2**30, "GiB"),
        Measure("state, in use", state_bytes / 2**30, "GiB"),
        _difference("state, difference", state_bytes, planned_bytes),
    ]
    if setting.on_cuda:
        found += _held(setting, relay, state_bytes, measured.microbatch_memory_bytes)
    relay.close()
    return found


def _held(setting: Setting, relay: Relay, state_bytes: int, microbatch_bytes: int) -> list[Measure]:
    for index in range(_NUM_HELD):
        relay.forward(index)
    setting.wait()
    held_bytes = (_used_bytes(setting, relay) - state_bytes) // _NUM_HELD
    for index in range(_NUM_HELD):
        relay.backward(index)
    relay.step(_NUM_HELD)
    peak_bytes = torch.cuda.max_memory_allocated(setting.device)
    reserved_bytes = torch.cuda.memory_reserved(setting.device)
    return [
        Measure("a microbatch, measured at the start", microbatch_bytes / 2**20, "MiB"),
        Measure("a microbatch, in use", held_bytes / 2**20, "MiB"),
        _difference("a microbatch, difference", held_bytes, microbatch_bytes),
        Measure("peak of tensors", peak_bytes / 2**30, "GiB"),
        Measure("reserved by torch", reserved_bytes / 2**30, "GiB"),
    ]


def _difference(name: str, used_bytes: int, planned_bytes: int) -> Measure:
    share = abs(used_bytes / planned_bytes - 1)
    return Measure(name, share, "", at_most=DIFFERENCE_MAX)


def _used_bytes(setting: Setting, relay: Relay) -> int:
    """Return what tensors take of the device. On a CPU: those of the state alone."""
    if setting.on_cuda:
        return torch.cuda.memory_allocated(setting.device)
    built = relay.executor._built
    state = built.state
    tensors: list[Tensor] = [built.gradient.sum_P, *built.stage.parameters()]
    for each in (state.committed, state.buffers_for(state.iteration + 1)):
        tensors += [each.weights, *each.moments]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
