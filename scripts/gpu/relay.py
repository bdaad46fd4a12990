"""A compute process's jobs, run in this process: what a relay does, without sockets."""

import json
import os
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.job_codec import Region, fields_of, kind_of, parsed
from decod.protocol.core.jobs import Configure
from decod.run.protocol_config import NO_AUDITS
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import OptimizerConfig
from decod.system import anonymous_file
from decod.train.executor import StageExecutor
from decod.worker.device import Arena
from decod.worker.job_methods import JobRunner
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
        self._descriptor = anonymous_file("gpu-check")
        self.runner = JobRunner(Arena(self._descriptor))
        self._num_jobs = 0
        self.seconds = 0.0
        """Of the last job, as its reply says."""
        settings = asdict(replace(run, audits=NO_AUDITS)) | {"device": device or setting.device}
        self.facts: dict[str, Any] = self.ask(Configure(settings)).facts
        self.built: jobs.Built = self.ask(jobs.Build(1))
        size = -(-self.built.activation_bytes // _PAGE) * _PAGE
        self.regions = [
            {"offset": index * size, "num_bytes": self.built.activation_bytes} for index in range(3)
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
        found = self.runner._configured
        assert found is not None
        return found

    def view(self, region: dict[str, int]) -> Tensor:
        """Return an activation in the arena."""
        arena = self.runner._arena
        return arena.tensor(Region.parse(region), *self.executor.config.whole.activation_wire)

    def ask(self, job: jobs.BaseJob, *regions: list[dict[str, int]]) -> Any:
        """Run a job, and return its result.

        Args:
            job: The job.
            regions: Its inputs, and its outputs.
        """
        self._num_jobs += 1
        message = {"job": self._num_jobs, "kind": kind_of(type(job)), "fields": fields_of(job)}
        message |= dict(zip(("inputs", "outputs"), regions, strict=False))
        reply = self.runner.run(json.loads(json.dumps(message)))
        if not reply["ok"]:
            raise RuntimeError(f"{job.name}: {reply['error']}")
        self.seconds = reply["seconds"]
        return parsed(job.result, json.loads(json.dumps(reply["result"])))

    def forward(self, index: int) -> None:
        """Run a microbatch forward."""
        entry, _, result = self.regions
        self.ask(jobs.Forward(_named(index)), [entry], [result])

    def backward(self, index: int) -> None:
        """Run a microbatch backward."""
        _, gradient, result = self.regions
        self.ask(jobs.Backward(_named(index)), [gradient], [result])

    def step(self, num_microbatches: int) -> None:
        """Take the step of an iteration as the only member."""
        executor = self.executor
        iteration = executor.anchor + 1
        executor.propose(iteration, [], weights_total=num_microbatches)
        executor.commit(iteration)
        self.setting.wait()


def _named(index: int) -> MicrobatchId:
    return MicrobatchId(1, 0, index)
