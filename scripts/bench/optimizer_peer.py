"""One training loop of `bench_optimizer.py`: plain torch, decod or hivemind round the same loop.

    PYTHON -m bench.optimizer_peer OPTIONS

OPTIONS is a `Loop` as JSON. The loop reads lines: `PEERS ADDRESS` (join there; empty: begin),
`WARM` (train until two rounds have ended) and `GO SECONDS` (train so long). It prints `READY
ADDRESS`, `WARMED`, and `DONE` with a JSON object. Only the subject's own library is imported.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import nn

RUN = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a loop does, and with what."""

    subject: str
    """`plain`, `decod` or `hivemind`."""
    peer: int
    folder: str
    host: str = "127.0.0.1"
    width: int = 1024
    layers: int = 10
    """Of `width` times `width` numbers each."""
    batch: int = 64
    """Samples of a step."""
    steps: int = 16
    """Of each peer in a round, if peers are equally fast."""
    num_peers: int = 2
    threads: int = 1
    overlap: bool = False
    compression: str = "none"
    local: bool = False

    @property
    def target(self) -> int:
        return self.num_peers * self.steps * self.batch

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class PlainOptimizer:
    """What one process does with a large batch: it adds gradients up, and steps now and then."""

    round = 0

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._optimizer, self._num_steps, self._num = optimizer, num_steps, 0

    def step(self) -> None:
        self._num += 1
        if self._num % self._num_steps == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.round += 1

    def zero_grad(self) -> None:
        """Gradients add up by themselves."""


class Subject:
    """A loop with one of the optimizers.

    Args:
        loop: What to measure.
    """

    def __init__(self, loop: Loop) -> None:
        torch.manual_seed(loop.peer)
        self._loop = loop
        layers = [
            each
            for _ in range(loop.layers)
            for each in (nn.Linear(loop.width, loop.width), nn.ReLU())
        ]
        self._model = nn.Sequential(*layers)
        self._wrapped = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._inputs = torch.randn(loop.batch, loop.width)
        self._targets = torch.randn(loop.batch, loop.width)
        self._optimizer: Any = None
        self._num_samples = 0

    def join(self, address: str) -> str:
        """Join the peer at an address, or begin; return where others find this one."""
        loop = self._loop
        match loop.subject:
            case "plain":
                self._optimizer = PlainOptimizer(self._wrapped, loop.steps)
                return "-"
            case "decod":
                from decod.optimizer import CollaborativeOptimizer

                where: dict[str, Any] = {"join": address} if address else {"run": RUN}
                self._optimizer = CollaborativeOptimizer(
                    self._wrapped,
                    target_batch_size=loop.target,
                    batch_size_per_step=loop.batch,
                    overlap=loop.overlap,
                    compression=loop.compression,
                    use_local_updates=loop.local,
                    listen=f"{loop.host}:0",
                    state_dir=loop.folder,
                    verbose=False,
                    **where,
                )
                return str(self._optimizer.join_string)
            case _:
                return self._join_hivemind(address)

    def _join_hivemind(self, address: str) -> str:
        import hivemind

        loop = self._loop
        kinds = {
            "none": hivemind.compression.NoCompression(),
            "fp16": hivemind.compression.Float16Compression(),
            "int8": hivemind.compression.Uniform8BitQuantization(),
        }
        dht = hivemind.DHT(
            host_maddrs=[f"/ip4/{loop.host}/tcp/0"],
            initial_peers=[address] if address else [],
            start=True,
        )
        self._optimizer = hivemind.Optimizer(
            dht=dht,
            run_id=RUN,
            target_batch_size=loop.target,
            batch_size_per_step=loop.batch,
            optimizer=self._wrapped
            if loop.local
            else lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            params=None if loop.local else self._model.parameters(),
            use_local_updates=loop.local,
            # What its documentation recommends for hiding the time of communication.
            offload_optimizer=not loop.local and loop.overlap,
            delay_optimizer_step=loop.overlap,
            delay_grad_averaging=not loop.local and loop.overlap,
            delay_state_averaging=loop.overlap,
            matchmaking_time=1.0,
            averaging_timeout=60.0,
            grad_compression=kinds[loop.compression],
            state_averaging_compression=kinds[loop.compression],
        )
        return str(dht.get_visible_maddrs()[0])

    @property
    def _round(self) -> int:
        optimizer = self._optimizer
        return int(optimizer.local_epoch if hasattr(optimizer, "local_epoch") else optimizer.round)

    def _step(self) -> None:
        loss = nn.functional.mse_loss(self._model(self._inputs), self._targets)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._num_samples += self._loop.batch

    def warm(self) -> None:
        """Train until two rounds have ended."""
        last = self._round + 2
        while self._round < last:
            self._step()

    def train(self, seconds: float) -> dict[str, Any]:
        """Train so long; return what came of it."""
        self._num_samples, first, cpu_s = 0, self._round, _cpu_s()
        begun_s = ended_s = time.monotonic()
        longest_s = 0.0
        while ended_s - begun_s < seconds:
            before_s = ended_s
            self._step()
            ended_s = time.monotonic()
            longest_s = max(longest_s, ended_s - before_s)
        return {
            "samples": self._num_samples,
            "seconds": ended_s - begun_s,
            "rounds": self._round - first,
            "longest_s": longest_s,
            "cpu_s": _cpu_s() - cpu_s,
        }


def _cpu_s() -> float:
    """Return the processor time of this process and of all that it has started."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _say(*words: str) -> None:
    print(" ".join(words), flush=True)


def main() -> None:
    """Run one loop."""
    loop = Loop(**json.loads(sys.argv[1]))
    torch.set_num_threads(loop.threads)
    subject = Subject(loop)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "PEERS":
            _say("READY", subject.join(rest))
        elif word == "WARM":
            subject.warm()
            _say("WARMED")
        else:
            _say("DONE", json.dumps(subject.train(float(rest))))


if __name__ == "__main__":
    main()
