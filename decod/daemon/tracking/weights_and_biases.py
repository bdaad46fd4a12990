"""A run of Weights & Biases: the package `wandb` keeps it on disk, and sends it.

W&B gets what is passed here, and the releases of Python, `wandb` and the system. It does not get
the command line, which may hold secrets, nor the environment, source code and use of the host.
"""

from collections.abc import Mapping
from typing import Any

import wandb


class WandbRun:
    """One run in a project. A leader that takes over goes on with it.

    Args:
        project: Name of the project.
        run_name: What the run is called.
        run_id: Makes it the same run, whoever leads.
        config: Is shown beside the curves.
    """

    def __init__(self, project: str, run_name: str, run_id: str, config: Mapping[str, Any]) -> None:
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=project,
            name=run_name,
            id=run_id,
            resume="allow",
            config=dict(config),
            settings=settings,
        )
        # The step that W&B counts can't go back, as a run does that has lost a stage.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, time_s: float, numbers: Mapping[str, float]) -> None:  # noqa: ARG002
        """Hand some numbers of an iteration to W&B's process, which notes the time itself."""
        self._run.log({"iteration": iteration, **numbers})

    def close(self) -> None:
        """Wait until W&B has sent or kept everything."""
        self._run.finish()
