"""Goodput of real daemons: relays are killed one after the other, and start again at once.

A killed relay loses its processes and what they hold. Its state folder stays, as when a volunteer's
machine restarts.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from bench.child import BenchError, Child
from bench.goodput import Way
from bench.job import Job, write_run
from bench.subject import JOIN_STRING, START_MAX_S, ask_node
from decod.run.model_config import ModelConfig
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig, SyncConfig, SyncMethod

NUM_RELAYS = 4
MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
BATCH = BatchConfig(sequence_length=128, microbatch_size=4, num_microbatches=4 * NUM_RELAYS)

NUM_LAST = 20
"""Iterations over which the final loss is the mean."""
_FIRST = 3
"""The measurement begins with this iteration."""
_LOOK_S = 0.2
_SILENCE_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed iteration, as the leader has logged it."""

    instant_s: float
    num_tokens: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run did in the measured time."""

    duration_s: float
    num_tokens: int
    """Committed."""
    tokens_each: int
    """Of a microbatch."""
    num_lost: int
    """Microbatches that were lost with relays that had learnt from them."""
    num_late: int
    """Microbatches that count in a later average."""
    losses: tuple[float, ...]
    num_kills: int
    num_mended: int
    num_repeated: int
    away: float
    """Share of all relays' time between a kill and the relay's next iteration."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def kept_per_s(self) -> float:
        """Tokens a second that have entered the model and stay there."""
        return (self.num_tokens - self.num_lost * self.tokens_each) / self.duration_s

    @property
    def last_loss(self) -> float:
        return mean(self.losses[-NUM_LAST:])


def shorten(one: Outcome, other: Outcome) -> tuple[float, float]:
    """Return the final losses of two runs, both after the iterations that the shorter one has."""
    num = min(len(one.losses), len(other.losses))
    first = max(0, num - NUM_LAST)
    return mean(one.losses[first:num]), mean(other.losses[first:num])


def run_of(way: Way) -> RunConfig:
    """Return the run that keeps together in this way. It has no end of its own."""
    diloco = SyncConfig(
        method=SyncMethod.DILOCO,
        every=way.every,
        overlap=way.overlap,
        fragments=way.fragments,
        quorum=way.quorum,
        # The rates that docs/slow-links.md advises.
        outer_lr=0.4 if way.overlap else 0.7,
        outer_momentum=0.5 if way.overlap else 0.9,
    )
    return RunConfig(
        name="goodput",
        num_iterations=0,
        model=MODEL,
        stages=StagesConfig(num_relay_stages=1),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=1e-3),
        sync=diloco if way.every > 1 else SyncConfig(),
        protocol=ProtocolConfig(min_nodes_per_stage=NUM_RELAYS),
    )


@dataclass(slots=True)
class Fleet:
    """A leader and its relays, each as a process of its own."""

    job: Job
    folder: Path
    relays: list[Child] = field(default_factory=list)
    leader: Child | None = None
    num_kills: int = 0
    _join: str = ""

    def start(self) -> None:
        """Start all daemons."""
        deadline_s = time.monotonic() + START_MAX_S
        self.leader = leader = self._launch("data", "leader", str(self.job.run_file))
        while (match := JOIN_STRING.search(leader.next_line(deadline_s)[1])) is None:
            pass
        self._join = match[1]
        self.relays = [self._relay(index) for index in range(NUM_RELAYS)]

    def _relay(self, index: int) -> Child:
        return self._launch(f"relay-{index}", "join", self._join)

    def _launch(self, name: str, *task: str) -> Child:
        options = ("--listen", "127.0.0.1:0", "--threads", "1", "--device", "cpu")
        log = self.folder / f"log-{name}-{self.num_kills}"
        arguments = ("-m", "decod", *task, *options, "--state-dir", str(self.folder / name))
        return Child(arguments, num_threads=1, log=log)

    def replace_one(self) -> None:
        """Kill a relay, in turn, and start it again at once."""
        index = self.num_kills % NUM_RELAYS
        self.num_kills += 1
        self.relays[index].kill()
        self.relays[index] = self._relay(index)

    def stop(self) -> None:
        """End all daemons."""
        children = [*self.relays, *([] if self.leader is None else [self.leader])]
        for child in children:
            child.terminate()
        for child in children:
            child.stop()

    def records(self, name: str, *events: str) -> Iterator[dict[str, Any]]:
        """Yield a daemon's log records of these events."""
        marks = [f'"event": "{event}"' for event in events]
        with (self.folder / name / "node.log").open(encoding="utf-8") as log:
            for line in log:
                # A record that is still being written has no end of line yet.
                if line.endswith("\n") and any(mark in line for mark in marks):
                    yield json.loads(line)

    @property
    def commits(self) -> list[Commit]:
        """All iterations that the leader has committed."""
        return [
            Commit(instant_of(record), int(record["num_tokens"]), float(record["loss"]))
            for record in self.records("data", "iteration.committed")
        ]


def instant_of(record: Mapping[str, Any]) -> float:
    """Return the instant of a log record, in seconds."""
    return datetime.fromisoformat(record["time"]).timestamp()


def _now_s() -> float:
    """Return the present instant on the clock of the logs."""
    return datetime.now(UTC).timestamp()


def measure(folder: Path, way: Way, seconds: float, *, kill_every_s: float) -> Outcome:
    """Train for so many seconds.

    Args:
        folder: A new folder for everything.
        way: How members keep together.
        seconds: After the first iterations.
        kill_every_s: A relay is killed so often. 0: none is.

    Raises:
        BenchError: The run stands still.
    """
    folder.mkdir(parents=True)
    fleet = Fleet(write_run(folder, run_of(way)), folder)
    try:
        fleet.start()
        _wait_for(fleet, _FIRST)
        begin_s, before = _now_s(), _learning(folder)
        kills = _kill(fleet, seconds, kill_every_s)
        after = _learning(folder)
        return _outcome(fleet, begin_s, kills, (after[0] - before[0], after[1] - before[1]))
    finally:
        fleet.stop()


def _wait_for(fleet: Fleet, num: int) -> None:
    deadline_s = time.monotonic() + START_MAX_S + _SILENCE_MAX_S
    while len(fleet.commits) < num:
        if time.monotonic() > deadline_s:
            assert fleet.leader is not None
            raise BenchError(f"no iteration is committed\n{fleet.leader.log_tail()}")
        time.sleep(_LOOK_S)


def _kill(fleet: Fleet, seconds: float, kill_every_s: float) -> list[tuple[int, float]]:
    """Kill relays until the time is over. Return which, and when."""
    begin_s, kills = time.monotonic(), list[tuple[int, float]]()
    for num in range(1, int(seconds / kill_every_s) + 1) if kill_every_s else ():
        kill_s = begin_s + (num - 0.5) * kill_every_s
        if kill_s > begin_s + seconds:
            break
        time.sleep(max(0.0, kill_s - time.monotonic()))
        kills.append((fleet.num_kills % NUM_RELAYS, _now_s()))
        fleet.replace_one()
    time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
    return kills


def _learning(folder: Path) -> tuple[int, int]:
    """Return how many microbatches were lost and late so far, as `decod status` counts them."""
    sync = ask_node(folder / "data").get("sync") or {}
    return int(sync.get("num_lost") or 0), int(sync.get("num_late") or 0)


def _outcome(
    fleet: Fleet, begin_s: float, kills: Sequence[tuple[int, float]], learning: tuple[int, int]
) -> Outcome:
    commits = fleet.commits
    before = [commit for commit in commits if commit.instant_s <= begin_s]
    measured = commits[len(before) :]
    if not measured:
        assert fleet.leader is not None
        raise BenchError(f"the run stands still\n{fleet.leader.log_tail()}")
    first_s, last_s = before[-1].instant_s, measured[-1].instant_s
    opened = {
        index: [
            instant_of(record) for record in fleet.records(f"relay-{index}", "iteration.opened")
        ]
        for index in {index for index, _ in kills}
    }
    away_s = sum(away_from(opened[index], kill_s, last_s) for index, kill_s in kills)
    duration_s = last_s - first_s
    return Outcome(
        duration_s=duration_s,
        num_tokens=sum(commit.num_tokens for commit in measured),
        tokens_each=fleet.job.run.batch.tokens_per_microbatch,
        num_lost=learning[0],
        num_late=learning[1],
        losses=tuple(commit.loss for commit in commits),
        num_kills=len(kills),
        num_mended=sum(1 for _ in fleet.records("data", "iteration.mended")),
        num_repeated=sum(1 for _ in fleet.records("data", "iteration.aborted")),
        away=away_s / (NUM_RELAYS * duration_s),
    )


def away_from(openings: Sequence[float], kill_s: float, end_s: float) -> float:
    """Return how long a relay took no part after a kill, until the end at most."""
    return max(0.0, min(end_s, next((s for s in openings if s > kill_s), end_s)) - kill_s)
