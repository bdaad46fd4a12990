"""Hugging Face's Trainer as one host of a run.

    from decod.optimizer.huggingface import CollaborationCallback
    collaboration = CollaborationCallback(run="my-run", target_batch_size=4096)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[collaboration]).train()

Nothing else of decod imports this module: it needs transformers.
"""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import get_scheduler
from typing_extensions import override

from decod.errors import ConfigError
from decod.optimizer.frameworks import clip_averages, hand_over, show_join_string
from decod.optimizer.optimizer import CollaborativeOptimizer, show_plainly


class CollaborationCallback(TrainerCallback):
    """Wraps the Trainer's optimizer, and ends with its training.

    Steps count as the samples that they have had, or as the tokens that were targets. Rates follow
    rounds, which all hosts have in common, and averages are clipped at the Trainer's
    `max_grad_norm`. Give each host a `data_seed` of its own: otherwise all train with the same
    batches.

    Args:
        target_batch_size: Samples of all hosts together in one round.
        num_rounds: Rounds after which training ends, if its own steps are not over before. The
            Trainer's schedule goes over them. None: without end, at a constant rate.
        settings: Other arguments of `CollaborativeOptimizer`: `run` or `join`, `count`, and so on.

    Attributes:
        optimizer: While training goes on.
    """

    def __init__(
        self, *, target_batch_size: int, num_rounds: int | None = None, **settings: Any
    ) -> None:
        show_plainly()
        self._target = target_batch_size
        self._num_rounds = num_rounds
        self._settings = settings
        self.optimizer: CollaborativeOptimizer | None = None

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        outer = rest["optimizer"]
        wrapped: torch.optim.Optimizer = getattr(outer, "optimizer", outer)
        if isinstance(wrapped, CollaborativeOptimizer) or outer is wrapped:
            raise ConfigError(
                f"the Trainer's optimizer is a {type(wrapped).__qualname__}",
                why="the callback wraps an optimizer of torch, as accelerate has prepared it",
                fix="give the Trainer no CollaborativeOptimizer beside the callback",
                code="E-CFG-093",
            )
        if args.max_grad_norm:
            clip_averages(wrapped, args.max_grad_norm)
            args.max_grad_norm = 0.0
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        usual = {"batch_size_per_step": batch_size, "scheduler": self._scheduler(args, rest)}
        self.optimizer = CollaborativeOptimizer(
            wrapped, target_batch_size=self._target, **{**usual, **self._settings}
        )
        self._put(outer, self.optimizer)
        show_join_string(self.optimizer)

    def _scheduler(self, args: TrainingArguments, rest: dict[str, Any]) -> Any:
        """Return what makes the scheduler that is stepped once a round."""
        kind = args.lr_scheduler_type
        own = rest["lr_scheduler"]
        num_rounds = self._num_rounds
        if num_rounds is None:
            if "constant" not in str(getattr(kind, "value", kind)):
                raise ConfigError(
                    f"lr_scheduler_type is {getattr(kind, 'value', kind)}, without num_rounds",
                    why="rates follow rounds, at all hosts alike, and nobody knows how many "
                    "rounds there will be",
                    fix='give the callback num_rounds=..., or lr_scheduler_type="constant"',
                    code="E-CFG-090",
                )
            num_rounds = 1
        hand_over(own, getattr(rest["optimizer"], "optimizer", rest["optimizer"]))
        warmup = args.get_warmup_steps(num_rounds)
        more: Any = args.lr_scheduler_kwargs
        return lambda wrapped: get_scheduler(
            kind, wrapped, warmup, num_rounds, scheduler_specific_kwargs=more
        )

    def _put(self, outer: Any, optimizer: torch.optim.Optimizer) -> None:
        """Have accelerate's optimizer step another one."""
        outer.optimizer = optimizer
        if getattr(outer, "scaler", None) is not None:
            from accelerate.optimizer import (  # type: ignore[import-untyped]  # It has no types.
                patch_optimizer_step,
            )

            outer._optimizer_original_step_method = optimizer.step
            outer._optimizer_patched_step_method = patch_optimizer_step(outer, optimizer.step)

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        if self._num_rounds is not None and self.optimizer is not None:
            control.should_training_stop |= self.optimizer.round >= self._num_rounds

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        optimizer = self.optimizer
        if optimizer is not None and "loss" in rest["logs"]:
            rest["logs"].update(round=optimizer.round, hosts=optimizer.num_peers)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        if self.optimizer is not None:
            self.optimizer.close()
            self._put(rest["optimizer"], self.optimizer.wrapped)
