"""Runs in bad weather, each from one seed: many faults of all kinds at once, then calm."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from decod.run.protocol_config import NO_AUDITS, AuditConfig, ProtocolConfig
from decod.run.run_config import Organisation
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from decod.sim.invariants import InvariantViolation
from decod.sim.kernel import seeded
from decod.sim.network import LinkFaults, Links
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Cut, FaultKind, HostFault, Scenario, sync_of
from decod.sim.simulation import Result, Simulation

BEGIN_S = 4.0
"""When bad weather begins. By then all nodes are there and most runs have committed something."""

_LARGE_RATIO = 0.2
"""Share of runs with up to 12 nodes. Most bugs need few nodes and much bad luck, and small runs
give more of that in the same time."""

_STORM_RATIO = 0.12
_STORM_RATIO_LARGE = 0.4
"""Share of runs with a fault every second, among small and large runs. Small runs rarely survive
that: they lose too many hosts at once and then rightly wait, which tests little."""

_DURATION_MAX_S = 12.0
"""Longest duration of one fault."""

_SUSPENDED_RATIO = 0.3
_SUSPENDED_MAX_S = 600.0
"""Share of lasting faults that suspend a process for up to this time, like a sleeping laptop. The
others must do without it meanwhile."""

_SLOWED_RATIO = 0.15
_SLOWED_MAX_S = 600.0
"""Share of runs in which the tensors of a relay, or of one link, trickle for up to this time. The
run must continue meanwhile."""

_LYING_RATIO = 0.2
"""Share of runs in which a relay lies, or says so of others. All work is audited there."""

_LYING = (FaultKind.LIE, FaultKind.STALE, FaultKind.STALE, FaultKind.ACCUSE, FaultKind.MEANS)

_LASTING = (FaultKind.KILL, FaultKind.VANISH, FaultKind.COMPUTE, FaultKind.DRAIN)
"""Faults after which a host stays away."""

_PASSING = (
    *[FaultKind.RESTART] * 3,
    *[FaultKind.FREEZE] * 2,
    FaultKind.DOZE,
    FaultKind.STALL,
    FaultKind.CLOCK,
    FaultKind.SLOW,
    FaultKind.DISK,
    FaultKind.PAUSE,
    FaultKind.ROT,
)


_PLANNING = ((0.2, 0.0), (0.2, 0.5), (3.0, 0.0), (40.0, 0.1))
"""How long a planning process takes, and how often it dies, in one run after the other. After 40 s
the node no longer waits for it."""

_SHOWN_MAX = 30
"""Lines shown of a failing run's trace. Its command gives the whole trace."""

_ROUTINE = (" is committed, ", " loss ", "flow ", " members, view ", " is used: ")


def weather(
    seeds: Iterable[int], drawn: Callable[[int], Scenario] | None = None
) -> tuple[list[str], Counter[str]]:
    """Run storms. Return the failures, each with replay and trace, and a tally of outcomes.

    Args:
        seeds: Seeds of the runs.
        drawn: Returns the scenario of a seed; default `storm_scenario`.
    """
    failures: list[str] = []
    tally: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation((drawn or storm_scenario)(seed))
        num_iterations = simulation.scenario.num_iterations
        try:
            result = simulation.run()
        except InvariantViolation as violation:
            failures.append(f"seed {seed}: {violation}\n{_shown(simulation.trace.lines)}")
            continue
        tally[_outcome(result, num_iterations)] += 1
        tally["iterations"] += result.num_iterations
        tally["events"] += result.num_events
        record = result.record
        tally["iterations mended"] += record.counts["iteration.mended"]
        tally["iterations repeated"] += record.counts["iteration.aborted"]
        tally["leaders elected"] += record.counts["leader.elected"]
        tally["cut anew"] += record.counts["run.recut"]
        tally["not cut anew"] += record.counts["recut.failed"]
        aborted = record.of("iteration.aborted")
        if uneven := next((line for line in aborted if " folded " in line), ""):
            replay = simulation.scenario.command()
            failures.append(f"seed {seed}: {uneven}\nReplay: {replay}")
    return failures, tally


def _outcome(result: Result, num_iterations: int) -> str:
    if result.waits_for:
        return f"runs that rightly wait for {result.waits_for}"
    if result.lost_stage is not None:
        return "runs that lost all of a stage"
    assert result.num_iterations == num_iterations
    return "runs that committed all"


def local_storm(seed: int) -> Scenario:
    """Return a storm over nodes that step by themselves, and average every 2 to 5 iterations.

    In every other one, averages travel while nodes train on. In every third, they have two phases.
    In every fifth, parameters are averaged in two fragments. In two of seven, a quorum is enough.
    In every other run of eight, what lost relays had learnt from is trained on again. Nobody
    lies: nothing could be audited there.
    """
    sync = sync_of(
        2 + seed % 4,
        overlap=seed // 4 % 2 == 1,
        num_phases=2 if seed % 3 == 2 else 1,
        fragments=2 if seed % 5 == 4 else 1,
        reread=seed // 8 % 2 == 1,
        quorum=0.6 if seed % 7 > 4 else 1.0,
    )
    return replace(honest_storm(seed), sync=sync)


def _shown(trace: list[str]) -> str:
    lines = [line for line in trace if not any(word in line for word in _ROUTINE)]
    return "\n".join(line[:160] for line in lines[-_SHOWN_MAX:])


def honest_storm(seed: int, *, num_stages: int | None = None) -> Scenario:
    """Return a storm as `storm_scenario` does, in which nobody lies and nothing is audited."""
    scenario = storm_scenario(seed, num_stages=num_stages)
    faults = tuple(fault for fault in scenario.faults if fault.kind not in _LYING)
    return replace(scenario, audits=NO_AUDITS, faults=faults)


def recut_storm(seed: int) -> Scenario:
    """Return a storm in which the model is cut anew up to four times. Two or three stages share it.

    In every third run, nodes step by themselves, and average every 2 to 5 iterations.
    """
    scenario = honest_storm(seed, num_stages=3 if seed % 4 == 3 else 2)
    if seed % 3 == 2:
        scenario = replace(scenario, sync=sync_of(2 + seed % 4, overlap=seed // 4 % 2 == 1))
    rng = seeded(seed, "recuts")
    assert scenario.calm_s is not None
    recuts = [
        HostFault(FaultKind.RECUT, scenario.host_names[0], at_s=round(rng.uniform(3.0, 20.0), 3))
        for _ in range(rng.randint(1, 4))
    ]
    faults = sorted((*scenario.faults, *recuts), key=lambda fault: fault.at_s or 0.0)
    return replace(scenario, faults=tuple(faults))


def storm_scenario(
    seed: int, *, num_iterations: int = 30, num_stages: int | None = None
) -> Scenario:
    """Return a small run and its weather. One run in five has up to 12 nodes, the others up to 8.

    Some runs have a storm: a fault every second. The others have up to six faults. In every third
    run, links lose, repeat, delay, reorder and corrupt messages. In another third, some links are
    cut. In every fourth run, nobody can dial half of the relays. In one of five, a relay lies. At
    least one data node and two thirds of the relays have no lasting faults.
    """
    rng = seeded(seed, "storm")
    large = rng.random() < _LARGE_RATIO
    num_data = rng.choice((1, 1, 2, 2, 3) if large else (1, 1, 2, 2, 2))
    drawn = rng.choice((1, 1, 2, 2, 3) if large else (1, 1, 1, 2))
    num_stages = drawn if num_stages is None else num_stages
    num_relays = num_stages * 2 + (rng.randint(1, 3) if large else rng.choice((0, 1, 1, 2)))
    calm_s = BEGIN_S + rng.uniform(5.0, 20.0)
    decide_s, failure_ratio = _PLANNING[seed // 4 % len(_PLANNING)]
    scenario = Scenario(
        seed=seed,
        batch=BatchConfig(
            num_data_nodes=num_data,
            num_microbatches=rng.randint(1, 3) if large else rng.randint(1, 2),
        ),
        num_relays=num_relays,
        num_outbound=num_relays // 2 if seed % 4 == 2 else 0,
        stages=StagesConfig(num_relay_stages=num_stages),
        capacity_min=2,
        capacity_max=4,
        num_iterations=num_iterations,
        optimizer=OptimizerConfig(clip_norm=float(seed % 5 == 4)),
        duration_max_s=3600.0,
        calm_s=round(calm_s + _DURATION_MAX_S, 3),
        profile=ComputeProfile(
            optimizer_s=0.05,
            activation_bytes=100_000,
            parameter_bytes=400_000,
            decide_s=decide_s,
            decide_failure_ratio=failure_ratio,
        ),
        links=Links(spread_ratio=0.5),
        link_faults=_bad_links(rng, calm_s) if seed % 3 == 0 else LinkFaults(),
        protocol=ProtocolConfig(
            min_nodes_per_stage=2,
            min_data_nodes=num_data,
            iteration_timeout_s=60.0,
            routing=("flow", "greedy", "gwtf", "greedy")[seed % 4],
        ),
    )
    storm = rng.random() < (_STORM_RATIO_LARGE if large else _STORM_RATIO)
    num_faults = int(calm_s - BEGIN_S) if storm else rng.randint(0, 6)
    faults = _faults(rng, scenario, num_faults, calm_s=calm_s)
    cuts = _cuts(rng, scenario, calm_s=calm_s) if seed % 3 == 1 else ()
    if rng.random() < _SLOWED_RATIO:
        # The run must be able to spare this relay, so the other relays have no faults.
        faults = tuple(fault for fault in faults if fault.host.startswith("data"))
        cuts = (_trickle(rng, scenario, calm_s=calm_s),)
    if rng.random() < _LYING_RATIO:
        scenario = replace(scenario, audits=AuditConfig(share=1.0, share_in_probation=1.0))
        relay = rng.choice(scenario.host_names[scenario.batch.num_data_nodes :])
        at_s = round(rng.uniform(BEGIN_S, calm_s), 3)
        lie = HostFault(rng.choice(_LYING), relay, at_s=at_s)
        faults = tuple(sorted((*faults, lie), key=lambda fault: fault.at_s or 0.0))
    return replace(scenario, faults=faults, cuts=cuts)


def _trickle(rng: random.Random, scenario: Scenario, *, calm_s: float) -> Cut:
    """Return a relay, or one direction of a link, whose tensors travel far too slowly."""
    names = list(scenario.host_names)
    relay = rng.choice(names[scenario.batch.num_data_nodes :])
    names.remove(relay)
    others = tuple(names) if rng.random() < 0.5 else (rng.choice(names),)
    here, there = ((relay,), others) if rng.random() < 0.7 else (others, (relay,))
    at_s = round(rng.uniform(BEGIN_S, calm_s), 3)
    duration_s = round(rng.uniform(5.0, _SLOWED_MAX_S), 3)
    rate = round(10 ** rng.uniform(0.0, 4.5), 1)
    return Cut(here, there, at_s, duration_s, both_ways=False, rate_bytes_per_s=rate)


def _bad_links(rng: random.Random, calm_s: float) -> LinkFaults:
    return LinkFaults(
        loss_ratio=rng.choice((0.0, 0.01, 0.02)),
        duplicate_ratio=rng.choice((0.0, 0.05)),
        delay_ratio=rng.choice((0.0, 0.05)),
        reorder_ratio=rng.choice((0.0, 0.05)),
        corrupt_ratio=rng.choice((0.0, 0.01)),
        until_s=round(calm_s, 3),
    )


def _faults(
    rng: random.Random, scenario: Scenario, num: int, *, calm_s: float
) -> tuple[HostFault, ...]:
    names = scenario.host_names
    num_data = scenario.batch.num_data_nodes
    data = names[:num_data]
    relays = names[num_data:]
    spared = {rng.choice(data), *rng.sample(relays, -(-2 * len(relays) // 3))}
    if num_data == 1:
        names = relays + data * (rng.random() < 0.2)
    faults: list[HostFault] = []
    for _ in range(num):
        host = rng.choice(names)
        # The only data node has no other leader to take over: it may stall, but must not be lost.
        only = num_data == 1 and host in data
        kinds = (FaultKind.FREEZE, FaultKind.SLOW, FaultKind.CLOCK) if only else _PASSING
        duration_s = rng.uniform(0.3, _DURATION_MAX_S)
        if host not in spared and not only and rng.random() < 0.3:
            kinds = _LASTING
            if rng.random() < _SUSPENDED_RATIO:
                # A data node whose device is given up may be the last that leads.
                stalls = (FaultKind.STALL,) if host in relays else ()
                kinds = (FaultKind.FREEZE, FaultKind.DOZE, *stalls)
                duration_s = _SUSPENDED_MAX_S ** rng.random()
        at_s = round(rng.uniform(BEGIN_S, calm_s), 3)
        kind = rng.choice(kinds)
        # For the same reason, the device of the data node that is spared never stalls.
        if kind is not FaultKind.STALL or host not in data or host not in spared:
            faults.append(HostFault(kind, host, at_s=at_s, duration_s=round(duration_s, 3)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s or 0.0))


def _cuts(rng: random.Random, scenario: Scenario, *, calm_s: float) -> tuple[Cut, ...]:
    """Return cuts between hosts, one way or both, and into halves with or without a bridge."""
    cuts = []
    for _ in range(rng.randint(1, 3)):
        names = list(scenario.host_names)
        rng.shuffle(names)
        at_s = round(rng.uniform(BEGIN_S, calm_s), 3)
        duration_s = round(rng.uniform(0.5, _DURATION_MAX_S), 3)
        match rng.choice(("pair", "pair", "host", "halves", "bridge")):
            case "pair":
                here = names[:1]
                there = names[1:2]
            case "host":
                here = names[:1]
                there = names[1:]
            case "halves":
                middle = len(names) // 2
                here = names[:middle]
                there = names[middle:]
            case _:
                middle = (len(names) - 1) // 2
                here = names[:middle]
                there = names[middle:-1]
        if here and there:
            both_ways = rng.random() < 0.6
            cuts.append(Cut(tuple(here), tuple(there), at_s, duration_s, both_ways))
    return tuple(cuts)


_CLIENT_FAULTS = (
    *[FaultKind.RESTART] * 4,
    *[FaultKind.FREEZE] * 2,
    FaultKind.KILL,
    FaultKind.VANISH,
    FaultKind.COMPUTE,
    FaultKind.DRAIN,
    FaultKind.SLOW,
    FaultKind.PAUSE,
)
_FAULTS_PER_CLIENT_MAX = 3

_SLOW_FORWARD_S = 1.5
_NUM_SLOW_ITERATIONS = 6


def servers_storm(seed: int) -> Scenario:
    """Return a small run with servers, and its weather.

    Every stage has two servers or three, and the run up to six clients. One client has no lasting
    fault. In every fourth run, nothing happens to the servers. In every other pair of runs, steps
    are late. In every third, iterations take so long that clients enter in the middle of them.

    Clients come and go at any time. Servers and data nodes have the faults that members of a
    pipeline have.
    """
    rng = seeded(seed, "servers storm")
    scenario = honest_storm(seed)
    num_clients = rng.randint(1, 6)
    scenario = replace(
        scenario,
        organisation=Organisation.SERVERS,
        num_clients=num_clients,
        servers=replace(scenario.servers, delay=seed // 2 % 2),
        batch=replace(scenario.batch, num_microbatches=rng.randint(2, 6)),
        protocol=replace(scenario.protocol, routing="flow"),
        faults=() if seed % 4 == 3 else scenario.faults,
    )
    if seed % 3 == 0:
        slow = replace(scenario.profile, forward_s=_SLOW_FORWARD_S)
        scenario = replace(scenario, profile=slow, num_iterations=_NUM_SLOW_ITERATIONS)
    calm_s = (scenario.calm_s or 0.0) - _DURATION_MAX_S
    faults = []
    for index in range(num_clients):
        for _ in range(rng.randint(0, _FAULTS_PER_CLIENT_MAX)):
            kind = rng.choice(_CLIENT_FAULTS if index else _CLIENT_FAULTS[:6])
            at_s = round(rng.uniform(BEGIN_S, calm_s), 3)
            duration_s = round(rng.uniform(0.3, _DURATION_MAX_S), 3)
            faults.append(HostFault(kind, f"client{index}", at_s=at_s, duration_s=duration_s))
    both = sorted((*scenario.faults, *faults), key=lambda fault: fault.at_s or 0.0)
    if seed % 3 == 0:
        # A pass would take a minute, and the run would seem to stand still.
        both = [fault for fault in both if fault.kind is not FaultKind.SLOW]
    return replace(scenario, faults=tuple(both))
