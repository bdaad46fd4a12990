"""The optimizer that a training script wraps round its own."""

import atexit
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from decod.errors import ConfigError, DecodError
from decod.optimizer.seen import SeenSamples
from decod.optimizer.session import FollowingSession, LoopTiming, RunSession
from decod.optimizer.settings import Settings, checked_batch_size, read_join
from decod.optimizer.training import Training
from decod.system import keep_freed_memory

_OWN = str(Path(__file__).parents[1])
_BUGS = "E-INT-"
"""Prefix of codes of errors in decod itself. Their tracebacks are wanted."""


def show_plainly() -> None:
    """Show uncaught errors of decod as one message, and end with their exit codes.

    Python would print a traceback through decod, in which the reader must look for the message. A
    hook that somebody else has set stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, DecodError) or error.code.startswith(_BUGS):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"error: {error}\n{_place(trace)}")
    sys.stderr.flush()
    # The interpreter ends with this code, after all that runs at exit.
    raise SystemExit(int(error.exit_code))


def _place(trace: TracebackType | None) -> str:
    """Return where in the user's code the error has come up."""
    frames = traceback.extract_tb(trace)
    own = next((k for k, frame in enumerate(frames) if frame.filename.startswith(_OWN)), 0)
    if not own:
        return ""
    frame = frames[own - 1]
    return f"  in {frame.filename}, line {frame.lineno}\n"


_KEY = "decod"
"""The key in `state_dict` of what is not the wrapped optimizer's."""


class CollaborativeOptimizer(torch.optim.Optimizer):
    """Trains together with all hosts of a run.

    By default, each `step()` adds the gradient to those of the steps before. Once all hosts
    together have `target_batch_size` samples, the wrapped optimizer steps from the average over all
    samples, at all hosts alike. So hosts of any speed act as one with a large batch. A host that is
    alone trains exactly as with the wrapped optimizer.

    `step()` raises a `DecodError` if the node process dies. To go on alone, catch it and use the
    wrapped optimizer.

    In a process group of torch.distributed, all ranks are one host. Each rank makes the optimizer
    after it has wrapped the model in DDP. Rank 0 talks to the node. `batch_size_per_step` is then
    of all ranks together.

    Buffers of the model, such as the statistics of batch normalisation, stay each host's own.

    Args:
        optimizer: Any torch optimizer whose `step` needs no closure, already made.
        run: Name of a run to begin or to go on with. Either this or `join`.
        join: A join string, or the path of a file with one.
        target_batch_size: Samples of all hosts together in one round.
        batch_size_per_step: Samples of which the gradient of one full `step()` is the mean. A
            step with fewer counts as what the model was called with.
        count: What a sample is: `"samples"`, or `"tokens"`: those that are targets, by the argument
            `labels` of the model. Sizes are then of tokens, too.
        use_local_updates: Step at once, and average how far each host has come. For slow links.
        gradient_accumulation_steps: Calls of `step()` that make one step, each after a backward
            pass of its own. Don't divide the loss: the step takes the mean of its gradients.
        overlap: Don't wait: an average that arrives later counts one step later.
        compression: How averages travel: `none`, `fp16`, `bf16`, `int8`, `int4`, `lowrank`,
            `lowrank+int4` or `cocktail`. What is left out is added to the next average.
        averaging_timeout_s: Longest wait for an average in `step()`, in seconds.
        share: Samples of this host in a round, after which `step()` waits for the average.
        scheduler: Makes a learning rate scheduler from the wrapped optimizer. It is stepped once a
            round, at all hosts alike.
        grad_scaler: A `torch.amp.GradScaler` that has scaled the loss. `step()` then unscales,
            skips what is not finite, and updates the scaler. Without it, call its `step` yourself.
        state_dir: Where the node keeps its identity and logs. None: a folder of its own.
        listen: Address and port to listen on, `host:port`. Port 0: any.
        advertise: Address at which other hosts reach this one, if it differs.
        name: What others see of this host. None: the host's name.
        upload_max_mbit: Most that this host sends to all others together, in Mbit/s. None: no
            limit.
        page: Whether this host serves a web page of the run, at http://127.0.0.1:7780/ or a free
            port.
        verbose: Whether to show the run's progress on standard error.

    Raises:
        ConfigError: A setting is wrong, or something can't be averaged.
        DecodError: The node could not join the run.
    """

    def __init__(  # noqa: PLR0913 - it is what users see: each setting by its name.
        self,
        optimizer: torch.optim.Optimizer,
        *,
        target_batch_size: int,
        batch_size_per_step: int,
        run: str | None = None,
        join: str | Path | None = None,
        count: str = "samples",
        use_local_updates: bool = False,
        gradient_accumulation_steps: int = 1,
        overlap: bool = False,
        compression: str = "none",
        averaging_timeout_s: float = 60.0,
        share: int | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        state_dir: str | Path | None = None,
        listen: str = "0.0.0.0:0",
        advertise: str | None = None,
        name: str | None = None,
        upload_max_mbit: float | None = None,
        page: bool = True,
        verbose: bool = True,
    ) -> None:
        show_plainly()
        self._settings = Settings(
            run=run,
            join=read_join(join),
            target_batch_size=target_batch_size,
            batch_size_per_step=batch_size_per_step,
            count=count,
            use_local_updates=use_local_updates,
            gradient_accumulation_steps=gradient_accumulation_steps,
            overlap=overlap,
            compression=compression,
            averaging_timeout_s=averaging_timeout_s,
            share=share,
            state_dir=None if state_dir is None else str(state_dir),
            listen=listen,
            advertise=advertise,
            name=name,
            upload_max_mbit=upload_max_mbit,
            page=page,
            verbose=verbose,
        )
        _check_optimizer(optimizer)
        self.wrapped = optimizer
        self._is_complete = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_complete = True
        self._share()
        self._grad_scaler = grad_scaler
        self._is_in_scaler = False
        self._is_taken = False
        self._num_calls = 0
        self._training = Training(optimizer, self._settings, scheduler)
        if self._training.parameters.on_cpu:
            # Gradients come and go each step: mapping their memory anew takes a sixth of one.
            keep_freed_memory()
        self._seen = SeenSamples(
            self._training.parameters.tensors,
            batch_size_per_step,
            self._training.ranks.num,
            of_tokens=count == "tokens",
        )
        self._timing = LoopTiming()
        self._session: RunSession | FollowingSession | None = None
        self._start()
        atexit.register(self.close)

    def _share(self) -> None:
        """See what the wrapped optimizer sees: a change of a rate must reach it."""
        self.param_groups = self.wrapped.param_groups
        self.state = self.wrapped.state

    def _start(self) -> None:
        if self._training.ranks.is_first:
            self._session = RunSession(self._training, self._settings, self._timing)
        else:
            self._session = FollowingSession(self._training)

    # --- the loop -----------------------------------------------------------------------------

    @override
    def step(self, closure: Callable[[], Any] | None = None, batch_size: int | None = None) -> Any:
        """Take in the gradients that the backward pass has left, and go on with the run.

        Args:
            closure: Computes the loss and its gradients anew; called once.
            batch_size: Samples of this step. None: as many as the model was called with, if that
                was seen, and else `batch_size_per_step`.

        Returns:
            What the closure returns.

        Raises:
            DecodError: The node has ended, or left its run.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        num_samples = self._num_samples(batch_size)
        if num_samples == 0:  # No token of it is a target.
            self._step(0, is_skipped=True)
            return loss
        scaler = self._grad_scaler
        if scaler is None or self._is_in_scaler:
            self._step(num_samples)
            return loss
        self._is_in_scaler = True
        self._is_taken = False
        try:
            # Unscales, and calls this method again if it has found the gradients finite.
            scaler.step(self, batch_size=num_samples)
            if not self._is_taken:
                self._step(num_samples, is_skipped=True)
        finally:
            self._is_in_scaler = False
        scaler.update()
        return loss

    def _num_samples(self, batch_size: int | None) -> int:
        if batch_size is not None:
            self._seen.drop()
            return checked_batch_size(batch_size)
        # Other ranks follow, and add nothing up.
        if not self._training.collects:
            return 1
        num_samples = self._seen.take()
        self._training.parameters.scale_gradients(self._seen.correction)
        return num_samples

    def _step(self, num_samples: int, *, is_skipped: bool = False) -> None:
        session = self._open
        self._is_taken = True
        self._timing.begin_step()
        self._num_calls += 1
        ends_step = self._num_calls % self._settings.gradient_accumulation_steps == 0
        self._training.add(num_samples, ends_step=ends_step, is_skipped=is_skipped)
        self._timing.lap("accumulate")
        if ends_step:
            session.end_step()

    @property
    def _open(self) -> RunSession | FollowingSession:
        if self._session is None:
            raise ConfigError(
                "the optimizer is closed",
                why="its node has left the run",
                fix="make a new CollaborativeOptimizer",
                code="E-CFG-094",
            )
        return self._session

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters. What `step()` has taken in stays."""
        self._seen.drop()
        self.wrapped.zero_grad(set_to_none)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group of parameters.

        Raises:
            ConfigError: Always.
        """
        if self._is_complete:
            raise ConfigError(
                "a group of parameters was added",
                why="all hosts of a run average the same parameters, from the begin",
                fix="give the wrapped optimizer all groups before you wrap it",
                code="E-CFG-091",
            )
        super().add_param_group(param_group)

    # --- checkpoints --------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, the round, and what is outstanding."""
        calls = {"num_calls": self._num_calls}
        return {**self.wrapped.state_dict(), _KEY: {**self._training.to_checkpoint(), **calls}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint. The node joins its run anew, from the checkpoint's round.

        Load the model first. A state that the wrapped optimizer alone has saved counts as round 0.
        """
        training = self._training
        is_open = self._session is not None
        kept = state_dict.get(_KEY)
        before = training.state_hash()
        own = {key: value for key, value in state_dict.items() if key != _KEY}
        training.load_wrapped(own)
        self._share()
        is_same = (kept is None or training.is_at(kept)) and training.state_hash() == before
        if training.ranks.agree(is_open and is_same):
            # Some frameworks load what they have just saved.
            return
        self._close_session()
        training.forget_node()
        if kept is not None:
            self._num_calls = kept["num_calls"]
            training.from_checkpoint(kept)
        if is_open:
            self._start()

    # --- what is known of the run -------------------------------------------------------------

    @property
    def round(self) -> int:
        """The newest round whose average is in the parameters. 0: none yet."""
        return self._training.round

    @property
    def num_peers(self) -> int:
        """Hosts that take part, this one included, as far as this host knows."""
        return self._open.progress.num_peers

    @property
    def samples_stepped(self) -> int:
        """Samples of all steps of this host. It is the sum of the next three."""
        return self._training.samples.stepped

    @property
    def samples_contributed(self) -> int:
        """Samples that are in the parameters by an average, or by a step of this host alone."""
        return self._training.samples.contributed

    @property
    def samples_outstanding(self) -> int:
        """Samples that wait for a round, or are in the one in hand."""
        samples = self._training.samples
        return samples.outstanding + samples.lent

    @property
    def samples_dropped(self) -> int:
        """Samples that are lost: not finite, or too old when another state was loaded."""
        return self._training.samples.dropped

    @property
    def join_string(self) -> str:
        """The string that another host needs to join this run."""
        return self._open.join_string

    def tell(self, num_samples: int, factor: float = 1.0) -> None:
        """Say what the next step is computed from. For frameworks, which call `step()` themselves.

        Args:
            num_samples: Samples of the step.
            factor: By which its gradient must be multiplied to be the mean over them.
        """
        self._seen.told = checked_batch_size(num_samples), factor

    def watch(self, model: nn.Module) -> None:
        """Measure loading of data, forward and backward pass apart, for the run's bottlenecks.

        Args:
            model: The module that the loop calls.
        """
        self._timing.watch(model)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run. Other hosts go on. The parameters stay as they are."""
        atexit.unregister(self.close)
        self._seen.close()
        self._close_session()

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, CollaborativeOptimizer) or not isinstance(
        optimizer, torch.optim.Optimizer
    ):
        problem = f"optimizer is a {type(optimizer).__qualname__}"
    elif isinstance(optimizer, torch.optim.LBFGS):
        problem = "optimizer is LBFGS, which computes the loss several times in a step"
    else:
        return
    raise ConfigError(
        problem,
        why="a round is one step of a torch.optim.Optimizer from one gradient",
        fix="wrap an optimizer such as torch.optim.AdamW",
        code="E-CFG-093",
    )
