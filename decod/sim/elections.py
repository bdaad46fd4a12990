"""Runs with faults in the middle of commits, mends and elections, to strike their leaders.

In `decod.sim.storm` faults come at any time. Here most faults strike a host just before it sends a
certain message. Links around data nodes are cut, often in one direction. The protocol's timeouts
are short compared with the faults, so a run has several elections.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, OptimizerConfig
from decod.sim.kernel import seeded
from decod.sim.network import LinkFaults, Links
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Cut, FaultKind, HostFault, Scenario

_BEGIN_S = 2.5
"""By this instant all nodes have joined."""

_DURATION_MAX_S = 8.0

_LED: tuple[str, ...] = (
    "Commit",
    "Commit",
    "Commit",
    "BeginAggregation",
    "BeginAggregation",
    "Abort",
    "Mend",
)
"""Messages that the leader is about to send when a fault strikes it."""

_DEPUTY: tuple[str, ...] = (
    "Canvass",
    "Candidacy",
    "Candidacy",
    "Candidacy",
    "Vote",
    "Commit",
    "Abort",
    "Ready",
)
"""The same for data nodes that do not lead."""

_RELAY: tuple[str, ...] = ("Ready", "Ready", "ReducePart", "ReducedPart", "Vote", "CanvassAnswer")

_NUM_MAX = {"Canvass": 8, "Candidacy": 8, "Vote": 2, "CanvassAnswer": 3, "Abort": 6, "Mend": 6}
"""A fault strikes before the n-th message of its kind, with n at most this. Kinds without an entry
use `_NUM_OTHERS_MAX`."""

_NUM_OTHERS_MAX = 24


Plot = Callable[[random.Random, Scenario, float], Scenario]
"""Returns a scenario in which certain faults come together at an instant."""


def election_storm(seed: int, *, plot: Plot | None = None, num_iterations: int = 12) -> Scenario:
    """Return a small run with two or three data nodes, and its faults.

    Args:
        seed: Determines everything that is drawn.
        plot: Determines the faults; drawn if not given.
        num_iterations: Number of iterations to commit.
    """
    rng = seeded(seed, "elections")
    num_data = rng.choice((2, 3, 3))
    num_stages = rng.choice((1, 1, 2))
    calm_s = _BEGIN_S + rng.uniform(3.0, 10.0)
    scenario = Scenario(
        seed=seed,
        num_relays=num_stages * 2 + rng.randint(0, 2),
        batch=BatchConfig(num_data_nodes=num_data, num_microbatches=rng.randint(1, 2)),
        stages=StagesConfig(num_relay_stages=num_stages),
        capacity_min=2,
        capacity_max=3,
        num_iterations=num_iterations,
        optimizer=OptimizerConfig(clip_norm=float(seed % 5 == 4)),
        duration_max_s=1800.0,
        calm_s=round(calm_s + _DURATION_MAX_S, 3),
        profile=ComputeProfile(optimizer_s=rng.choice((0.02, 0.1, 0.5)), activation_bytes=100_000),
        links=Links(spread_ratio=0.5),
        link_faults=_bad_links(rng, calm_s),
        protocol=ProtocolConfig(
            min_nodes_per_stage=2,
            min_data_nodes=num_data,
            routing="greedy",
            heartbeat_interval_s=0.25,
            heartbeat_timeout_s=1.0,
            probe_timeout_s=0.6,
            election_timeout_s=rng.choice((0.4, 0.4, 1.0)),
            iteration_timeout_s=20.0,
            leader_timeout_s=15.0,
        ),
    )
    plot = plot or rng.choice((None, None, *_PLOTS))
    if plot is not None:
        return plot(rng, scenario, round(rng.uniform(_BEGIN_S, calm_s), 3))
    faults = _faults(rng, scenario, calm_s=calm_s)
    return replace(scenario, faults=faults, cuts=_cuts(rng, scenario, calm_s=calm_s))


def _bad_links(rng: random.Random, calm_s: float) -> LinkFaults:
    some = rng.random() < 0.6
    return LinkFaults(
        loss_ratio=rng.choice((0.0, 0.02, 0.05)) * some,
        duplicate_ratio=rng.choice((0.0, 0.05)) * some,
        delay_ratio=rng.choice((0.0, 0.05)) * some,
        delay_max_s=rng.choice((0.5, 2.0)),
        reorder_ratio=rng.choice((0.0, 0.05)) * some,
        retry_timeout_s=rng.choice((0.6, 3.0)),
        until_s=round(calm_s, 3),
    )


def _faults(rng: random.Random, scenario: Scenario, *, calm_s: float) -> tuple[HostFault, ...]:
    names = scenario.host_names
    num_data = scenario.batch.num_data_nodes
    spared = {rng.choice(names[:num_data]), *rng.sample(names[num_data:], 2)}
    faults = []
    for _ in range(rng.randint(2, 6)):
        group = rng.choice((names[:1], names[1:num_data], names[:num_data], names[num_data:]))
        host = rng.choice(group)
        kinds = [FaultKind.FREEZE, FaultKind.FREEZE, FaultKind.RESTART]
        if host not in spared:
            kinds += [FaultKind.KILL, FaultKind.VANISH]
        said = _DEPUTY if host in names[1:num_data] else _RELAY
        if host == names[0]:
            said = _LED
        message = rng.choice(said)
        fault = HostFault(
            rng.choice(kinds),
            host,
            before_message=(message, rng.randint(1, _NUM_MAX.get(message, _NUM_OTHERS_MAX))),
            duration_s=round(rng.uniform(0.2, _DURATION_MAX_S), 3),
        )
        if rng.random() < 0.3:
            at_s = round(rng.uniform(_BEGIN_S, calm_s), 3)
            fault = replace(fault, before_message=None, at_s=at_s)
        if rng.random() < 0.15:
            fault = replace(fault, kind=rng.choice((FaultKind.SLOW, FaultKind.DISK)))
        faults.append(fault)
    return tuple(faults)


def _cuts(rng: random.Random, scenario: Scenario, *, calm_s: float) -> tuple[Cut, ...]:
    """Return cuts around one data node, and cuts into halves with or without a bridge host."""
    cuts = []
    names = scenario.host_names
    num_data = scenario.batch.num_data_nodes
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        one = rng.choice(names[:num_data])
        others = [name for name in names if name != one]
        rng.shuffle(others)
        some = others[: rng.randint(1, len(others))]
        here, there = ([one], some) if rng.random() < 0.6 else (some, [one])
        if rng.random() < 0.3:
            middle = len(others) // 2
            here = [one, *others[:middle]]
            there = others[middle + (rng.random() < 0.5) :]
        at_s = round(rng.uniform(_BEGIN_S, calm_s), 3)
        duration_s = round(rng.uniform(0.3, _DURATION_MAX_S), 3)
        cuts.append(Cut(tuple(here), tuple(there), at_s, duration_s, rng.random() < 0.4))
    return tuple(cuts)


# --- plots: faults that would rarely come together by chance --------------------------------------


def _slow_one(rng: random.Random, scenario: Scenario) -> tuple[str, Scenario]:
    """Make one node that does not lead the last to vote, by far, in every iteration."""
    one = rng.choice(scenario.host_names[1:])
    slow = HostFault(FaultKind.SLOW, one, at_s=_BEGIN_S - 0.5, duration_s=60.0)
    profile = replace(scenario.profile, optimizer_s=0.3)
    return one, replace(scenario, faults=(slow,), profile=profile, link_faults=LinkFaults())


def silent_voter(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:
    """Lose the leader once all nodes but one have voted, and stall that one."""
    one, scenario = _slow_one(rng, scenario)
    lost = rng.choice((FaultKind.KILL, FaultKind.VANISH, FaultKind.FREEZE))
    away_s = round(rng.uniform(1.0, 5.0), 3)
    faults = (
        HostFault(lost, scenario.host_names[0], at_s=at_s, duration_s=8.0),
        HostFault(FaultKind.FREEZE, one, at_s=at_s, duration_s=away_s),
    )
    return replace(scenario, faults=(*scenario.faults, *faults))


def unheard_leader(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:
    """Cut the leader's links to all others, one way. Each candidate stalls while it is elected."""
    _, scenario = _slow_one(rng, scenario)
    scenario = scenario.with_values({("protocol", "election_timeout_s"): 1.0})
    first, *others = scenario.host_names
    stalls = [
        HostFault(
            FaultKind.FREEZE,
            deputy,
            before_message=("Candidacy", 1),
            duration_s=round(rng.uniform(0.7, 1.2), 3),
        )
        for deputy in others[: scenario.batch.num_data_nodes - 1]
    ]
    cut = Cut((first,), tuple(others), at_s, 6.0, both_ways=False)
    return replace(scenario, faults=(*scenario.faults, *stalls), cuts=(cut,))


def forgetful_voters(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:
    """Restart the voters. Their candidate counts the old votes when another has been elected."""
    num_relays = scenario.stages.num_relay_stages * 2 + 1
    scenario = replace(
        scenario,
        batch=replace(scenario.batch, num_data_nodes=3),
        num_relays=num_relays,
        link_faults=LinkFaults(),
    ).with_values({("protocol", "min_data_nodes"): 3, ("protocol", "election_timeout_s"): 0.4})
    first, candidate, other, *relays = scenario.host_names
    stalls_s = round(rng.uniform(0.8, 1.2), 3)
    back_s = round(rng.uniform(0.1, 0.5), 3)
    faults = [
        HostFault(FaultKind.FREEZE, first, at_s=at_s, duration_s=stalls_s),
        HostFault(FaultKind.FREEZE, other, at_s=at_s, duration_s=stalls_s),
        HostFault(FaultKind.FREEZE, candidate, before_message=("Candidacy", 1), duration_s=20.0),
        HostFault(FaultKind.KILL, first, at_s=at_s + round(rng.uniform(8.0, 14.0), 3)),
    ]
    faults += [
        HostFault(FaultKind.RESTART, relay, before_message=("LeaderIs", 1), duration_s=back_s)
        for relay in relays
    ]
    return replace(
        scenario,
        faults=tuple(faults),
        cuts=(Cut((candidate,), (other,), at_s, 20.0),),
        calm_s=at_s + 24.0,
        num_iterations=2 * scenario.num_iterations,
    )


def late_parts(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:
    """Lose a relay while its stage reduces; its parts arrive afterwards."""
    scenario = replace(scenario, num_relays=scenario.stages.num_relay_stages * 3 + 1)
    late = LinkFaults(delay_ratio=0.3, delay_max_s=1.0, until_s=at_s + 5.0)
    faults = tuple(
        HostFault(
            rng.choice((FaultKind.KILL, FaultKind.FREEZE)),
            relay,
            before_message=(rng.choice(("ReducePart", "ReducedPart", "Ready")), rng.randint(3, 9)),
            duration_s=5.0,
        )
        for relay in rng.sample(scenario.host_names[scenario.batch.num_data_nodes :], 2)
    )
    return replace(scenario, faults=faults, link_faults=late)


def heard_twice(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:
    """Stall relays for so long that messages to them seem lost and are sent again."""
    faults = tuple(
        HostFault(
            FaultKind.FREEZE,
            rng.choice(scenario.host_names[scenario.batch.num_data_nodes :]),
            at_s=round(rng.uniform(_BEGIN_S, at_s + 4.0), 3),
            duration_s=round(rng.uniform(0.4, 0.9), 3),
        )
        for _ in range(12)
    )
    late = LinkFaults(delay_ratio=0.1, delay_max_s=0.5, retry_timeout_s=0.2, until_s=at_s + 5.0)
    return replace(scenario, faults=faults, link_faults=late)


def small_half(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:
    """Cut one data node and one relay off from the others, who go on without them."""
    num_relays = scenario.stages.num_relay_stages * 3 + 1
    scenario = replace(scenario, num_relays=num_relays, link_faults=LinkFaults())
    names = scenario.host_names
    num_data = scenario.batch.num_data_nodes
    half = (names[rng.randrange(1, num_data)], rng.choice(names[num_data:]))
    rest = tuple(name for name in names if name not in half)
    cut = Cut(half, rest, at_s, round(rng.uniform(3.0, 6.0), 3))
    return replace(scenario, cuts=(cut,))


_EARLY = (("Abort", 4), ("Abort", 4), ("Heartbeat", 12), ("ForwardActivation", 4))
"""Messages before which the leader is lost in the first iteration, with the largest number of
each."""


def early_loss(rng: random.Random, scenario: Scenario, at_s: float) -> Scenario:  # noqa: ARG001
    """Lose the leader while the first iteration begins, before all nodes have heard of the
    iteration."""
    said, num = rng.choice(_EARLY)
    lost = rng.choice((FaultKind.KILL, FaultKind.VANISH))
    fault = HostFault(lost, scenario.host_names[0], before_message=(said, rng.randint(1, num)))
    scenario = scenario.with_values(
        {
            # Long enough that no other node is given up before the leader is.
            ("protocol", "heartbeat_timeout_s"): 3.0,
            ("protocol", "probe_timeout_s"): 2.0,
            ("protocol", "leader_timeout_s"): 30.0,
            ("link_faults", "loss_ratio"): 0.05,
        }
    )
    return replace(scenario, faults=(fault,))


_PLOTS = (silent_voter, unheard_leader, forgetful_voters, late_parts)
