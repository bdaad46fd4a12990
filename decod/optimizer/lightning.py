"""Lightning's Trainer as one host of a run.

    from decod.optimizer.lightning import CollaborationStrategy
    strategy = CollaborationStrategy(run="my-run", target_batch_size=4096, batch_size_per_step=32)
    lightning.Trainer(strategy=strategy).fit(module, batches)

Nothing else of decod imports this module: it needs lightning.
"""

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from typing_extensions import override

from decod.devices import CPU, first_accelerator
from decod.errors import ConfigError
from decod.optimizer.frameworks import clip_averages, show_join_string
from decod.optimizer.optimizer import CollaborativeOptimizer, show_plainly


class CollaborationStrategy(SingleDeviceStrategy):
    """Wraps the optimizer that `configure_optimizers` returns. The module stays as it is.

    Each batch counts as the samples that it has, also the last one of an epoch, and in
    `accumulate_grad_batches`. A scheduler of the module is stepped once a round, at all hosts
    alike. Averages are clipped at the Trainer's `gradient_clip_val`.

    Args:
        target_batch_size: Samples of all hosts together in one round.
        batch_size_per_step: Samples of a usual batch, times `accumulate_grad_batches`.
        device: On which it trains. None: the first accelerator that is there, or the CPU.
        settings: Other arguments of `CollaborativeOptimizer`: `run` or `join`, and so on.
    """

    strategy_name = "decod"

    def __init__(
        self,
        *,
        target_batch_size: int,
        batch_size_per_step: int,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        show_plainly()
        super().__init__(device or _usual_device())
        sizes = {
            "target_batch_size": target_batch_size,
            "batch_size_per_step": batch_size_per_step,
        }
        self._settings = {**settings, **sizes}
        self._usual = batch_size_per_step
        self._batch_size = self._num_samples = 0
        self._num_accumulated = 1
        self.optimizer: CollaborativeOptimizer | None = None

    @override
    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or len(self.lr_scheduler_configs) > 1:
            raise ConfigError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers and "
                f"{len(self.lr_scheduler_configs)} schedulers",
                why="a round is one step of one optimizer, and of its scheduler",
                fix="return one optimizer, and one scheduler at most",
                code="E-CFG-093",
            )
        (wrapped,) = self.optimizers
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.lr_scheduler_configs = []
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm"):
            clip_averages(wrapped, trainer.gradient_clip_val)
            trainer.gradient_clip_val = None
        self.optimizer = CollaborativeOptimizer(
            wrapped, scheduler=(lambda _: schedulers[0]) if schedulers else None, **self._settings
        )
        self.optimizers = [self.optimizer]
        show_join_string(self.optimizer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._batch_size = extract_batch_size(args[0] if args else next(iter(kwargs.values())))
        self._num_accumulated = self.lightning_module.trainer.accumulate_grad_batches
        return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kw: Any
    ) -> Tensor:
        own = self.optimizer
        if own is None or self._settings.get("count", "samples") != "samples":
            return super().backward(closure_loss, optimizer, *args, **kw)
        # Lightning has divided each loss by the usual number of batches, however few there are, and
        # gives a small batch the weight of a large one.
        self._num_samples += self._batch_size
        share = self._num_accumulated * self._batch_size / self._usual
        own.tell(self._num_samples, self._usual / self._num_samples)
        scaled = closure_loss if share == 1 else closure_loss * share
        return super().backward(scaled, optimizer, *args, **kw)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            self._num_samples = 0

    @override
    def teardown(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()
        super().teardown()


def _usual_device() -> str:
    first = first_accelerator()
    return CPU if first is None or first.absence() else first.name
