"""Goodput of simulated runs: which hosts fail when, three ways to keep together, and the figures.

*Goodput* is the tokens that enter the model over the tokens that the same hosts would give
undisturbed. Learning that is lost with a member has not entered the model.

Source of the failures: Decoupled DiLoCo (arXiv:2604.21428). A chip is interrupted once a year, and
1.2 million chips are spread evenly over the members. So a member fails every 26 s somewhere in the
run, whatever its size. Up times are exponential and independent. Repair times are exponential too.
Their mean is inferred from the paper's goodputs: see `REPAIR_S`.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.child import BenchError
from decod.protocol.node_machine import NodeMachine
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.kernel import seeded
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import FaultKind, HostFault, Scenario, sync_of
from decod.sim.simulated_host import Observer, SimHost
from decod.sim.simulation import Simulation

NUM_CHIPS = 1_200_000
CHIP_INTERVAL_S = 365 * 86_400.0
"""Mean time between two interruptions of a chip."""
FAILURE_INTERVAL_S = CHIP_INTERVAL_S / NUM_CHIPS
"""Mean time between two failures of any member."""
REPAIR_S = 27.0
"""Mean time that a member is away. With 2, 8 and 16 learners, the paper has goodputs of 70, 88 and
93 %. So 0.6 to 1.1 learners are missing on average, of which one fails every 26 s: 16 to 29 s."""

FAULTS_FROM_S = 60.0
"""By then all hosts have joined and trained. Measurements begin there, too."""

NUM_MICROBATCHES = 8
"""Of a member, per iteration."""
CAPACITY = 10
"""A quarter more than it needs, to take over for others."""
MICROBATCH_S = 1.0
"""Forward and backward pass at a member."""

STAGE_SIZE_MAX = 20
"""A stage of all members would be closest to the paper. Its averages take messages by the square of
its members: too many to simulate 1,000."""
DURATIONS_S = {10: 600.0, 100: 240.0, 1000: 240.0}
"""Virtual time with faults. Larger runs take longer to simulate."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to keep together."""

    name: str
    every: int = 1
    overlap: bool = False
    fragments: int = 1
    quorum: float = 1.0


WAYS = (
    Way("all-reduce"),
    Way("synchronous DiLoCo", every=4),
    Way("quorum", every=4, overlap=True, fragments=2, quorum=0.5),
)
"""A local phase of 4 iterations takes about 30 s, as the paper's 24 steps of about a second."""

CONDITIONS: Mapping[str, tuple[FaultKind, ...]] = {
    "undisturbed": (),
    "failures": (FaultKind.RESTART,),
    "slow hosts": (FaultKind.SLOW,),
    "both": (FaultKind.RESTART, FaultKind.SLOW),
}


def draw_faults(
    rng: random.Random,
    hosts: Sequence[str],
    kind: FaultKind,
    until_s: float,
    *,
    interval_s: float = FAILURE_INTERVAL_S,
) -> list[HostFault]:
    """Return the faults of one kind, in order.

    Args:
        rng: Source of all draws.
        hosts: The hosts that may be struck, each independently of the others.
        kind: Of the faults.
        until_s: No fault begins later.
        interval_s: Mean time between two faults of any host, if none were down.
    """
    drawn = []
    for host in hosts:
        now_s = FAULTS_FROM_S
        while (now_s := now_s + rng.expovariate(1 / (interval_s * len(hosts)))) < until_s:
            duration_s = rng.expovariate(1 / REPAIR_S)
            drawn.append(HostFault(kind, host, at_s=now_s, duration_s=duration_s))
            now_s += duration_s
    return sorted(drawn, key=lambda fault: fault.at_s or 0.0)


def scenario(
    num_members: int, way: Way, kinds: Sequence[FaultKind], *, seed: int, duration_s: float
) -> Scenario:
    """Return a run of so many relays, in full stages. Its hosts and faults don't depend on the way.

    Raises:
        BenchError: The members don't fill their stages.
    """
    size = min(num_members, STAGE_SIZE_MAX)
    num_stages, num_left = divmod(num_members, size)
    if num_left:
        raise BenchError(
            f"{num_members} members don't fill stages of {size}: give a multiple of it"
        )
    # A pipeline fills and drains in every iteration.
    iteration_s = MICROBATCH_S * (NUM_MICROBATCHES + num_stages - 1)
    plain = Scenario(
        seed=seed,
        num_relays=num_stages * size,
        stages=StagesConfig(num_relay_stages=num_stages),
        capacity_min=CAPACITY,
        capacity_max=CAPACITY,
        batch=BatchConfig(num_microbatches=NUM_MICROBATCHES * size),
        num_iterations=math.ceil((FAULTS_FROM_S + duration_s) / iteration_s),
        sync=sync_of(way.every, overlap=way.overlap, fragments=way.fragments, quorum=way.quorum),
        speed_spread_ratio=0.0,
        duration_max_s=1e6,
        profile=ComputeProfile(
            # Forward and backward take one part and two.
            forward_s=MICROBATCH_S / 3,
            embed_s=1e-4,
            head_s=2e-4,
        ),
        protocol=ProtocolConfig(min_nodes_per_stage=size, routing="greedy"),
    )
    relays = [name for name in plain.host_names if not plain.is_data(name)]
    # Disturbed runs take longer than planned. Later faults do not strike.
    until_s = FAULTS_FROM_S + 10 * duration_s
    faults = [
        fault
        for kind in kinds
        for fault in draw_faults(seeded(seed, "goodput", kind), relays, kind, until_s)
    ]
    return replace(plain, faults=tuple(faults))


@dataclass(slots=True)
class Notes:
    """What a run has noted. Passes everything on to another observer."""

    simulation: Simulation
    inner: Observer
    commits: list[tuple[float, int]] = field(default_factory=list)
    """Each committed iteration: when, and how many tokens it holds."""
    lost: list[tuple[float, int]] = field(default_factory=list)
    """At each commit: microbatches lost so far, summed over stages."""
    openings: dict[str, list[float]] = field(default_factory=dict)
    """When each host has opened an iteration."""
    num_mended: int = 0
    num_repeated: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def noted(self, host: SimHost, event: str, fields: tuple[tuple[str, object], ...]) -> None:
        """Keep what the figures need."""
        now_s = self.simulation.kernel.now_s
        if event == "iteration.committed":
            self.commits.append((now_s, int(str(dict(fields)["num_tokens"]))))
            core = host.machine
            assert isinstance(core, NodeMachine)
            assert core.leader is not None
            self.lost.append((now_s, sum(core.leader.sync.learning.num_lost.values())))
        elif event == "iteration.opened":
            self.openings.setdefault(host.name, []).append(now_s)
        self.num_mended += event == "iteration.mended"
        self.num_repeated += event == "iteration.aborted"
        self.inner.noted(host, event, fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run did from `FAULTS_FROM_S` on."""

    duration_s: float
    tokens_per_s: float
    """Committed."""
    lost_per_s: float
    """Committed tokens that were lost with the members that had learnt from them."""
    down: float
    """Share of all members' time in which their hosts were down."""
    joining: float
    """Share of all members' time between their hosts' return and their first iteration."""
    num_failures: int
    num_mended: int
    num_repeated: int
    num_iterations: int


def simulate(planned: Scenario) -> Figures:
    """Run a scenario and return its figures."""
    simulation = Simulation(planned)
    notes = Notes(simulation, simulation.world.observer)
    simulation.world.observer = notes
    simulation.run()
    return figures_of(planned, notes)


def figures_of(planned: Scenario, notes: Notes) -> Figures:
    """Return the figures of a run that has ended."""
    begin = next(i for i, (now_s, _) in enumerate(notes.commits) if now_s >= FAULTS_FROM_S)
    begin_s, end_s = notes.commits[begin][0], notes.commits[-1][0]
    duration_s = end_s - begin_s
    num_tokens = sum(tokens for _, tokens in notes.commits[begin + 1 :])
    full = max(tokens for _, tokens in notes.commits)
    # Each stage has lost its own part of what a microbatch teaches.
    num_lost = (notes.lost[-1][1] - notes.lost[begin][1]) / planned.stages.num_relay_stages
    tokens_each = full / (planned.batch.num_microbatches * planned.batch.num_data_nodes)
    down_s, joining_s, num_failures = away(planned.faults, notes.openings, begin_s, end_s)
    whole_s = planned.num_relays * duration_s
    return Figures(
        duration_s=duration_s,
        tokens_per_s=num_tokens / duration_s,
        lost_per_s=num_lost * tokens_each / duration_s,
        down=down_s / whole_s,
        joining=joining_s / whole_s,
        num_failures=num_failures,
        num_mended=notes.num_mended,
        num_repeated=notes.num_repeated,
        num_iterations=len(notes.commits) - begin - 1,
    )


def away(
    faults: Sequence[HostFault],
    openings: Mapping[str, Sequence[float]],
    begin_s: float,
    end_s: float,
) -> tuple[float, float, int]:
    """Return how long members' hosts were down, how long members took to join, and the failures.

    All within an interval, and summed over members.
    """
    down_s = joining_s = 0.0
    num_failures = 0
    for fault in faults:
        if fault.kind is not FaultKind.RESTART or fault.at_s is None or fault.at_s >= end_s:
            continue
        up_s = min(end_s, fault.at_s + fault.duration_s)
        later = (s for s in openings.get(fault.host, ()) if s >= fault.at_s + fault.duration_s)
        back_s = min(end_s, next(later, end_s))
        down_s += max(0.0, up_s - max(begin_s, fault.at_s))
        joining_s += max(0.0, back_s - max(begin_s, up_s))
        num_failures += fault.at_s >= begin_s
    return down_s, joining_s, num_failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Shares of the tokens that the same hosts would give undisturbed. They add up to 1."""

    goodput: float
    lost: float
    """Learning that was lost with members."""
    down: float
    joining: float
    rest: float
    """Members wait for others, or compute again what was lost."""

    @property
    def of_present(self) -> float:
        """Goodput over the tokens that the hosts which were up would give undisturbed."""
        return self.goodput / (1 - self.down)


def goodput_of(disturbed: Figures, undisturbed: Figures) -> Goodput:
    """Compare a run with the same run without faults."""
    whole = undisturbed.tokens_per_s - undisturbed.lost_per_s
    goodput = (disturbed.tokens_per_s - disturbed.lost_per_s) / whole
    lost = disturbed.lost_per_s / whole
    return Goodput(
        goodput=goodput,
        lost=lost,
        down=disturbed.down,
        joining=disturbed.joining,
        rest=1 - goodput - lost - disturbed.down - disturbed.joining,
    )
