"""A training script with `decod.CollaborativeOptimizer`, as a user might write it, under test.

    python -m tests.support.training_script OPTIONS

OPTIONS is a `Script` as JSON. The script reads commands from its standard input, one JSON object a
line, and prints what happens, one JSON object a line. It trains until its parameters have the
average of round `rounds`, or another command comes; when its input ends, it leaves the run. Its
data follow from the number of the peer and of the step, so a test can do the same in one process.
"""

import hashlib
import json
import math
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import decod
from decod.errors import DecodError
from decod.optimizer import node_link

_never = threading.Event()

_NUM_INPUTS, _NUM_OUTPUTS = 6, 3

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def falling(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script does."""

    settings: dict[str, Any]
    """Of the optimizer under test."""
    peer: int = 0
    """Its data are other ones than those of other peers."""
    seed: int = 0
    """Of the model."""
    dtype: str = "float64"
    hidden: int = 8
    noise: float = 0.0
    """Of the targets: no model has a smaller loss than its square."""
    optimizer: str = "sgd"
    schedules: bool = False
    step_s: float = 0.0
    """How much longer a step takes than it would."""
    data_s: float = 0.0
    """How long it waits for data."""
    node_late_s: float = 0.0
    """How late its node is with closing a round."""
    nan_steps: tuple[int, ...] = ()
    """Steps, from 0, whose gradients are not finite."""
    threads: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def make_model(script: Script) -> nn.Module:
    torch.manual_seed(script.seed)
    hidden = script.hidden
    model = nn.Sequential(
        nn.Linear(_NUM_INPUTS, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, _NUM_OUTPUTS),
    )
    return model.to(getattr(torch, script.dtype))


def batch(script: Script, step: int) -> tuple[Tensor, Tensor]:
    """Return the data of a step: what a fixed teacher says to random inputs."""
    size, dtype = script.settings["batch_size_per_step"], getattr(torch, script.dtype)
    generator = torch.Generator().manual_seed(1_000_003 * script.peer + step)
    inputs = torch.randn(size, _NUM_INPUTS, generator=generator, dtype=dtype)
    teacher = torch.randn(
        _NUM_INPUTS, _NUM_OUTPUTS, generator=torch.Generator().manual_seed(99), dtype=dtype
    )
    targets = torch.tanh(inputs @ teacher / 2)
    if script.noise:
        targets += script.noise * torch.randn(targets.shape, generator=generator, dtype=dtype)
    return inputs, targets


def loss_of(model: nn.Module, script: Script, step: int) -> Tensor:
    inputs, targets = batch(script, step)
    return nn.functional.mse_loss(model(inputs), targets)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def hash_of(model: nn.Module) -> str:
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


@dataclass(slots=True)
class Trainer:
    """The script's loop."""

    script: Script
    model: nn.Module
    optimizer: decod.CollaborativeOptimizer
    num_steps: int = 0
    longest_s: float = 0.0
    """That a call of the optimizer's `step` took."""
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        before = self.optimizer.round
        if self.script.data_s:
            _never.wait(self.script.data_s)
        loss = loss_of(self.model, self.script, self.num_steps)
        if self.num_steps in self.script.nan_steps:
            loss = loss * math.nan
        self.optimizer.zero_grad()
        loss.backward()
        if self.script.step_s:
            _never.wait(self.script.step_s)
        begun_s = time.monotonic()
        self.optimizer.step()
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
        self.num_steps += 1
        if not loss.isnan():
            self.losses.append(loss.item())
        if self.optimizer.round != before:
            say("round", **self.account())

    def train(self, rounds: int) -> None:
        """Train until a round's average is there, or another command waits."""
        while self.optimizer.round < rounds and not _command_waits():
            self.step()
        say("trained", **self.account(), parameters=flat(self.model).tolist())

    def account(self) -> dict[str, Any]:
        optimizer = self.optimizer
        losses, self.losses = self.losses, []
        return {
            "round": optimizer.round,
            "hash": hash_of(self.model),
            "steps": self.num_steps,
            "longest_s": self.longest_s,
            "loss": sum(losses) / len(losses) if losses else None,
            "stepped": optimizer.samples_stepped,
            "contributed": optimizer.samples_contributed,
            "outstanding": optimizer.samples_outstanding,
            "dropped": optimizer.samples_dropped,
        }


def _command_waits() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def say(kind: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def run(script: Script) -> None:
    torch.set_num_threads(script.threads)
    if script.node_late_s:
        late = "-m", "tests.support.late_node", str(script.node_late_s)
        node_link.COMMAND = (sys.executable, *late)  # type: ignore[assignment]
    model = make_model(script)
    wrapped = OPTIMIZERS[script.optimizer](model.parameters())
    optimizer = decod.CollaborativeOptimizer(
        wrapped, scheduler=falling if script.schedules else None, **script.settings
    )
    optimizer.watch(model)
    with optimizer:
        trainer = Trainer(script, model, optimizer)
        say("joined", join_string=optimizer.join_string, **trainer.account())
        # Unbuffered, so that `select` sees every line that was not read.
        while line := sys.stdin.buffer.raw.readline():
            trainer.train(json.loads(line)["rounds"])
    say("left", **trainer.account())


def main() -> int:
    fields = json.loads(sys.argv[1])
    fields["nan_steps"] = tuple(fields["nan_steps"])
    try:
        run(Script(**fields))
    except DecodError as error:
        say("error", code=error.code, what=error.what, why=error.why, fix=error.fix)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
