"""A newcomer gets its stage's state while the others train on: nobody waits for it."""

import re
from dataclasses import dataclass, replace

import pytest

from decod.protocol.core import effects as fx
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.sim.averages import SimulatedState
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import FaultKind, HostFault, HostSpec, Scenario
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation

PROFILE = ComputeProfile(jitter_ratio=0.0, parameter_bytes=8_000_000, forward_s=0.05)
"""A state weighs 24 MB, an average 8 MB."""

NO_MARKS = ProtocolConfig(snapshot_every_iterations=0)
"""Copies for disks travel over the same links."""

LINK = LinkSpec(0.02, 10_000_000.0)


@dataclass(frozen=True)
class Story:
    """What came of a run, as its trace tells."""

    trace: str
    ends_s: dict[int, float]
    """When each iteration was committed."""

    def lengths_s(self) -> dict[int, float]:
        """Return how long each iteration took."""
        starts_s = {i + 1: end_s for i, end_s in self.ends_s.items()}
        return {i: end_s - starts_s[i] for i, end_s in self.ends_s.items() if i in starts_s}


def scenario(*faults: HostFault, num_relays: int, **links: object) -> Scenario:
    names = [f"relay{index}" for index in range(num_relays)]
    relays = [HostSpec(name=name, stage_index=1, capacity=4, profile=PROFILE) for name in names]
    return Scenario(
        num_relays=num_relays,
        stages=StagesConfig(num_relay_stages=1),
        num_iterations=20,
        profile=PROFILE,
        hosts=(HostSpec(name="data0", stage_index=0, capacity=8, profile=PROFILE), *relays),
        links=Links(LINK, **links),
        faults=faults,
        protocol=replace(NO_MARKS, min_nodes_per_stage=num_relays),
    )


def told(simulation: Simulation) -> Story:
    trace = "\n".join(simulation.run().trace)
    found = re.findall(r"^ *([\d.]+) data0 +iteration (\d+)\.\d+ is committed", trace, re.MULTILINE)
    return Story(trace, {int(iteration): float(end_s) for end_s, iteration in found})


def when(story: Story, host: str, text: str) -> float:
    """Return when a host last said something."""
    lines = re.findall(rf"^ *([\d.]+) {host} +{text}", story.trace, re.MULTILINE)
    assert lines, f"{host} never said {text!r}"
    return float(lines[-1])


def first(story: Story, host: str, text: str) -> float:
    found = re.search(rf"^ *([\d.]+) {host} +{text}", story.trace, re.MULTILINE)
    assert found is not None, f"{host} never said {text!r}"
    return float(found[1])


@pytest.mark.parametrize("num_relays", [2, 3])
def test_while_a_newcomer_loads_no_commit_is_later_than_without_it(num_relays: int) -> None:
    """With two relays the one that stays is its stage's only one, and makes no average by itself.

    Until the newcomer's process is killed, both runs are the same; then in one it comes back.
    """
    name = f"relay{num_relays - 1}"
    gone = HostFault(FaultKind.KILL, name, at_s=9.0)
    back = HostFault(FaultKind.RESTART, name, at_s=9.0, duration_s=3.0)
    alone = told(Simulation(scenario(gone, num_relays=num_relays)))
    story = told(Simulation(scenario(back, num_relays=num_relays)))
    asked_s = when(story, name, "members asked for")
    fetched_s = first(story, name, r"state of iteration \d+ loaded")
    without_s, lengths_s = alone.lengths_s(), story.lengths_s()
    loading = [i for i, end_s in story.ends_s.items() if asked_s < end_s < fetched_s]
    assert len(loading) >= 2, story.trace
    # An average costs a stage's only member two short jobs.
    late_s = 2 * PROFILE.reduce_s if num_relays == 2 else 0.0
    assert all(lengths_s[i] < without_s[i] + late_s + 0.001 for i in loading), lengths_s
    # It enters with the commit after that. Then the last average is on its way to it, and what two
    # members exchange takes as long.
    travel_s = PROFILE.parameter_bytes / LINK.bandwidth_bytes_per_s
    assert max(lengths_s[i] for i in range(7, 20)) < without_s[19] + 2 * travel_s + 0.1, lengths_s
    entered = re.findall(rf"^ *([\d.]+) {name} +iteration (\d+)\.1 with", story.trace, re.MULTILINE)
    assert float(entered[-1][0]) > fetched_s


@pytest.mark.parametrize("offset_s", [0.0, 0.3, 0.6, 0.9, 1.2, 1.5])
def test_a_newcomer_may_come_at_any_time_of_an_iteration(offset_s: float) -> None:
    """In the reduction, between votes and commit, wherever: what it holds then is what others do.

    The checker compares all parameters after each commit (I3).
    """
    back = HostFault(FaultKind.RESTART, "relay2", at_s=9.0, duration_s=2.0 + offset_s)
    simulation = Simulation(scenario(back, num_relays=3))
    story = told(simulation)
    hosts = [simulation.hosts[f"relay{index}"] for index in range(3)]
    assert len({host.compute.parameter_hash for host in hosts}) == 1
    assert {host.compute.iteration for host in hosts} == {20}
    assert "relay2 is gone" in story.trace.partition("iteration 12.1")[0]
    assert "relay2 is gone" not in story.trace.partition("iteration 12.1")[2]


def test_a_newcomer_that_can_not_keep_up_stays_outside_and_tries_less_and_less_often() -> None:
    slow = {("relay0", "relay2"): LinkSpec(0.02, 1_000_000.0)}
    slow |= {("relay1", "relay2"): LinkSpec(0.02, 1_000_000.0)}
    gone = HostFault(FaultKind.KILL, "relay2", at_s=9.0)
    back = HostFault(FaultKind.RESTART, "relay2", at_s=9.0, duration_s=3.0)
    alone = told(Simulation(scenario(gone, num_relays=3, overrides=slow)))
    simulation = Simulation(scenario(back, num_relays=3, overrides=slow))
    story = told(simulation)
    assert "it takes averages more slowly than they are made; it tries again in 30 s" in story.trace
    steady_s, lengths_s = alone.lengths_s()[19], story.lengths_s()
    assert all(lengths_s[i] < steady_s + 0.11 for i in range(8, 20)), (steady_s, lengths_s)


def test_a_state_of_a_liar_never_enters() -> None:
    """The average behind it says from which parameters it starts; another donor is followed."""
    back = HostFault(FaultKind.RESTART, "relay2", at_s=9.0, duration_s=3.0)
    simulation = Simulation(scenario(back, num_relays=3))
    liars = [simulation.hosts["relay0"], simulation.hosts["relay1"]]
    for host in liars:
        lie_once(host, liars)
    story = told(simulation)
    assert "it has come to other parameters than its stage; it tries again in 1 s" in story.trace
    assert "parameters differ" not in story.trace
    assert "is repeated: members" not in story.trace
    assert when(story, "relay2", r"iteration \d+\.1 with 4 members") > 12.0


def lie_once(host: SimHost, liars: list[SimHost]) -> None:
    """Let the first state that one of these hosts gives be another."""
    serve = host._perform_one[fx.ServeState]

    def lie(effect: fx.ServeState) -> None:
        if liars:
            liars.clear()
            stored = host.tensors.usable(effect.tensor, effect)
            stored.content = SimulatedState(1, effect.iteration, "f" * 64)
        serve(effect)

    host._perform_one[fx.ServeState] = lie
