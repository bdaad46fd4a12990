"""A compute process's jobs, run in this process: what a relay does, without sockets."""

import os
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from decod.config.schema import RunConfig
from decod.model.config import StagesConfig
from decod.train.executor import StageExecutor
from decod.train.params import OptimizerConfig
from decod.worker.arena import Arena, Region
from decod.worker.jobs import JobRunner
from gpu.setting import Setting, batch_of, llama

_PAGE = 4096


def run_of(setting: Setting, name: str, num_blocks: int, microbatch_size: int) -> RunConfig:
    """Return a run whose only relay stage has all blocks."""
    return RunConfig(
        name="gpu-check",
        num_iterations=4,
        model=llama(setting, name, num_blocks),
        stages=StagesConfig(num_relay_stages=1),
        batch=batch_of(setting, microbatch_size),
        optimizer=OptimizerConfig(lr=1e-4),
    )


class Relay:
    """Stage 1 of a run on a device.

    Args:
        setting: The device.
        run: The run.
        device: The node's device or devices. None: that of the setting.
    """

    def __init__(self, setting: Setting, run: RunConfig, device: str | None = None) -> None:
        self.setting, self.run = setting, run
        self._descriptor = os.memfd_create("gpu-check")
        self.runner = JobRunner(Arena(self._descriptor))
        self._num_jobs = 0
        self.seconds = 0.0
        """Of the last job, as its reply says."""
        self.facts = self.ask(
            "configure",
            model=asdict(run.model),
            stages=asdict(run.stages),
            batch=asdict(run.batch),
            optimizer=asdict(run.optimizer),
            reduction=asdict(run.reduction),
            seed=run.seed,
            device=device or setting.device,
        )
        self.built = self.ask("build", stage_index=1)
        size = -(-self.built["activation_bytes"] // _PAGE) * _PAGE
        self.regions = [
            {"offset": index * size, "num_bytes": self.built["activation_bytes"]}
            for index in range(3)
        ]
        """Of the arena: an activation, a gradient, and a result."""
        os.ftruncate(self._descriptor, 3 * size)
        # All relays of a run get the same, so that they can be compared.
        noise = torch.Generator().manual_seed(run.seed)
        for region in self.regions[:2]:
            self.view(region).copy_(torch.randn(self.view(region).shape, generator=noise) / 16)

    def close(self) -> None:
        """End other ranks, and give the arena back."""
        self.runner.close()
        os.close(self._descriptor)

    @property
    def executor(self) -> StageExecutor:
        """The stage itself."""
        found = self.runner._executor
        assert found is not None
        return found

    def view(self, region: dict[str, int]) -> Tensor:
        """Return an activation in the arena."""
        arena = self.runner._arena
        return arena.tensor(Region.parse(region), *self.executor.config.whole.activation_wire)

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Run a job, with what it puts off, and return its result."""
        self._num_jobs += 1
        reply = self.runner.run({"job": self._num_jobs, "kind": kind, **fields})
        self.runner.finish()
        if not reply["ok"]:
            raise RuntimeError(f"{kind}: {reply['error']}")
        self.seconds = reply["seconds"]
        return dict(reply["result"])

    def forward(self, index: int) -> None:
        """Run a microbatch forward."""
        entry, _, result = self.regions
        self.ask("forward", mb=_named(index), inputs=[entry], outputs=[result])

    def backward(self, index: int) -> None:
        """Run a microbatch backward."""
        _, gradient, result = self.regions
        self.ask("backward", mb=_named(index), inputs=[gradient], outputs=[result])

    def step(self, num_microbatches: int) -> None:
        """Take the step of an iteration as the only member."""
        executor = self.executor
        iteration = executor.anchor + 1
        executor.propose(iteration, [], weights_total=num_microbatches)
        executor.commit(iteration)
        self.setting.wait()


def _named(index: int) -> dict[str, int]:
    return {"iteration": 1, "data_node_index": 0, "index": index}
