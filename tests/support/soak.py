"""A soak: one run in a storm, its fault-free twin beside it, and a report on both.

Both runs start together and share the machine all the time, so a slow machine slows both. A run
that stands still leaves its processors to its twin. The comparison is therefore too hard on the
storm rather than too easy.

*Throughput* is the tokens of committed iterations in the storm's time. The storm should reach the
twin's throughput, times the mean share of hosts present in the stage that lacked most. A struck
host counts as missing until it trains again; other hosts never do.

*Waste* is the share of all passes that are in no committed iteration. A killed node takes with it
the number of passes since its last commit. It is charged the mean of an iteration.

*Growth* is that of a process's memory while it trains, after a time in which it gets to know its
peers. It includes only processes that live long enough after that. Files come and go with peers, so
the largest number of open files counts: more than all peers need is a leak.
"""

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from typing_extensions import override

from decod.config.presets import PRESETS
from decod.data.dataset import Dataset
from decod.ids import MicrobatchId
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from tests.support.cluster import Cluster
from tests.support.history import Findings, Life, check, read_lives, shares_of
from tests.support.network import Network
from tests.support.reference import train_reference
from tests.support.runs import Tokens, make_run, prepare_corpus
from tests.support.storm import Fleet, Pause, Storm, host_stages

LEARNING_RATE = 1e-4
"""At a higher rate, hundreds of iterations amplify the last bit without limit."""
LOCAL_LEARNING_RATE = 1e-3
"""Of members that step by themselves: what a lost one takes along must be seen in the loss."""

SYNC = replace(PRESETS["dilocox"].sync, every=4, rank=8, fragments=2, quorum=0.5)
"""Of a run whose members step by themselves: what DiLoCoX has, and all that goes beyond it."""

LOSS_ERROR_MOST = 1e-8
"""Of a loss, against one process with the same batches."""
LOCAL_LOSS_ERROR_MOST = 0.02
"""Of the mean loss at the end, against the twin: members take along what they have learnt."""
_NUM_LAST = 20
"""Iterations in that mean."""

_FAREWELL_S = 180.0
"""A node that was about to join when the run ended looks for it for more than a minute."""

_START_TIMEOUT_S = 120.0
_WARM_S = 30.0
_LEAST_S = 90.0
"""Growth of memory is meaningful only for processes that trained this long after the warm-up."""

MEMORY_MOST_MIB_PER_MIN = 3.0

FILES_PER_PEER = 4
"""Connections for control and for tensors, in and out."""
FILES_BESIDE = 36
"""For logs, the compute process, gRPC, and states on their way."""

PASSES_AT_DATA_NODE = 3
PASSES_AT_RELAY = 2


@contextmanager
def soak_folder(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield an empty folder for a soak, and the corpus in it. Says at the end how long it took.

    Args:
        keep: Where the folder is left; None for a temporary one.
    """
    # End like after Ctrl-C, so that no daemons and networks are left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # State folders hold sockets, whose paths must be short. So not below a deep working directory.
    with tempfile.TemporaryDirectory(prefix="decod-soak-") as name:
        folder = keep or Path(name)
        (folder / "data").mkdir(parents=True)
        corpus = prepare_corpus(folder / "data")
        start_s = time.monotonic()
        yield folder, corpus
        print(f"{time.monotonic() - start_s:.0f} s in all", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Setting and duration of a soak."""

    relays: tuple[int, ...] = (4, 3, 3)
    num_data_nodes: int = 2
    storm_s: float = 300.0
    pause_s: float = 10.0
    seed: int = 1
    twin: bool = False
    local: bool = False
    """Members step by themselves. Such a run is compared with its twin, so it needs one."""
    networks: bool = True
    """Whether each host is a network namespace. Without namespaces there are no cuts."""

    @property
    def run(self) -> RunConfig:
        assert self.twin or not self.local, "there is nothing to compare the losses with"
        num_stages = len(self.relays)
        run = make_run(num_data_nodes=self.num_data_nodes, min_nodes_per_stage=min(self.relays))
        return replace(
            run,
            model=replace(run.model, num_hidden_layers=max(4, num_stages)),
            stages=StagesConfig(num_relay_stages=num_stages),
            optimizer=replace(
                run.optimizer, lr=LOCAL_LEARNING_RATE if self.local else LEARNING_RATE
            ),
            sync=SYNC if self.local else run.sync,
        )


@dataclass(slots=True)
class Outcome:
    """The outcome of one run."""

    name: str
    duration_s: float
    num_iterations: int
    """Number of iterations in the storm's time."""
    tokens_per_s: float
    capacity: float
    """Mean share of the bottleneck stage that was present."""
    longest_pause: Pause
    wasted: float
    """Share of all passes."""
    loss_error: float
    """Against one process. Of members that step by themselves: against the twin."""
    loss_error_max: float
    found: Findings
    notes: Counter[str]
    """Number of lost members, and of mended and repeated iterations."""
    exits: Counter[int]
    wrongly_lost: list[str]
    """Members that were removed although nobody had struck them."""
    tracebacks: list[str]
    memory_mib_per_min: dict[str, float]
    """Growth of each process that lived long enough."""
    num_files: dict[str, int]
    """Largest number of open files of each process."""
    num_files_max: int
    """Number of files that a node can need."""
    faults: Counter[str] = field(default_factory=Counter)
    struck_in_pause: list[str] = field(default_factory=list)
    """Faults in the longest pause. Several may meet in one iteration."""

    @property
    def complaints(self) -> list[str]:
        """Findings that must not occur in any weather."""
        complaints = [*self.found.violations, *self.tracebacks]
        complaints += [f"a daemon that nobody had struck ended with {code}" for code in self.exits]
        complaints += self.wrongly_lost
        if not self.loss_error < self.loss_error_max:
            complaints.append(f"losses differ by {self.loss_error:.1e} from what they should be")
        complaints += [
            f"{name} grows by {slope:.1f} MiB a minute"
            for name, slope in self.memory_mib_per_min.items()
            if slope > MEMORY_MOST_MIB_PER_MIN
        ]
        complaints += [
            f"{name} has had {num} files open, of which it needs {self.num_files_max}"
            for name, num in self.num_files.items()
            if num > self.num_files_max
        ]
        return complaints

    @override
    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.num_iterations} iterations in {self.duration_s:.0f} s, "
            f"{self.tokens_per_s:.0f} tokens/s, longest pause {self.longest_pause.duration_s:.1f} s"
            + f" (struck in it: {', '.join(self.struck_in_pause) or 'nobody'})",
            f"  faults {dict(self.faults)}; {dict(self.notes)}; "
            f"ended unstruck, by exit code: {dict(self.exits)}",
            f"  capacity of the bottleneck stage {self.capacity:.3f}, "
            f"wasted passes {self.wasted:.1%}, losses differ by {self.loss_error:.1e}",
            f"  growth of memory, MiB a minute: {_spread(self.memory_mib_per_min)}; "
            f"files open: {_spread(self.num_files)}",
            *(f"  {line}" for line in str(self.found).splitlines()),
            *(f"  COMPLAINT {text}" for text in self.complaints),
        ]
        return "\n".join(lines)


def soak(plan: Plan, folder: Path, corpus: Path) -> list[Outcome]:
    """Run the storm, and its twin if the plan says so. Return the outcomes, the storm's first."""
    with ExitStack() as stack:
        fleets = []
        for name in ("storm", "twin")[: 1 + plan.twin]:
            network = None
            if plan.networks:
                hosts = list(host_stages(plan.num_data_nodes, plan.relays))
                network = stack.enter_context(Network(hosts, {}))
            made = Cluster(folder / name, plan.run, corpus, network, fork=False)
            cluster = stack.enter_context(made)
            fleets.append(Fleet(cluster, plan.relays))
        storm = Storm(fleets[0], seed=plan.seed, pause_s=plan.pause_s)
        outcomes = endure(fleets, storm, plan.storm_s, corpus)
        if plan.local:
            outcomes[0].loss_error = twin_error(*(outcome.found for outcome in outcomes))
        return outcomes


def endure(fleets: list[Fleet], storm: Storm | None, storm_s: float, corpus: Path) -> list[Outcome]:
    """Have fleets train together for some time, and end in order. Return their outcomes.

    Args:
        fleets: To be started. None of their hosts runs yet.
        storm: Strikes the first of them.
        storm_s: For how long, once all fleets train.
        corpus: Prepared data.
    """
    for fleet in fleets:
        fleet.start()
    _tend_until(fleets, lambda: all(f.iteration >= 3 for f in fleets), _START_TIMEOUT_S)
    begin_s = time.monotonic()
    first = [fleet.iteration for fleet in fleets]

    def over() -> bool:
        if storm is not None:
            storm.step()
        return time.monotonic() - begin_s > storm_s

    try:
        _tend_until(fleets, over, storm_s + 60.0)
    finally:
        if storm is not None:
            storm.end()
    end_s = time.monotonic()
    last = [fleet.iteration for fleet in fleets]
    # All hosts must come back by themselves, and train together again.
    all_back = [fleet.iteration + 3 for fleet in fleets]
    _tend_until(
        fleets,
        lambda: all(
            not f.missing and f.iteration >= i for f, i in zip(fleets, all_back, strict=True)
        ),
        _START_TIMEOUT_S,
    )
    for fleet in fleets:
        _finish(fleet)
    outcomes = [
        _outcome(fleet, (a, b), (begin_s, end_s), corpus)
        for fleet, a, b in zip(fleets, first, last, strict=True)
    ]
    if storm is not None:
        outcomes[0].faults = storm.struck
        outcomes[0].struck_in_pause = storm.struck_in(outcomes[0].longest_pause)
    return outcomes


def _tend_until(fleets: list[Fleet], over: Callable[[], bool], timeout_s: float) -> None:
    def look() -> bool:
        for fleet in fleets:
            fleet.tend()
        return over()

    fleets[0].cluster.wait_for(look, "the fleet", timeout_s=timeout_s)


def _finish(fleet: Fleet) -> None:
    """End the run in order, so that all logs are complete."""
    found = fleet.leader()
    assert found is not None, fleet.cluster.tails()
    leader = fleet.hosts[found[0]]
    leader.end_run()
    leader.wait()
    for daemon in fleet.hosts.values():
        daemon.wait(timeout_s=_FAREWELL_S)
        fleet.tracebacks += daemon.tracebacks()


def _outcome(
    fleet: Fleet, iterations: tuple[int, int], instants: tuple[float, float], corpus: Path
) -> Outcome:
    run = fleet.cluster.run
    lives = [
        life for name, daemon in fleet.hosts.items() for life in read_lives(name, daemon.state_dir)
    ]
    found = check(lives)
    local = run.sync.steps_locally
    error = 0.0 if local else reference_error(run, corpus, found)
    first, last = iterations
    num_tokens = sum(c.num_tokens for i, c in found.commits.items() if first < i <= last)
    duration_s = instants[1] - instants[0]
    return Outcome(
        name=fleet.cluster.folder.name,
        duration_s=duration_s,
        num_iterations=last - first,
        tokens_per_s=num_tokens / duration_s,
        capacity=fleet.mean_capacity(*instants),
        longest_pause=fleet.longest_pause(*instants),
        wasted=_wasted(run, lives, found),
        loss_error=error,
        loss_error_max=LOCAL_LOSS_ERROR_MOST if local else LOSS_ERROR_MOST,
        found=found,
        notes=_notes(fleet),
        exits=fleet.exits,
        wrongly_lost=fleet.wrongly_lost(),
        tracebacks=fleet.tracebacks,
        memory_mib_per_min={
            name: slope * 60 / 2**20
            for name, slope in fleet.usage.growth(warm_s=_WARM_S, least_s=_LEAST_S).items()
        },
        num_files=fleet.usage.most_files(),
        num_files_max=FILES_BESIDE + FILES_PER_PEER * (len(fleet.stages) - 1),
    )


def reference_error(run: RunConfig, corpus: Path, found: Findings) -> float:
    """Return the largest relative error of a loss, against one process with the same batches."""
    per_node = run.batch.num_microbatches
    shares = shares_of(found, num_data_nodes=run.batch.num_data_nodes, num_microbatches=per_node)
    losses = found.losses
    if found.violations:
        return float("nan")

    def batches(dataset: Dataset) -> Iterator[list[Tokens]]:
        for iteration in sorted(losses):
            yield [
                dataset.microbatch(MicrobatchId(iteration, node, index), run.batch, run.seed)
                for node in shares[iteration]
                for index in range(per_node)
            ]

    torch.set_num_threads(1)
    with Dataset.open(corpus) as dataset:
        expected, _ = train_reference(run.model, run.optimizer, run.seed, batches(dataset))
    pairs = zip(sorted(losses), expected, strict=True)
    return max(abs(losses[iteration] / loss - 1) for iteration, loss in pairs)


def twin_error(storm: Findings, twin: Findings) -> float:
    """Return how far two runs' mean losses lie apart, over the last iterations that both have."""
    last = sorted(storm.losses.keys() & twin.losses.keys())[-_NUM_LAST:]
    if len(last) < _NUM_LAST:
        return float("nan")
    mean, expected = (sum(f.losses[i] for i in last) / len(last) for f in (storm, twin))
    return abs(mean / expected - 1)


def _wasted(run: RunConfig, lives: list[Life], found: Findings) -> float:
    num_stages = run.stages.num_relay_stages
    each = PASSES_AT_DATA_NODE + PASSES_AT_RELAY * num_stages
    useful = each * sum(c.account["num_batch"] for c in found.commits.values() if c.account)
    done = 0.0
    for life in lives:
        if life.commits:
            done += life.commits[-1].num_passes * (1 + 1 / len(life.commits))
    return 1 - useful / done if done else 0.0


def _notes(fleet: Fleet) -> Counter[str]:
    names = (
        "member.lost",
        "iteration.mended",
        "iteration.aborted",
        "leader.elected",
        "quorum.lost",
    )
    return Counter(
        {
            name: num
            for name in names
            if (num := sum(len(daemon.events(name)) for daemon in fleet.hosts.values()))
        }
    )


def _spread(found: Mapping[str, float]) -> str:
    if not found:
        return "(nothing lived long enough)"
    values = found.values()
    return f"median {median(values):.2f}, most {max(values):.2f} of {len(values)}"
